"""vllm-router on the loopback device, and the gate before it.

Tried with vllm-router 0.1.17: it starts without a replica, tries a request again on another replica
when one answers 5xx or breaks off before its answer begins, and lets requests end on a replica that
was removed. It has no TLS, no tokens and no rate of one client, whoever reaches its port may add
replicas, and a path that it does not know goes to a replica. `power_of_two` does not start without
two replicas. `sticky_least_loaded` gives all requests without a session to one replica, takes
X-Request-Id for the name of a session, and asks the replica of a session again after its death.
`cache_aware` without tolerance is what balances by requests under way. Belongs here: its words and
its commands. Does not belong here: requests (`gate`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import sys
from pathlib import Path
from urllib.parse import quote

from hpctrain import clock, reserved_ports
from hpctrain.durable import replace_text
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.serving.router.counters import MOST_PROCESSES, Count, Counters
from hpctrain.serving.router.gate_settings import GateSettings
from hpctrain.serving.router.programs import Child, Counts, Place, listen
from hpctrain.store.service_settings import ServiceSettings

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
_PROGRAM = "vllm-router"


class VllmRouter:
    """vllm-router with its gate; `directory` is private, and on a disk of this node."""

    def __init__(
        self, program: str, settings: ServiceSettings, place: Place, directory: Path
    ) -> None:
        self._program, self._settings = program, settings
        self._place, self._directory = place, directory
        self._router: Child | None = None
        self._gates: dict[int, Child] = {}
        self._listener: socket.socket | None = None
        self._router_port = self._metrics_port = 0
        self._reserved: list[socket.socket] = []
        self._counters: Counters | None = None

    @property
    def port(self) -> int:
        """The port that clients reach."""
        assert self._listener is not None, "not started"
        return int(self._listener.getsockname()[1])

    @property
    def metrics_page(self) -> str:
        """Where vllm-router's own metrics are, on this node only."""
        return f"http://127.0.0.1:{self._metrics_port}/metrics"

    def start(self) -> None:
        self._listener = listen(self._place, self._settings.router)
        self._counters = Counters(self._counters_path, create=True)
        self._choose_ports()
        self._start_router()
        self._write_gate_settings()
        for row in range(min(self._settings.router.processes, MOST_PROCESSES)):
            self._start_gate(row)
        self._wait_for_gate()

    def problem(self) -> str | None:
        children = [self._router, *self._gates.values()]
        found = (child.problem() for child in children if child is not None)
        return next((words for words in found if words is not None), None)

    def restart(self) -> None:
        moved = False
        if self._router is not None and self._router.problem() is not None:
            self._router.kill()
            known_port = self._router_port
            self._start_router()
            moved = self._router_port != known_port
        if moved:
            self._write_gate_settings()
        for row, gate in list(self._gates.items()):
            if moved or gate.problem() is not None:
                gate.kill()
                self._start_gate(row)

    def add(self, url: str) -> bool:
        # 400 with these words for one that it has; it says so of one that is no longer healthy, too
        status, words = self._call("POST", f"/add_worker?url={quote(url, safe='')}")
        added = status == http.client.OK or "already exists" in words
        self._tell_gate()
        return added

    def remove(self, url: str) -> bool:
        status, _ = self._call("POST", f"/remove_worker?url={quote(url, safe='')}")
        self._tell_gate()
        return status == http.client.OK

    def replicas(self) -> frozenset[str] | None:
        status, words = self._call("GET", "/list_workers")
        if status != http.client.OK:
            return None
        with contextlib.suppress(ValueError):
            urls = json.loads(words)
            if isinstance(urls, dict) and isinstance(urls.get("urls"), list):
                return frozenset(str(url) for url in urls["urls"])
        return None

    def counts(self) -> Counts:
        counters = self._counters
        assert counters is not None, "not started"
        return Counts(
            requests=int(counters.total(Count.ARRIVALS)),
            failed=int(counters.total(Count.FAILED)),
            refused=int(counters.total(Count.REFUSED)),
            limited=int(counters.total(Count.LIMITED)),
            in_flight=int(counters.total(Count.IN_FLIGHT)),
            last_request=counters.total(Count.LAST_ARRIVAL) or None,
        )

    def stop(self, seconds: float) -> None:
        for gate in self._gates.values():
            gate.signal(signal.SIGINT)
        if self._listener is not None:
            self._listener.close()
        deadline = clock.monotonic() + seconds
        for gate in self._gates.values():
            if not gate.ended_within(max(0.0, deadline - clock.monotonic())):
                gate.kill()
        if self._router is not None:
            self._router.kill()
        self._release_ports()

    # -- vllm-router -----------------------------------------------------------------------

    def _choose_ports(self) -> None:
        """Reserve a port for it and one for its metrics, until it is stopped. Raises OSError."""
        self._release_ports()
        self._reserved = [reserved_ports.reserve_any(), reserved_ports.reserve_any()]
        numbers = (reserved_ports.number_of(reserved) for reserved in self._reserved)
        self._router_port, self._metrics_port = numbers

    def _release_ports(self) -> None:
        for reserved in self._reserved:
            reserved.close()

    def _start_router(self) -> None:
        """Start it and wait until it answers: on the ports it had, unless they are another's.

        Raises InvalidInputError, OSError.
        """
        for left in reversed(range(_TRIES_OF_PORTS)):
            try:
                self._try_to_start_router()
                return
            except InvalidInputError:
                numbers = self._router_port, self._metrics_port
                free = all(reserved_ports.is_free("127.0.0.1", number) for number in numbers)
                if free or not left:
                    raise
                self._choose_ports()

    def _try_to_start_router(self) -> None:
        log = self._place.logs / f"{_PROGRAM}.log"
        self._router = Child(self._words(), log, environment=self._place.environment)
        deadline = clock.monotonic() + _START_SECONDS
        while self.replicas() is None:
            problem = self._router.problem()
            if problem is not None:
                raise InvalidInputError([Problem(problem, str(log))])
            if clock.monotonic() > deadline:
                self._router.kill()
                words = f"{_PROGRAM} did not answer within {_START_SECONDS:.0f} s"
                raise InvalidInputError([Problem(words, str(log))])
            clock.sleep(0.05)

    def _words(self) -> list[str]:
        """Its command line; `vllm-router --help` of 0.1.17 has these options."""
        router = self._settings.router
        options = {
            "host": "127.0.0.1",
            "port": self._router_port,
            "policy": _POLICIES[router.policy],
            "prometheus-host": "127.0.0.1",
            "prometheus-port": self._metrics_port,
            "worker-startup-timeout-secs": _ADD_SECONDS,
            "worker-startup-check-interval": 1,
            "health-check-interval-secs": _HEALTH_SECONDS,
            "health-check-timeout-secs": _HEALTH_SECONDS,
            "cb-failure-threshold": max(1, min(_MOST_FAILURES, router.retries)),
            "cb-timeout-duration-secs": _LEFT_ALONE_SECONDS,
            "cb-success-threshold": 1,
            # its word for tries, the first one included
            "retry-max-retries": router.retries + 1,
            "retry-initial-backoff-ms": 20,
            "retry-max-backoff-ms": 1000,
            "log-level": "warning",
            **(_NO_TOLERANCE if router.policy == "least_loaded" else {}),
        }
        words = [self._program]
        for name, value in options.items():
            words += [f"--{name}", str(value)]
        return words

    def _call(self, method: str, path: str) -> tuple[int, str]:
        """Ask vllm-router; the status is 0 if it does not answer."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self._router_port, timeout=_CALL_SECONDS
        )
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)
        finally:
            connection.close()

    # -- the gate --------------------------------------------------------------------------

    @property
    def _gate_settings(self) -> Path:
        return self._directory / "gate.json"

    @property
    def _counters_path(self) -> Path:
        return self._directory / "counters"

    def _write_gate_settings(self) -> None:
        settings = GateSettings(
            router=self._settings.router,
            router_port=self._router_port,
            counters=str(self._counters_path),
            drain_seconds=self._settings.drain_seconds,
        )
        text = settings.model_dump_json(indent=1)
        replace_text(self._gate_settings, text, mode=0o600, durable=False)

    def _start_gate(self, row: int) -> None:
        assert self._listener is not None, "listens before"
        descriptor = self._listener.fileno()
        module = "hpctrain.serving.router.gate"
        words = [sys.executable, "-m", module, str(self._gate_settings), str(descriptor), str(row)]
        log = self._place.logs / "gate.log"
        self._gates[row] = Child(
            words, log, environment=self._place.environment, descriptors=[descriptor]
        )

    def _wait_for_gate(self) -> None:
        """Wait until a process of the gate accepts. Raises InvalidInputError."""
        # A connection is accepted by the kernel before that, so the gate's own word is awaited.
        deadline = clock.monotonic() + _START_SECONDS
        counters = self._counters
        assert counters is not None, "made before"
        while counters.listening < len(self._gates):
            problem = self.problem()
            if problem is not None or clock.monotonic() > deadline:
                words = problem or f"the gate did not listen within {_START_SECONDS:.0f} s"
                raise InvalidInputError([Problem(words, str(self._place.logs / "gate.log"))])
            clock.sleep(0.05)

    def _tell_gate(self) -> None:
        """Let the gate refuse requests with 503 while there is no replica."""
        known = self.replicas()
        if known is not None and self._counters is not None:
            self._counters.ready = len(known)
