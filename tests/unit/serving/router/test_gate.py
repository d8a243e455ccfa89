"""The gate byte by byte: before it clients as they come, behind it a router that is played."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from router_programs import Reply, ask
from waiting import wait_until

from hpctrain.serving.router.counters import Count, Counters
from hpctrain.serving.router.gate import is_open
from hpctrain.serving.router.gate_settings import GateSettings
from hpctrain.store.service_settings import RouterSettings

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@dataclass
class PlayedRouter:
    """Answers each connection with the next of `answers`, then the last one for ever.

    It closes the connection then, but with `waits` only when the other side has.
    """

    answers: list[bytes] = field(default_factory=lambda: [OK])
    waits: bool = False
    requests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.listener.getsockname()[1])

    def _serve(self) -> None:
        while True:
            link, _ = self.listener.accept()
            with link, contextlib.suppress(OSError):  # the gate leaves where its client has left
                self.requests.append(self._request(link))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                link.sendall(answer)
                if self.waits:
                    link.recv(1)

    @classmethod
    def _request(cls, link: socket.socket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += cls._part(link)
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(
            (int(line.split(b":")[1]) for line in head.split(b"\r\n") if b"content-length" in line),
            0,
        )
        while len(body) < length:
            body += cls._part(link)
        return head + b"\r\n\r\n" + body

    @staticmethod
    def _part(link: socket.socket) -> bytes:
        part = link.recv(65536)
        if not part:
            raise ConnectionResetError("the gate has left in the middle of a request")
        return part


@dataclass
class RunningGate:
    """A gate as a process, and the router behind it."""

    port: int
    router: PlayedRouter
    counters: Counters
    process: subprocess.Popen[bytes]

    def raw(self, text: bytes) -> bytes:
        """Send these bytes and read until the gate closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as link:
            link.sendall(text)
            parts = []
            with contextlib.suppress(ConnectionResetError):
                while part := link.recv(65536):
                    parts.append(part)
            return b"".join(parts)

    def get(self, path: str = "/v1/models") -> Reply:
        return ask(self.port, "GET", path)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGate]:
    place = tmp_path_factory.mktemp("gate")
    router = PlayedRouter()
    counters = Counters(place / "counters", create=True)
    settings = GateSettings(
        router=RouterSettings(name="vllm-router", policy="least_loaded", place="job"),
        router_port=router.port,
        counters=str(place / "counters"),
        most_body_bytes=200_000,
    )
    (place / "gate.json").write_text(settings.model_dump_json())
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        descriptor = listener.fileno()
        words = ["-m", "hpctrain.serving.router.gate", str(place / "gate.json"), str(descriptor)]
        process = subprocess.Popen([sys.executable, *words, "0"], pass_fds=[descriptor])
        port = int(listener.getsockname()[1])
        wait_until(lambda: counters.listening == 1, "the gate")
    yield RunningGate(port, router, counters, process)
    process.kill()
    process.wait(20)


@pytest.fixture
def gate(running: RunningGate) -> RunningGate:
    running.router.answers[:], running.router.waits = [OK], False
    running.router.requests.clear()
    running.counters.ready = 1
    return running


def test_what_goes_to_the_router(gate: RunningGate) -> None:
    fields = "Host: chat\r\nX-Forwarded-For: 6.6.6.6\r\nConnection: X-Hop\r\nX-Hop: 1\r\n"
    text = f"POST /v1/completions?a=b HTTP/1.1\r\n{fields}Content-Length: 3\r\n\r\nabc"
    assert gate.raw(text.encode() + b"GET /v1/models HTTP/1.0\r\n\r\n").count(b"200 OK") == 2
    head, _, body = gate.router.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /v1/completions?a=b HTTP/1.1"
    assert body == b"abc"
    assert b"x-forwarded-for: 127.0.0.1" in lines
    assert not any(line.startswith((b"x-hop", b"x-forwarded-for: 6")) for line in lines)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 411),
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /v1/x HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"GET /v1/x\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (b"GET /v1/x HTTP/1.1\r\nA: " + b"b" * 70_000, 431),
        (b"POST /v1/x HTTP/1.1\r\nContent-Length: 200001\r\n\r\n", 413),
        (b"PUT /v1/x HTTP/1.1\r\n\r\n", 405),
        (b"GET /metrics HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_what_does_not(gate: RunningGate, text: bytes, status: int) -> None:
    assert gate.raw(text).startswith(f"HTTP/1.1 {status} ".encode())
    assert not gate.router.requests


def test_a_second_request_behind_a_refused_one_is_not_read(gate: RunningGate) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\n\r\n"
    refused = b"POST /v1/x HTTP/1.1\r\nContent-Length: 28\r\nContent-Length: 1\r\n\r\n"
    assert gate.raw(refused + hidden).count(b"HTTP/1.1") == 1
    assert not gate.router.requests


def test_a_long_body_that_waits_to_be_asked_for(gate: RunningGate) -> None:
    with socket.create_connection(("127.0.0.1", gate.port), timeout=20) as link:
        fields = b"Expect: 100-continue\r\nContent-Length: 100000\r\nConnection: close\r\n"
        link.sendall(b"POST /v1/x HTTP/1.1\r\n" + fields + b"\r\n")
        assert link.recv(100).startswith(b"HTTP/1.1 100 ")
        link.sendall(b"x" * 100_000)
        assert b"200 OK" in link.recv(1000)
    assert len(gate.router.requests[0]) > 100_000


@pytest.mark.parametrize(
    "first", [b"", b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 garbage\r\n\r\n"]
)
def test_it_asks_again_before_an_answer_begins(gate: RunningGate, first: bytes) -> None:
    gate.router.answers[:] = [first, OK]
    assert gate.get().body == b"ok"
    assert len(gate.router.requests) == 2


def test_it_gives_up_in_the_end(gate: RunningGate) -> None:
    gate.router.answers[:] = [b"HTTP/1.1 503 No\r\nContent-Length: 3\r\n\r\nno!"]
    assert (gate.get().status, len(gate.router.requests)) == (503, 3)
    gate.router.answers[:] = [b""]
    assert gate.get().status == 502


@pytest.mark.parametrize(
    "broken",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
def test_an_answer_that_breaks_off_is_seen_to(gate: RunningGate, broken: bytes) -> None:
    gate.router.answers[:] = [broken, OK]
    before = gate.counters.total(Count.FAILED)
    assert gate.get().status == 0, "the client's connection broke off, too"
    wait_until(lambda: gate.counters.total(Count.FAILED) == before + 1, "the count")
    assert len(gate.router.requests) == 1, "what has begun is not asked again"


def test_several_answers_on_one_connection(gate: RunningGate) -> None:
    gate.router.answers[:] = [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
    ]
    one = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"
    last = one.replace(b"Host: a", b"Connection: close")
    assert gate.raw(one + one + last).count(b"200 OK") == 3


def test_a_client_that_leaves_ends_the_request(gate: RunningGate) -> None:
    # An answer without an end: one that ends before the client leaves is broken, not abandoned.
    gate.router.answers[:] = [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"5\r\nhello\r\n" * 400_000
    ]
    gate.router.waits = True
    before = gate.counters.total(Count.ABANDONED)
    with socket.create_connection(("127.0.0.1", gate.port), timeout=20) as link:
        link.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
        link.recv(100)
    wait_until(lambda: gate.counters.total(Count.ABANDONED) > before, "the count")
    wait_until(lambda: gate.counters.total(Count.IN_FLIGHT) == 0, "nothing in flight")


def test_without_a_replica(gate: RunningGate) -> None:
    gate.counters.ready = 0
    assert gate.get().status == 503
    assert gate.get("/health").status == 503
    assert not gate.router.requests


def test_it_ends_when_told(gate: RunningGate, running: RunningGate) -> None:
    assert gate.get().status == 200
    os.kill(running.process.pid, signal.SIGINT)
    assert running.process.wait(20) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", running.port), timeout=5).close()


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/v1", "/v1/../metrics", "/v1/%2E%2e/metrics", "/v1/.%2e/x", "/v1//x", "/v1/\\x"),
        *("/v1/load_lora_adapter", "/metrics", "/add_worker", "//v1/models", "/v1/a/."),
    ],
)
def test_closed_paths(path: str) -> None:
    assert not is_open(path.encode())


@pytest.mark.parametrize("path", ["/v1/models/a%2Fb", "/v1/chat/completions", "/tokenize"])
def test_open_paths(path: str) -> None:
    assert is_open(path.encode())
