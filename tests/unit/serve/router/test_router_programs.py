"""HAProxy, vllm-router behind it, and vllm-router alone: the same is asked of all, for real."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from router_programs import SERVED_NAME, Engine, ask, complete, engines, haproxy, vllm_router
from serving_documents import SETTINGS
from variants import varied
from waiting import wait_until

from hpctrain.base import reserved_ports
from hpctrain.base.errors import InvalidInputError
from hpctrain.serve.router.haproxy import MOST_BODY_BYTES, Haproxy, configuration
from hpctrain.serve.router.programs import (
    RETRY_AFTER_SECONDS,
    Place,
    PortTakenError,
    RouterProgram,
)
from hpctrain.serve.router.vllm_router import VllmRouter

Start = Callable[..., RouterProgram]
TOKEN = "s3cret-0f-one-client"
OTHER = "t0ken-of-an0ther"
# The name of each program, and what it calls its process.
PROGRAMS = {"vllm-router": "vllm::router", "haproxy": "haproxy"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    with engines(tmp_path_factory.mktemp("engines"), 2) as running:
        yield running


ALONE = "vllm-router alone"
# What vllm-router does without HAProxy, too.
all_programs = pytest.mark.parametrize(
    "start", varied(["vllm-router", ALONE, "haproxy"], "haproxy"), indirect=True
)


@pytest.fixture(params=varied(["vllm-router", "haproxy"], "haproxy"))
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    """Starts the router of this test, with changes of its settings."""
    name = str(request.param).removesuffix(" alone")
    program = haproxy() if name == "haproxy" else vllm_router()
    before = None if request.param == ALONE else haproxy()
    started: list[RouterProgram] = []

    def begin(*replicas: Engine, **changes: object) -> RouterProgram:
        given = {name: str(one) if isinstance(one, Path) else one for name, one in changes.items()}
        own = SETTINGS.router.model_copy(update={"name": name, **given})
        directory = tmp_path / str(len(started))
        directory.mkdir()
        place = Place("n001", "127.0.0.1", None, directory, os.environ)
        settings = SETTINGS.model_copy(update={"router": own})
        front = None if before is None else Haproxy(before, settings, place, directory)
        router: RouterProgram
        if name == "haproxy" and front is not None:
            router = front
        else:
            router = VllmRouter(program, settings, place, front)
        started.append(router)
        router.start()
        for engine in replicas:
            assert router.add(engine.url)
        return router

    yield begin
    for router in started:
        router.stop(0.0)


def processes_of(router: RouterProgram) -> list[str]:
    """The command lines and environments of the processes that this test has started."""
    found = []
    for child in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in child.read_text().split():
            for name in ("cmdline", "environ"):
                found.append(Path(f"/proc/{pid}/{name}").read_text(errors="replace"))
    return found


def await_counts(router: RouterProgram, **wanted: int) -> None:
    """HAProxy counts a request when it has ended there, which may be after its answer was read."""

    def counted() -> dict[str, int]:
        counts = router.counts()
        return {name: getattr(counts, name) for name in wanted}

    wait_until(lambda: counted() == wanted, lambda: f"{wanted}, but {counted()}")


def test_answers_come_from_the_replicas(start: Start, two: list[Engine]) -> None:
    router = start(*two)
    whole, stream = complete(router.port), complete(router.port, stream=True, tokens=3)
    assert whole.status == stream.status == 200
    assert stream.body.endswith(b"data: [DONE]\n\n")
    assert ask(router.port, "GET", "/health").status == 200
    assert ask(router.port, "GET", "/v1/models").status == 200
    await_counts(router, requests=3, failed=0, refused=0, limited=0, in_flight=0)
    asked_at = router.counts().last_request
    assert asked_at is not None and abs(asked_at - time.time()) < 30


def test_without_a_replica_clients_are_told_to_come_again(start: Start, two: list[Engine]) -> None:
    router = start()
    refused = complete(router.port)
    assert (refused.status, refused.error) == (503, "no replica is ready yet")
    assert int(refused.fields["retry-after"]) == RETRY_AFTER_SECONDS
    assert ask(router.port, "GET", "/health").status == 503
    await_counts(router, refused=1)
    assert router.add(two[0].url)
    assert complete(router.port).status == 200
    assert router.remove(two[0].url)
    assert complete(router.port).error == "no replica is ready yet"


@all_programs
def test_requests_go_on_where_a_replica_was_removed(
    start: Start, two: list[Engine], tmp_path: Path
) -> None:
    with engines(tmp_path, 1, {"first_token_seconds": 4.0}) as (slow,):
        router = start(slow)
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = [pool.submit(complete, router.port, tokens=8) for _ in range(6)]
            await_counts(router, in_flight=6)
            assert router.add(two[0].url)
            assert router.remove(slow.url)
            assert router.replicas() == frozenset([two[0].url])
            assert complete(router.port).status == 200
            assert [answer.result().status for answer in answers] == [200] * 6
        await_counts(router, in_flight=0)


@all_programs
def test_a_dead_replica_costs_no_request(start: Start, two: list[Engine], tmp_path: Path) -> None:
    with engines(tmp_path, 1) as (mortal,):
        router = start(*two, mortal)
        mortal.kill()
        assert [complete(router.port, stream=n % 2 == 0).status for n in range(12)] == [200] * 12


@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.variant)])
def test_requests_go_to_the_least_loaded_replica(start: Start, tmp_path: Path, named: bool) -> None:
    """Whether clients name their requests or not, and a new replica gets no more than its share."""

    def shares(count: int, running: list[Engine]) -> list[float]:
        def one(number: int) -> int:
            fields = {"X-Request-Id": f"request-{number}"} if named else {}
            return complete(router.port, stream=True, tokens=20, fields=fields).status

        before = [_answered(engine) for engine in running]
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            assert set(pool.map(one, range(count))) == {200}
        after = [_answered(engine) for engine in running]
        return [late - early for early, late in zip(before, after, strict=True)]

    with engines(tmp_path, 3, {"first_token_seconds": 0.1}) as running:
        router = start(*running[:2])
        first = shares(24, running[:2])
        assert min(first) >= 8, first
        assert router.add(running[2].url)
        second = shares(36, running)
        assert min(second) >= 5 and max(second) <= 24, second


def _answered(engine: Engine) -> float:
    return figure(engine, r'request_success_total{.*"length".*} (\S+)')


def figure(engine: Engine, pattern: str) -> float:
    """A number that an engine shows among its metrics."""
    found = re.search(pattern, ask(engine.port, "GET", "/metrics").body.decode())
    assert found is not None, pattern
    return float(found[1])


@pytest.mark.variant("test_a_dead_replica_costs_no_request")
def test_a_dead_replica_does_not_close_the_service(start: Start, tmp_path: Path) -> None:
    """For longer than it takes the checks of HAProxy and of vllm-router to see it."""
    with engines(tmp_path, 2) as (one, mortal):
        router = start(one, mortal)
        mortal.kill()
        for _ in range(20):
            time.sleep(0.5)
            assert complete(router.port).status == 200


def test_replicas_that_are_added_at_once(start: Start, two: list[Engine]) -> None:
    router = start(policy="round_robin")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert all(pool.map(router.add, [engine.url for engine in two]))
    assert router.replicas() == {engine.url for engine in two}
    before = [_answered(engine) for engine in two]
    wait_until(lambda: complete(router.port).status == 200, "an answer")
    assert [complete(router.port).status for _ in range(11)] == [200] * 11
    assert all(_answered(one) > early for one, early in zip(two, before, strict=True))


@pytest.mark.variant("test_a_dead_replica_costs_no_request")
def test_a_dead_replica_is_not_asked_because_it_is_idle(start: Start, tmp_path: Path) -> None:
    """Its failures end its requests at once, so that it looks like the least loaded one."""
    slow = {"first_token_seconds": 0.2, "token_seconds": 0.01}
    with engines(tmp_path, 3, slow) as (one, other, mortal):
        router = start(one, other, mortal)
        found: list[int] = []
        clients = [
            threading.Thread(
                target=lambda: found.append(complete(router.port, stream=True, tokens=20).status)
            )
            for _ in range(40)
        ]
        for number, client in enumerate(clients):
            if number == 15:
                begun = sum(other.is_alive() for other in clients[:number])
                mortal.kill()
            client.start()
            time.sleep(0.08)
        for client in clients:
            client.join()
        # Streams that had begun there are lost (0), and nothing else.
        assert set(found) <= {200, 0}, found
        assert found.count(0) <= begun < 20, found


def test_only_the_api_is_open(start: Start, two: list[Engine]) -> None:
    router = start(two[0])
    closed = ["/metrics", "/list_workers", "/add_worker?url=http://127.0.0.1:1", "/flush_cache"]
    closed += ["/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/%2E./list_workers", "//v1/models"]
    closed += ["/v1/load_lora_adapter", "/", "/v1", "/haproxy?stats"]
    for method in ("GET", "POST"):
        answers = {path: ask(router.port, method, path, b"{}").status for path in closed}
        assert answers == dict.fromkeys(closed, 404)
    assert ask(router.port, "DELETE", "/v1/models").status == 405
    assert router.replicas() == frozenset([two[0].url])


def test_a_token_is_needed(start: Start, two: list[Engine], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n\n{OTHER}\n")
    router = start(two[0], token_file=tokens)

    def status(authorization: str | None) -> int:
        fields = {} if authorization is None else {"Authorization": authorization}
        return complete(router.port, fields=fields).status

    assert status(f"Bearer {TOKEN}") == status(f"bearer {OTHER}") == 200
    wrong = [
        None,
        "Bearer",
        "Bearer ",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
    ]
    assert [status(one) for one in wrong] == [401] * len(wrong)
    denied = complete(router.port)
    assert denied.fields["www-authenticate"] == "Bearer"
    assert ask(router.port, "GET", "/health").status == 200
    shown = [*processes_of(router), *(p.read_text() for p in tmp_path.rglob("*.log"))]
    assert not any(TOKEN in text or OTHER in text for text in shown)
    private = [p for p in tmp_path.rglob("*") if p.is_file() and p != tokens]
    assert not any(TOKEN.encode() in p.read_bytes() for p in private)


def test_one_client_cannot_take_all(start: Start, two: list[Engine], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n{OTHER}\n")
    router = start(*two, token_file=tokens, rate_limit=5.0)
    fields = {"Authorization": f"Bearer {TOKEN}"}
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(30) as pool:
        sent = [pool.submit(complete, router.port, fields=fields) for _ in range(30)]
        answers = [one.result() for one in sent]
    seconds = time.monotonic() - began
    limited = [one for one in answers if one.status == 429]
    passed = len(answers) - len(limited)
    assert limited and 4 <= passed <= 5 * (seconds + 1) + 1, (passed, seconds)
    assert limited[0].error == "more than 5 requests per second"
    assert int(limited[0].fields["retry-after"]) >= 1
    assert complete(router.port, fields={"Authorization": f"Bearer {OTHER}"}).status == 200
    await_counts(router, limited=len(limited))
    wait_until(lambda: complete(router.port, fields=fields).status == 200, "the next second")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(place: Path) -> Path:
    """A certificate for 127.0.0.1 with its key in `key.pem` beside it."""
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(place / "key.pem"), "-out", str(place / "certificate.pem")]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    (place / "key.pem").chmod(0o600)
    return place / "certificate.pem"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls(start: Start, two: list[Engine], certificate: Path) -> None:
    key = certificate.with_name("key.pem")
    router = start(two[0], certificate=certificate, key=key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    whole = complete(router.port, tls=trusting)
    stream = complete(router.port, stream=True, tls=trusting)
    assert (whole.status, stream.status) == (200, 200)
    assert complete(router.port).status in (0, 400)
    old = ssl.create_default_context(cafile=str(certificate))
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    assert complete(router.port, tls=old).status == 0


def test_secrets_that_are_replaced_are_taken_up(
    start: Start, two: list[Engine], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, certificate = tmp_path / "tokens", make_certificate(tmp_path)
    tokens.write_text(f"{TOKEN}\n")
    key = certificate.with_name("key.pem")
    router = start(two[0], token_file=tokens, certificate=certificate, key=key)
    old = ssl.create_default_context(cafile=str(certificate))

    def status(token: str, trusting: ssl.SSLContext) -> int:
        fields = {"Authorization": f"Bearer {token}"}
        return complete(router.port, fields=fields, tls=trusting).status

    router.refresh()
    assert (status(TOKEN, old), status(OTHER, old)) == (200, 401)
    tokens.write_text(f"{OTHER}\n")
    router.refresh()
    assert (status(TOKEN, old), status(OTHER, old)) == (401, 200)
    make_certificate(tmp_path)
    new = ssl.create_default_context(cafile=str(certificate))
    router.refresh()
    assert (status(OTHER, old), status(OTHER, new)) == (0, 200)
    for path, text, words in (
        (key, "no key", "no certificate to serve with"),
        (tokens, "", "has no token"),
    ):
        path.write_text(text)
        router.refresh()
        assert status(OTHER, new) == 200
        assert words in capsys.readouterr().out


def test_settings_that_can_never_work(start: Start, certificate: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for wrong in ({"token_file": empty}, {"token_file": tmp_path / "missing"}):
        with pytest.raises(InvalidInputError):
            start(**wrong)
    with pytest.raises(InvalidInputError):
        start(certificate=certificate, key=empty)
    taken = start()
    with pytest.raises(PortTakenError):
        start(port=taken.port)
    other = start(ports=(taken.port, taken.port + 20))
    assert taken.port < other.port <= taken.port + 20


@all_programs
def test_it_listens_nowhere_else(start: Start, two: list[Engine]) -> None:
    before = listening()
    router = start(two[0], address="127.0.0.2")
    assert ask(router.port, "GET", "/health").status == 0  # 127.0.0.1
    new = listening() - before
    assert f"127.0.0.2:{router.port}" in new
    others = new - {f"127.0.0.2:{router.port}"}
    assert all(one.startswith("127.0.0.1:") for one in others), others


def listening() -> set[str]:
    """Where the processes that this test has started listen."""
    own = {str(pid) for pid in descendants(os.getpid())}
    words = ["ss", "-Hltnp"]
    lines = subprocess.run(words, capture_output=True, text=True, timeout=30).stdout.splitlines()
    return {line.split()[3] for line in lines if own & set(re.findall(r"pid=(\d+)", line))}


def descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


class PlayedReplica(ThreadingHTTPServer):
    """Is healthy, and gives other requests the bytes of `answer`; keeps their paths and heads."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PlayedAnswer)
        self.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        self.asked: list[tuple[str, str]] = []


class PlayedAnswer(BaseHTTPRequestHandler):
    server: PlayedReplica

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/health":
            self.send_response(200)
            self.end_headers()
            return
        self.server.asked.append((self.path, str(self.headers)))
        self.wfile.write(self.server.answer)

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def played() -> Iterator[PlayedReplica]:
    with PlayedReplica() as replica:
        threading.Thread(target=replica.serve_forever, args=(0.05,), daemon=True).start()
        yield replica
        replica.shutdown()


def url_of(replica: PlayedReplica) -> str:
    return f"http://127.0.0.1:{replica.server_port}"


def test_what_replicas_see_of_a_client(start: Start, played: PlayedReplica, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(TOKEN)
    router = start(token_file=tokens)
    assert router.add(url_of(played))
    fields = {"Authorization": f"Bearer {TOKEN}", "X-Forwarded-For": "6.6.6.6", "X-Own": "1"}
    assert complete(router.port, fields=fields).status == 200
    (seen,) = (head for path, head in played.asked if path == "/v1/completions")
    assert "x-own: 1" in seen.lower()
    assert TOKEN not in seen and "6.6.6.6" not in seen


@pytest.mark.parametrize(
    "broken",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    ],
)
def test_an_answer_that_breaks_off_does_not_look_whole(
    start: Start, played: PlayedReplica, broken: bytes
) -> None:
    router = start()
    assert router.add(url_of(played))
    played.answer = broken
    assert complete(router.port, stream=True).status != 200


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /v1/x HTTP/1.1\r\nHost: a\r\nA : b\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400),
        (
            b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (MOST_BODY_BYTES + 1),
            413,
        ),
    ],
)
def test_what_no_replica_sees(
    start: Start, played: PlayedReplica, text: bytes, status: int
) -> None:
    """Requests that two programs could read in two ways, and those that are too long."""
    router = start()
    assert router.add(url_of(played))
    played.asked.clear()
    with socket.create_connection(("127.0.0.1", router.port), timeout=20) as link:
        link.sendall(text + b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            got = link.recv(65536)
    assert got.startswith(b"HTTP/1.1 %d " % status) and got.count(b"HTTP/1.1") == 1
    assert not played.asked


def test_a_long_body_arrives(start: Start, two: list[Engine]) -> None:
    router = start(two[0])
    assert complete(router.port, fields={"Expect": "100-continue"}).status == 200
    asked = {"model": SERVED_NAME, "prompt": "hello " * 200_000, "max_tokens": 1}
    fields = {"Content-Type": "application/json"}
    body = json.dumps(asked).encode()
    assert ask(router.port, "POST", "/v1/completions", body, fields).status == 200


@contextlib.contextmanager
def long_request(port: int) -> Iterator[socket.socket]:
    """A client with a stream of minutes, who leaves before its end."""
    asked = {"model": SERVED_NAME, "prompt": "hello", "max_tokens": 2000, "stream": True}
    body = json.dumps(asked)
    head = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as link:
        link.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
        yield link


@all_programs
def test_a_client_that_leaves_ends_its_request(start: Start, tmp_path: Path) -> None:
    def running() -> float:
        return figure(slow, r"num_requests_running{.*} (\S+)")

    with engines(tmp_path, 1, {"token_seconds": 0.1}) as (slow,):
        router = start(slow)
        with long_request(router.port) as link:
            assert link.recv(100)
            wait_until(lambda: running() == 1, "the request")
        wait_until(lambda: running() == 0, "the end of the request")
        await_counts(router, in_flight=0)


def test_a_client_may_leave_before_the_answer_begins(start: Start, tmp_path: Path) -> None:
    with engines(tmp_path, 1, {"first_token_seconds": 600.0}) as (slow,):
        router = start(slow)
        with long_request(router.port):
            await_counts(router, in_flight=1)
        await_counts(router, in_flight=0)


@pytest.mark.parametrize("start", varied([ALONE, "haproxy"], "haproxy"), indirect=True)
def test_counts_of_vllm_router_alone_are_those_of_haproxy(
    start: Start, two: list[Engine], played: PlayedReplica
) -> None:
    router = start(ports=(24100, 24900))
    assert 24100 <= router.port <= 24900
    assert complete(router.port).status == 503
    for engine in two:
        assert router.add(engine.url)
    assert [complete(router.port, stream=n == 1).status for n in range(3)] == [200] * 3
    await_counts(router, requests=4, failed=0, refused=1, in_flight=0)
    asked_at = router.counts().last_request
    assert asked_at is not None and abs(asked_at - time.time()) < 30
    assert all(router.remove(engine.url) for engine in two)
    assert router.add(url_of(played))
    played.answer = b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\n{}"
    assert complete(router.port).status >= 500
    await_counts(router, requests=5, failed=1, refused=1)


@pytest.mark.parametrize("name", ["vllm-router", "haproxy"])
@pytest.mark.parametrize("policy", ["least_loaded", "round_robin", "cache_aware"])
def test_haproxy_takes_the_configuration(
    name: str, policy: str, certificate: Path, tmp_path: Path
) -> None:
    (tmp_path / "token-digests").write_text(64 * "0" + "\n")
    both = certificate.read_text() + certificate.with_name("key.pem").read_text()
    (tmp_path / "tls.pem").write_text(both)
    changes = {"name": name, "policy": policy, "rate_limit": 0.5}
    router = SETTINGS.router.model_copy(
        update={**changes, "certificate": "given", "key": "given", "token_file": "given"}
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        descriptor = listener.fileno()
        (tmp_path / "haproxy.cfg").write_text(configuration(router, tmp_path, descriptor))
        words = [haproxy(), "-c", "-f", str(tmp_path / "haproxy.cfg")]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=60, pass_fds=[descriptor]
        )
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower(), done.stderr


def children() -> set[int]:
    """Processes that this one has started, whatever test has."""
    paths = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    return {int(pid) for path in paths for pid in path.read_text().split()}


def programs_since(since: set[int]) -> dict[str, int]:
    """The router's programs by name, of the processes that were started since."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children() - since}
    return {
        name: pid
        for name, own in PROGRAMS.items()
        for pid, line in words.items()
        if os.path.basename(line.split("\0")[0]) == own
    }


@all_programs
def test_a_router_that_ends_is_started_anew(start: Start, two: list[Engine]) -> None:
    before = children()
    router = start(*two)
    port = router.port
    names = set(programs_since(before))
    assert names
    for name in names:
        os.kill(programs_since(before)[name], 9)
        wait_until(lambda: router.problem() is not None, "the end of the router")
        assert f"{name} ended with -9" in (router.problem() or "")
        router.restart()
        assert router.problem() is None
        assert router.replicas() == frozenset(), "those are added by who asks"
        for engine in two:
            assert router.add(engine.url)
        assert router.port == port
        assert complete(port).status == 200


class Other(socketserver.TCPServer):
    """Another program that listens on a port, and ends every connection."""

    allow_reuse_address = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, args=(0.01,)).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.mark.nightly("vLLM's router, which is in an environment of its own")
@pytest.mark.parametrize("start", ["vllm-router"], indirect=True)
@pytest.mark.parametrize("which", ["its port", "that of its metrics"])
def test_a_port_that_another_program_has_taken_is_given_up(
    start: Start, two: list[Engine], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Taken between its choice and the start of the program, and then while the program is away."""
    choose, place = reserved_ports.reserve_any, ("its port", "that of its metrics").index(which)
    chosen: list[int] = []

    with contextlib.ExitStack() as stack:

        def lose(port: int) -> None:
            stack.callback(Other(port).end)

        def choose_and_lose() -> socket.socket:
            reserved = choose()
            chosen.append(reserved_ports.number_of(reserved))
            if len(chosen) == place + 1:
                lose(chosen[-1])
            return reserved

        monkeypatch.setattr(reserved_ports, "reserve_any", choose_and_lose)
        before = children()
        router = start(*two)
        assert len(chosen) == 4
        assert complete(router.port).status == 200
        os.kill(programs_since(before)["vllm-router"], 9)
        wait_until(lambda: router.problem() is not None, "the end of the router")
        lose(chosen[2 + place])
        router.restart()
        assert len(chosen) == 6
        for engine in two:
            assert router.add(engine.url)
        wait_until(lambda: complete(router.port).status == 200, "an answer by another port")


@all_programs
def test_it_ends_when_requests_have(start: Start, tmp_path: Path) -> None:
    with engines(tmp_path, 1, {"token_seconds": 0.1}) as (slow,):
        router = start(slow)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            streams = [pool.submit(complete, router.port, stream=True, tokens=50) for _ in range(3)]
            await_counts(router, in_flight=3)
            ending = threading.Thread(target=router.stop, args=(60.0,))
            ending.start()
            assert all(one.result().body.endswith(b"data: [DONE]\n\n") for one in streams)
            ending.join(90)
            assert not ending.is_alive()
