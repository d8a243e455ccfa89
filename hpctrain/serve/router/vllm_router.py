"""vllm-router, with HAProxy before it where there is one.

Tried with vllm-router 0.1.17: it starts without a replica, tries a request again on another replica
when one answers 5xx or breaks off before its answer begins, lets requests end on a replica that was
removed, and after SIGINT those that have begun. It has no TLS, no tokens and no rate of one client,
whoever reaches its port may add replicas, and a path that it does not know goes to a replica.
`power_of_two` does not start without two replicas. `sticky_least_loaded` gives all requests without
a session to one replica, takes X-Request-Id for the name of a session, and asks the replica of a
session again after its death. `cache_aware` without tolerance is what balances by requests under
way. Belongs here: its words, its commands and its own counts. Does not belong here: HAProxy.
"""

from __future__ import annotations

import contextlib
import json
import signal
import socket
from http import HTTPStatus
from urllib.parse import quote

from hpctrain.base import clock, reserved_ports
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.records.service_records import ServiceSettings
from hpctrain.serve.http_request import http_request
from hpctrain.serve.router.haproxy import Haproxy
from hpctrain.serve.router.programs import Child, Counts, Place, PortTakenError, listen
from hpctrain.telemetry.scraped_text import ScrapedText

_POLICIES = {
    "least_loaded": "cache_aware",
    "round_robin": "round_robin",
    "cache_aware": "cache_aware",
}
# A larger difference of requests under way than this counts more than a cached prompt.
_NO_TOLERANCE = {"balance-abs-threshold": 0, "balance-rel-threshold": 1.0}
# A dead replica ends its requests at once and so looks like the least loaded one. After two of them
# it is left alone for a moment, so that the third try is another replica's; by default it is after
# ten, and then for a minute, which any client could cause.
_MOST_FAILURES, _LEFT_ALONE_SECONDS = 2, 2
# It waits for a replica to be healthy before it adds it; ours have answered a request already.
_ADD_SECONDS = 5
_START_SECONDS = 60.0
# Others may listen on a port between its choice and the program's start; so many in a row do not.
_TRIES_OF_PORTS = 3
_CALL_SECONDS = 10.0
_HEALTH_SECONDS = 2
_PROGRAM, _LOOPBACK = "vllm-router", "127.0.0.1"
# What it counts: requests with an answer, tries that failed (by reason), requests that were given
# up, and those under way.
_SERVED, _FAILED_TRIES = "vllm_router_requests_total", "vllm_router_request_errors_total"
_GIVEN_UP, _UNDER_WAY = "vllm_router_retries_exhausted_total", "vllm_router_running_requests"
_NO_REPLICA = "no_available_workers"


class VllmRouter:
    """vllm-router; with `front`, clients reach that, and vllm-router is on the loopback device."""

    def __init__(
        self, program: str, settings: ServiceSettings, place: Place, front: Haproxy | None
    ) -> None:
        self._program, self._router, self._place = program, settings.router, place
        self._front = front
        # What it listens on: alone, what HAProxy would.
        self._host = (self._router.address or place.host) if front is None else _LOOPBACK
        self._child: Child | None = None
        self._port = self._metrics_port = 0
        self._reserved: list[socket.socket] = []
        self._last_requests = 0
        self._last_request_at: float | None = None

    @property
    def port(self) -> int:
        """The port that clients reach."""
        return self._port if self._front is None else self._front.port

    def start(self) -> None:
        if self._front is not None:
            self._front.start()
        self._choose_ports()
        self._start_child(may_move=True)

    def problem(self) -> str | None:
        own = None if self._child is None else self._child.problem()
        return own or (None if self._front is None else self._front.problem())

    def restart(self) -> None:
        if self._child is not None and self._child.problem() is not None:
            self._child.kill()
            if self._front is not None:
                self._front.remove(self._url)
            self._start_child(may_move=self._front is not None)
        if self._front is not None and self._front.problem() is not None:
            self._front.restart()

    def add(self, url: str) -> bool:
        # 400 with these words for one that it has; it says so of one that is no longer healthy, too
        status, words = self._call("POST", f"/add_worker?url={quote(url, safe='')}")
        added = status == HTTPStatus.OK or "already exists" in words
        return self._open_or_close() and added

    def remove(self, url: str) -> bool:
        status, _ = self._call("POST", f"/remove_worker?url={quote(url, safe='')}")
        self._open_or_close()
        return status == HTTPStatus.OK

    def replicas(self) -> frozenset[str] | None:
        known = self._listed()
        if known is None or self._front is None:
            return known
        behind = self._front.replicas()
        # Where HAProxy was started anew, all replicas are to be added again.
        return behind if behind is None or self._url not in behind else known

    def _listed(self) -> frozenset[str] | None:
        """The replicas that vllm-router itself has; None if it does not answer."""
        status, words = self._call("GET", "/list_workers")
        if status != HTTPStatus.OK:
            return None
        with contextlib.suppress(ValueError):
            urls = json.loads(words)
            if isinstance(urls, dict) and isinstance(urls.get("urls"), list):
                return frozenset(str(url) for url in urls["urls"])
        return None

    def counts(self) -> Counts:
        """What HAProxy has counted; else what vllm-router shows, and that is less.

        A request counts there when its answer begins and if it is for the model; those under way
        are shown by a policy that balances by them.
        """
        if self._front is not None:
            return self._front.counts()
        _, words = self._call("GET", "/metrics", self._metrics_port)
        names = (_SERVED, _FAILED_TRIES, _GIVEN_UP, _UNDER_WAY)
        shown = ScrapedText(words, names)
        served, given_up, under_way = (
            int(shown.total(name) or 0) for name in (_SERVED, _GIVEN_UP, _UNDER_WAY)
        )
        # A request without a replica is refused at each of its tries.
        tries = shown.by(_FAILED_TRIES, "error_type").get(_NO_REPLICA, 0.0)
        refused = int(tries // self._tries)
        requests = served + given_up
        if requests > self._last_requests:
            self._last_request_at = clock.now()
        self._last_requests = requests
        return Counts(
            requests=requests,
            failed=max(0, given_up - refused),
            refused=refused,
            limited=0,
            in_flight=under_way,
            last_request=self._last_request_at,
        )

    def refresh(self) -> None:
        if self._front is not None:
            self._front.refresh()

    def stop(self, seconds: float) -> None:
        if self._front is not None:
            self._front.stop(seconds)
        if self._child is not None:
            if self._front is None:
                self._child.signal(signal.SIGINT)
                self._child.ended_within(seconds)
            self._child.kill()
        self._release_ports()

    # -- the process -----------------------------------------------------------------------

    @property
    def _url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def _tries(self) -> int:
        """How often one request is tried, the first time included."""
        return self._router.retries + 1

    def _open_or_close(self) -> bool:
        """Let HAProxy give requests to vllm-router while that has a replica; False if it will not.

        HAProxy answers with 503 otherwise. A replica that goes meanwhile is seen by its check.
        """
        known = self._listed()
        if self._front is None or known is None:
            return known is not None
        return self._front.add(self._url) if known else self._front.remove(self._url)

    def _choose_ports(self) -> None:
        """Reserve a port for it and one for its metrics, until it is stopped.

        Alone it takes an allowed one, as HAProxy would. Raises OSError, PortTakenError.
        """
        self._release_ports()
        self._reserved = [reserved_ports.reserve_any(), reserved_ports.reserve_any()]
        numbers = (reserved_ports.number_of(reserved) for reserved in self._reserved)
        self._port, self._metrics_port = numbers
        if self._front is None:
            with listen(self._place, self._router) as allowed:
                self._port = int(allowed.getsockname()[1])

    def _release_ports(self) -> None:
        for reserved in self._reserved:
            reserved.close()

    def _start_child(self, *, may_move: bool) -> None:
        """Start it and wait until it answers: on the ports it had, unless they are another's.

        Raises InvalidInputError, OSError; PortTakenError if its port is another's and clients know
        it (`may_move` is False).
        """
        for left in reversed(range(_TRIES_OF_PORTS)):
            try:
                self._try_to_start()
                return
            except InvalidInputError as error:
                wanted = (self._host, self._port), (_LOOPBACK, self._metrics_port)
                if all(reserved_ports.is_free(host, number) for host, number in wanted) or not left:
                    raise
                if not may_move:
                    raise PortTakenError(str(error)) from error
                self._choose_ports()

    def _try_to_start(self) -> None:
        log = self._place.logs / f"{_PROGRAM}.log"
        self._child = Child(self._words(), log, environment=self._place.environment)
        deadline = clock.monotonic() + _START_SECONDS
        while self._listed() is None:
            problem = self._child.problem()
            if problem is not None:
                raise InvalidInputError([Problem(problem, str(log))])
            if clock.monotonic() > deadline:
                self._child.kill()
                words = f"{_PROGRAM} did not answer within {_START_SECONDS:.0f} s"
                raise InvalidInputError([Problem(words, str(log))])
            clock.sleep(0.05)

    def _words(self) -> list[str]:
        """Its command line; `vllm-router --help` of 0.1.17 has these options."""
        router = self._router
        options = {
            "host": self._host,
            "port": self._port,
            "policy": _POLICIES[router.policy],
            "prometheus-host": _LOOPBACK,
            "prometheus-port": self._metrics_port,
            "worker-startup-timeout-secs": _ADD_SECONDS,
            "worker-startup-check-interval": 1,
            "health-check-interval-secs": _HEALTH_SECONDS,
            "health-check-timeout-secs": _HEALTH_SECONDS,
            "cb-failure-threshold": max(1, min(_MOST_FAILURES, router.retries)),
            "cb-timeout-duration-secs": _LEFT_ALONE_SECONDS,
            "cb-success-threshold": 1,
            "retry-max-retries": self._tries,
            "retry-initial-backoff-ms": 20,
            "retry-max-backoff-ms": 1000,
            "log-level": "warning",
            **(_NO_TOLERANCE if router.policy == "least_loaded" else {}),
        }
        words = [self._program]
        for name, value in options.items():
            words += [f"--{name}", str(value)]
        return words

    def _call(self, method: str, path: str, metrics_port: int | None = None) -> tuple[int, str]:
        """Ask vllm-router; the status is 0 if it does not answer."""
        at = (self._host, self._port) if metrics_port is None else (_LOOPBACK, metrics_port)
        status, text = http_request(at, method, path, _CALL_SECONDS)
        return status, text.decode(errors="replace")
