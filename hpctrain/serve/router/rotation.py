"""Keep the router's replicas those that answer: from the directory of endpoints, twice a second.

A replica leaves by removing its endpoint and waiting until `rotation.json` no longer names it, so
that file is written after the router was told, never before. Belongs here: the loop, reading
endpoints, and the health checks. Does not belong here: the router (`programs`).
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path

from hpctrain.base import clock
from hpctrain.records.run_records import read_record, write_record
from hpctrain.records.service_layout import ReplicaName, ServiceLayout
from hpctrain.records.service_records import Endpoint, Rotation
from hpctrain.serve.http_request import address_of, http_request
from hpctrain.serve.replica.life import say
from hpctrain.serve.router.programs import RouterProgram

PASS_SECONDS = 0.25
# An unchanged rotation is written again so often, to show that the loop lives.
_REWRITE_SECONDS = 2.0
# What the router says of its replicas is compared so often: it may have been started anew.
_COMPARE_SECONDS = 2.0
_CHECK_SECONDS, _CHECK_TIMEOUT_SECONDS = 2.0, 2.0
# A replica that fails so many checks in a row is withdrawn; one good check brings it back.
_MOST_FAILED_CHECKS = 3
_CHECKERS = 8


class RotationLoop:
    """Tells a router which replicas to ask, in a thread of its own.

    `is_newest`: whether this router's job is the service's newest; only that one writes the
    rotation. A run directory that is away changes nothing: leases are not renewed then either, so
    what was in rotation stays until the directory answers again.
    """

    def __init__(
        self,
        service: ServiceLayout,
        router: RouterProgram,
        epoch: int,
        is_newest: Callable[[], bool],
        health_path: str = "/health",
    ) -> None:
        self._service, self._router, self._epoch = service, router, epoch
        self._is_newest, self._health_path = is_newest, health_path
        self._reader = EndpointReader(service.endpoints)
        self._asked: dict[ReplicaName, str] = {}
        self._adding: dict[ReplicaName, tuple[str, Future[bool]]] = {}
        self._checks: dict[str, Future[bool]] = {}
        self._failed_checks: dict[str, int] = {}
        self._next_check = self._next_compare = 0.0
        self._written_at = 0.0
        self._written: tuple[str, ...] | None = None
        self._stopping, self._settled = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(_CHECKERS, thread_name_prefix="replica")
        self._thread = threading.Thread(target=self._loop, name="rotation", daemon=True)
        self.passed_at = clock.monotonic()

    def start(self) -> None:
        self._thread.start()

    def await_settled(self, seconds: float) -> None:
        """Wait until the router asks all replicas that answer, but no longer than this."""
        clock.wait(self._settled, seconds)

    def stop(self) -> None:
        """End the loop; the router keeps what it has."""
        self._stopping.set()
        self._thread.join(10)
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def asked(self) -> dict[ReplicaName, str]:
        """The URLs of the replicas that the router asks."""
        return dict(self._asked)

    def _loop(self) -> None:
        while not clock.wait(self._stopping, PASS_SECONDS):
            try:
                self.make_pass()
            except OSError as error:
                say(f"endpoints cannot be read: {error}")
            except Exception:
                traceback.print_exc()

    def make_pass(self) -> None:
        """Compare endpoints and router once. Raises OSError while the service is away."""
        now = clock.now()
        self._compare_with_router()
        endpoints = self._reader.valid(now)
        self._check(endpoints)
        wanted = {
            name: endpoint.url
            for name, endpoint in endpoints.items()
            if self._failed_checks.get(endpoint.url, 0) < _MOST_FAILED_CHECKS
        }
        for name, url in list(self._asked.items()):
            if wanted.get(name) != url and (url in wanted.values() or self._router.remove(url)):
                del self._asked[name]
        self._collect_added(wanted)

        def add(url: str) -> bool:
            return is_well(url, self._health_path) and self._router.add(url)

        for name, url in wanted.items():
            if name in self._asked or name in self._adding:
                continue
            if url in self._asked.values():
                self._asked[name] = url  # its next launch, at the same address
            else:
                self._adding[name] = url, self._pool.submit(add, url)
        self._write(now)
        if not self._adding:
            self._settled.set()
        self.passed_at = clock.monotonic()

    def _collect_added(self, wanted: dict[ReplicaName, str]) -> None:
        """Take note of what the router has added; what was withdrawn meanwhile goes again."""
        for name, (url, adding) in list(self._adding.items()):
            if not adding.done():
                continue
            del self._adding[name]
            with contextlib.suppress(Exception):
                if adding.result():
                    self._asked[name] = url
            if name in self._asked and wanted.get(name) != url and self._router.remove(url):
                del self._asked[name]

    def _compare_with_router(self) -> None:
        """Forget replicas that the router does not have, and remove those that nobody knows."""
        if clock.monotonic() < self._next_compare:
            return
        self._next_compare = clock.monotonic() + _COMPARE_SECONDS
        there = self._router.replicas()
        if there is None:
            return
        self._asked = {name: url for name, url in self._asked.items() if url in there}
        known = {*self._asked.values(), *(url for url, _ in self._adding.values())}
        for url in there - known:
            self._router.remove(url)

    def _check(self, endpoints: dict[ReplicaName, Endpoint]) -> None:
        """Ask each replica whether it is well, a few at a time, and count failures in a row."""
        urls = {endpoint.url for endpoint in endpoints.values()}
        for url, check in list(self._checks.items()):
            if check.done():
                del self._checks[url]
                self._failed_checks[url] = (
                    0 if check.result() else self._failed_checks.get(url, 0) + 1
                )
        self._failed_checks = {u: n for u, n in self._failed_checks.items() if u in urls}
        if clock.monotonic() >= self._next_check:
            self._next_check = clock.monotonic() + _CHECK_SECONDS
            for url in urls - self._checks.keys():
                self._checks[url] = self._pool.submit(is_well, url, self._health_path)

    def _write(self, now: float) -> None:
        """Write the rotation after a change, and sometimes without one."""
        names = tuple(str(name) for name in sorted({*self._asked, *self._adding}))
        if names == self._written and now - self._written_at < _REWRITE_SECONDS:
            return
        if not self._is_newest():
            return
        rotation = Rotation(epoch=self._epoch, time=now, replicas=names)
        write_record(self._service.rotation, rotation, durable=False)
        self._written_at, self._written = now, names


def is_well(url: str, path: str) -> bool:
    """Whether a replica answers its health check with 200."""
    status, _ = http_request(address_of(url), "GET", path, _CHECK_TIMEOUT_SECONDS)
    return status == HTTPStatus.OK


# -- Which replicas may be asked, by the files that their jobs have written ---------------------
# An endpoint counts while its lease runs and no record of a higher epoch of the same generation was
# seen.


class EndpointReader:
    """Reads the endpoints of one service again and again; an unchanged file is not parsed again."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Path, tuple[tuple[int, int, int], Endpoint | None]] = {}
        self._epochs: dict[ReplicaName, int] = {}

    def valid(self, now: float) -> dict[ReplicaName, Endpoint]:
        """The endpoints that count at `now`, seconds since the epoch. Raises OSError.

        Of several with one address the newest counts: a port was given away again.
        """
        paths = [path for path in self._directory.iterdir() if path.suffix == ".json"]
        self._known = {path: known for path, known in self._known.items() if path in paths}
        found: dict[ReplicaName, Endpoint] = {}
        for path in paths:
            name, endpoint = ReplicaName.parse(path.stem), self._read(path)
            if name is None or endpoint is None:
                continue
            newest = self._epochs[name] = max(self._epochs.get(name, 0), endpoint.epoch)
            if endpoint.epoch == newest and endpoint.lease_until >= now:
                found[name] = endpoint
        newest_at: dict[str, float] = {}
        for one in found.values():
            newest_at[one.url] = max(newest_at.get(one.url, 0.0), one.ready_since)
        return {name: one for name, one in found.items() if one.ready_since == newest_at[one.url]}

    def _read(self, path: Path) -> Endpoint | None:
        try:
            status = path.stat()
        except FileNotFoundError:
            return None  # withdrawn since the directory was listed
        seen = status.st_mtime_ns, status.st_size, status.st_ino
        known = self._known.get(path)
        if known is None or known[0] != seen:
            known = self._known[path] = seen, read_record(path, Endpoint)
        return known[1]
