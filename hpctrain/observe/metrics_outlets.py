"""Gives metrics to whoever collects them: over HTTP, and as files for node_exporter.

A scrape gets what the last pass has collected, so that it costs nothing, however often it comes.
Belongs here: the server, the text file, the address of an endpoint inside a job. Does not belong
here: what is measured (`exporter`), text formats (`hpctrain.observe.samples`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.base import clock
from hpctrain.base.durable import replace_bytes, replace_text
from hpctrain.base.errors import UsageError
from hpctrain.observe.samples import SampleCollector, exposed
from hpctrain.records.layout import RunLayout

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from hpctrain.observe.samples import Sample

DEFAULT_ADDRESS = "127.0.0.1:9847"
# node_exporter runs as a user of its own, and reads files with this ending only.
_TEXTFILE_MODE, _TEXTFILE_ENDING = 0o644, ".prom"
_TEXTFILE_PREFIX = "hpctrain-"
_FILE_SD_DIRECTORY = ".file_sd"
# A file that its writer has not replaced for so long is of a job that was killed.
_ABANDONED_SECONDS = 900.0


def parse_address(text: str) -> tuple[str, int]:
    """Split `HOST:PORT`, `[::1]:PORT` or `:PORT` (all addresses of this host).

    Raises UsageError.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"`{text}` is no address", hint=f"as in `{DEFAULT_ADDRESS}`")
    return host.strip("[]"), int(port)


class MetricsServer:
    """Serves /metrics on one address from now on; other paths answer with one line."""

    def __init__(self, host: str, port: int) -> None:
        """Raises UsageError if the address cannot be listened on."""
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        self._collector = SampleCollector()
        registry.register(self._collector)
        try:
            started: Any = start_http_server(port, addr=host or "0.0.0.0", registry=registry)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host or '*'}:{port}: {error.strerror or error}",
                hint="choose another address with `--listen HOST:PORT`",
            ) from error
        self._server: WSGIServer = started[0]

    @property
    def port(self) -> int:
        """The port, also where 0 asked for any."""
        return int(self._server.server_address[1])

    def replace(self, samples: list[Sample]) -> None:
        """Serve these samples from the next scrape on."""
        self._collector.replace(samples)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class Textfile:
    """One file in the directory that node_exporter reads (`--collector.textfile.directory`)."""

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{_TEXTFILE_PREFIX}{name}{_TEXTFILE_ENDING}"

    def replace(self, samples: list[Sample]) -> None:
        """Write the samples. Raises OSError."""
        text = exposed(samples, open_metrics=False)
        replace_bytes(self.path, text, mode=_TEXTFILE_MODE, durable=False)

    def remove(self) -> None:
        """Remove the file: its values are of the past."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    def remove_abandoned(self, now: float | None = None) -> None:
        """Remove files of this user whose writers were killed before they could."""
        now = clock.now() if now is None else now
        with contextlib.suppress(OSError):
            for path in self.path.parent.glob(f"{_TEXTFILE_PREFIX}*{_TEXTFILE_ENDING}"):
                with contextlib.suppress(OSError):
                    found = path.stat()
                    old = now - found.st_mtime > _ABANDONED_SECONDS
                    if old and found.st_uid == os.getuid() and path != self.path:
                        path.unlink()


@contextlib.contextmanager
def published_endpoint(run: RunLayout, target: str) -> Iterator[None]:
    """Name the endpoint of a job in its run directory, and for file_sd, as long as it is open.

    Prometheus finds `RUNS/.file_sd/*.json` by one pattern, for only the last part of a path of
    `file_sd_configs` may be one. Raises OSError if the run directory is away.
    """
    text = json.dumps([{"targets": [target], "labels": {}}])
    discovered = run.directory.parent / _FILE_SD_DIRECTORY / f"{run.run_id}.json"
    replace_text(run.metrics_endpoint, text, mode=0o600, durable=False)
    with contextlib.suppress(OSError):  # the directory of runs may be somebody else's
        discovered.parent.mkdir(exist_ok=True)
        replace_text(discovered, text, mode=0o644, durable=False)
    try:
        yield
    finally:
        for path in (run.metrics_endpoint, discovered):
            with contextlib.suppress(OSError):
                path.unlink()


def host_name(environment: Mapping[str, str]) -> str:
    """Find the name by which other hosts reach this one: Slurm's, if it can be resolved."""
    for name in (environment.get("SLURMD_NODENAME"), socket.gethostname()):
        if name:
            with contextlib.suppress(OSError):
                socket.getaddrinfo(name, None)
                return name
    return "127.0.0.1"
