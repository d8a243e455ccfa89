"""Asks engines and routers for their metrics: all at once, for a short time, in the background.

What does not answer in time is counted and not waited for, so that a dead node delays no metrics
of anything else. Addresses come from files that other users may have written: only http and https
are spoken, a redirect is not followed, no credential is sent, and an answer has a largest size.
Belongs here: the requests. Does not belong here: what is asked (`service_metrics`), what answers
mean (`hpctrain.telemetry.scraped_text`).
"""

from __future__ import annotations

import concurrent.futures
import http.client
import urllib.parse
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from hpctrain.base import clock

# One answer of a replica that is alive takes milliseconds, also under load.
ANSWER_SECONDS = 2.0
_AT_ONCE = 32
_MOST_BYTES = 8 * 2**20
_PIECE_BYTES = 2**16
_ACCEPT = {"Accept": "text/plain;version=0.0.4"}


@dataclass(frozen=True)
class MetricsTarget:
    """Whose metrics are asked for: the scheme, host and port of `url`, and a path."""

    url: str
    path: str


def fetch_metrics(target: MetricsTarget, seconds: float = ANSWER_SECONDS) -> str:
    """Ask one target. Raises OSError or ValueError, at the latest after twice the seconds."""
    deadline = clock.monotonic() + seconds
    parts = urllib.parse.urlsplit(target.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{target.url!r} is no address of HTTP")
    kind = http.client.HTTPConnection if parts.scheme == "http" else http.client.HTTPSConnection
    connection = kind(parts.hostname, parts.port, timeout=seconds)
    try:
        connection.request("GET", target.path, headers=_ACCEPT)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}")
        text = b""
        while piece := answer.read1(_PIECE_BYTES):
            text += piece
            if len(text) > _MOST_BYTES or clock.monotonic() > deadline:
                raise ValueError("an answer that does not end")
        return text.decode()
    except http.client.HTTPException as error:
        raise ValueError(f"no HTTP: {type(error).__name__}") from error
    finally:
        connection.close()


class MetricsScraper:
    """Asks targets again and again; one that still owes an answer is not asked a second time."""

    def __init__(self, seconds: float = ANSWER_SECONDS) -> None:
        self._seconds = seconds
        self._pool: ThreadPoolExecutor | None = None
        self._owed: dict[MetricsTarget, Future[str]] = {}
        self._asked: dict[MetricsTarget, Future[str]] = {}
        self._deadline = 0.0

    def begin(self, targets: Collection[MetricsTarget]) -> None:
        """Ask all targets in the background."""
        if self._pool is None and targets:
            self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="metrics")
        before = {**self._owed, **self._asked}
        # A request that has not even begun is taken back, and so owes nothing.
        self._owed = {
            one: asked for one, asked in before.items() if not asked.done() and not asked.cancel()
        }
        self._asked = {}
        if self._pool is not None:
            for target in dict.fromkeys(targets):
                if target not in self._owed:
                    self._asked[target] = self._pool.submit(fetch_metrics, target, self._seconds)
        self._deadline = clock.monotonic() + self._seconds

    def answers(self) -> Mapping[MetricsTarget, str]:
        """Return the answers that come in time after `begin`."""
        left_seconds = max(0.0, self._deadline - clock.monotonic())
        concurrent.futures.wait(self._asked.values(), timeout=left_seconds)
        return {
            target: asked.result()
            for target, asked in self._asked.items()
            if asked.done() and asked.exception() is None
        }
