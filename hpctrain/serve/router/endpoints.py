"""Which replicas may be asked, by the files that their jobs have written.

An endpoint counts while its lease runs and no record of a higher epoch of the same generation was
seen. Belongs here: reading them. Does not belong here: telling the router (`rotation`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hpctrain.records.run_records import read_record
from hpctrain.records.service_layout import ReplicaName
from hpctrain.records.service_records import Endpoint


class EndpointReader:
    """Reads the endpoints of one service again and again; an unchanged file is not parsed again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Path, tuple[tuple[int, int, int], Endpoint | None]] = {}
        self._epochs: dict[ReplicaName, int] = {}

    def valid(self, now: float) -> dict[ReplicaName, Endpoint]:
        """The endpoints that count at `now`, seconds since the epoch. Raises OSError."""
        found = {}
        for name, endpoint in self._all():
            newest = max(self._epochs.get(name, 0), endpoint.epoch)
            self._epochs[name] = newest
            if endpoint.epoch == newest and endpoint.lease_until >= now:
                found[name] = endpoint
        return without_shared_addresses(found)

    def _all(self) -> Iterable[tuple[ReplicaName, Endpoint]]:
        paths = [path for path in self._directory.iterdir() if path.suffix == ".json"]
        self._known = {path: known for path, known in self._known.items() if path in set(paths)}
        for path in paths:
            name, endpoint = ReplicaName.parse(path.stem), self._read(path)
            if name is not None and endpoint is not None:
                yield name, endpoint

    def _read(self, path: Path) -> Endpoint | None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return None  # withdrawn since the directory was listed
        seen = status.st_mtime_ns, status.st_size, status.st_ino
        known = self._known.get(path)
        if known is None or known[0] != seen:
            known = seen, read_record(path, Endpoint)
            self._known[path] = known
        return known[1]


def without_shared_addresses(
    endpoints: dict[ReplicaName, Endpoint],
) -> dict[ReplicaName, Endpoint]:
    """Of several endpoints with one address keep the newest: a port was given away again."""
    newest: dict[str, ReplicaName] = {}
    for name, endpoint in endpoints.items():
        other = newest.get(endpoint.url)
        if other is None or endpoints[other].ready_since < endpoint.ready_since:
            newest[endpoint.url] = name
    return {name: one for name, one in endpoints.items() if newest[one.url] == name}
