"""`python -m hpctrain.serving.router.gate SETTINGS.json LISTENER ROW`: one process of the gate.

vllm-router has no TLS, no tokens, no rate of one client, and its commands to add and remove
replicas are on the port of requests. So it listens on the loopback device, and this gate is what
clients reach: it lets requests of the OpenAI API through, byte by byte as answers come, and nothing
else. Several processes accept from one socket (descriptor LISTENER). Belongs here: connections and
requests. Does not belong here: which replica answers (the router), heads (`http_head`), counts
(`counters`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import sys
import time
from pathlib import Path

from hpctrain.errors import HpctrainError
from hpctrain.serving.replica.log import say
from hpctrain.serving.router.counters import Count, Counters
from hpctrain.serving.router.gate_settings import (
    GateSettings,
    Tokens,
    load_certificate,
    tls_context,
)
from hpctrain.serving.router.http_head import (
    MOST_HEAD_BYTES,
    BadHeadError,
    Head,
    body_bytes,
    parse_request,
    parse_response,
)
from hpctrain.serving.router.programs import RETRY_AFTER_SECONDS
from hpctrain.store.service_settings import RouterSettings

_OPEN_PATHS = (b"/v1/", b"/tokenize", b"/detokenize", b"/rerank", b"/score", b"/pooling")
_CLOSED_PATHS = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
_METHODS = (b"GET", b"POST", b"OPTIONS")
# A request has to be complete so long after its first byte; a connection may be idle for longer.
_REQUEST_SECONDS, _IDLE_SECONDS = 60.0, 180.0
# An answer may be silent for so long: a long prompt waits for its turn in the engine.
_SILENT_SECONDS = 1800.0
_REFRESH_SECONDS = 2.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 1.0
# The router itself is started anew within seconds; until then its port is closed.
_ROUTER_AWAY_SECONDS = 10.0
_AGAIN = (b"502", b"503", b"504")
_PHRASES = {
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    411: "Length Required",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    502: "Bad Gateway",
    503: "Service Unavailable",
}


def is_open(path: bytes) -> bool:
    """Whether clients may ask for a path: the API, but not what changes replicas.

    Dots are refused in every way to write them: the URL library of the router resolves them.
    """
    dotted = path.lower().replace(b"%2e", b".")
    if b"/." in dotted or b"\\" in dotted or b"//" in dotted:
        return False
    return path.startswith(_OPEN_PATHS) and not path.startswith(_CLOSED_PATHS)


class Gate:
    """What all connections of one process share."""

    def __init__(self, settings: GateSettings, row: int) -> None:
        self.settings = settings
        self.counters = Counters(Path(settings.counters), row)
        self.router = router = settings.router
        self.tokens = Tokens(Path(router.token_file)) if router.token_file else None
        self.tls: ssl.SSLContext | None = None
        if router.certificate is not None and router.key is not None:
            self.tls = tls_context(Path(router.certificate), Path(router.key))
        self.connections: set[ClientConnection] = set()
        self.leaving = False

    async def serve(self, listener: socket.socket) -> None:
        """Accept until asked to end; then let requests that have begun come to theirs."""
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, asked.set)
        server = await loop.create_server(
            lambda: ClientConnection(self), sock=listener, ssl=self.tls
        )
        self.counters.begin()
        refreshing = asyncio.create_task(self._refresh())
        await asked.wait()
        self.leaving = True
        server.close()
        refreshing.cancel()
        deadline = time.monotonic() + self.settings.drain_seconds
        for connection in list(self.connections):
            connection.close_if_idle()
        while self.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _refresh(self) -> None:
        """Read tokens and certificate again when their files change; the old ones hold if not."""
        router, known = self.router, _times(self.router)
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            try:
                if self.tokens is not None:
                    self.tokens.refresh()
                times = _times(router)
                if self.tls is not None and times != known and router.certificate is not None:
                    load_certificate(self.tls, Path(router.certificate), Path(router.key or ""))
                    known = times
            except HpctrainError as error:
                say(str(error))


def _times(router: RouterSettings) -> tuple[float, ...]:
    found = []
    for name in (router.certificate, router.key):
        with contextlib.suppress(OSError):
            found.append(Path(name).stat().st_mtime if name else 0.0)
    return tuple(found)


class ClientConnection(asyncio.Protocol):
    """One connection of a client: its requests one after the other."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._data = bytearray()
        self._head: Head | None = None
        self._body_bytes = 0
        self._exchange: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.answer: Answer | None = None
        self.client = b""
        self.transport: asyncio.Transport

    # -- asyncio ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self.client = str(peer[0]).encode() if peer else b""
        self._gate.connections.add(self)
        self._wait(_IDLE_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.connections.discard(self)
        self._stop_waiting()
        if self._exchange is not None:
            self._exchange.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._data and self._head is None and self._exchange is None:
            self._wait(_REQUEST_SECONDS)
        self._data += data
        if self._exchange is not None:
            if len(self._data) > MOST_HEAD_BYTES:
                self.transport.pause_reading()
        else:
            self._next_request()

    def eof_received(self) -> bool:
        """A client that has sent its last request still wants the answer."""
        return self._exchange is not None

    def pause_writing(self) -> None:
        if self.answer is not None:
            self.answer.pause()

    def resume_writing(self) -> None:
        if self.answer is not None:
            self.answer.resume()

    # -- requests --------------------------------------------------------------------------

    def close_if_idle(self) -> None:
        """Close a connection on which no request is under way."""
        if self._exchange is None and self._head is None and not self._data:
            self.transport.close()

    def _next_request(self) -> None:
        """Begin the next request if enough of it is there."""
        try:
            if self._head is None:
                end = self._data.find(b"\r\n\r\n")
                if end < 0:
                    if len(self._data) > MOST_HEAD_BYTES:
                        raise BadHeadError(431, "the fields of the request are too long")
                    return
                head = parse_request(bytes(self._data[:end]))
                del self._data[: end + 4]
                self._accept(head)
            accepted = self._head
            if accepted is not None and len(self._data) >= self._body_bytes:
                body = bytes(self._data[: self._body_bytes])
                del self._data[: self._body_bytes]
                self._head = None
                self._stop_waiting()
                self._exchange = asyncio.create_task(self._carry(accepted, body))
        except BadHeadError as error:
            self._refuse(error.status, str(error))

    def _accept(self, head: Head) -> None:
        """Look at the head of a request, and answer it at once unless the router is to have it."""
        gate, path = self._gate, head.start[1].partition(b"?")[0]
        length = body_bytes(head)
        if path == b"/health":
            ready = gate.counters.ready
            body = json.dumps({"ready_replicas": ready}).encode()
            return self._say(200 if ready else 503, body, head, length)
        if head.start[0] not in _METHODS:
            raise BadHeadError(405, "only GET and POST")
        if not is_open(path):
            raise BadHeadError(404, "not a path of this service")
        gate.counters.arrived(time.time())
        client = self.client
        if gate.tokens is not None:
            found = gate.tokens.client_of(head.value(b"authorization"))
            if found is None:
                gate.counters.add(Count.DENIED)
                return self._refuse(401, "a valid token is needed", "WWW-Authenticate: Bearer")
            client = found
        rate = gate.router.rate_limit
        if rate is not None:
            wait_seconds = gate.counters.too_fast(client, rate, time.monotonic())
            if wait_seconds is not None:
                gate.counters.add(Count.LIMITED)
                after = f"Retry-After: {max(1, round(wait_seconds + 0.5))}"
                return self._refuse(429, f"more than {rate:g} requests per second", after)
        if not gate.counters.ready:
            return self._refuse_unready()
        if length > gate.settings.most_body_bytes:
            raise BadHeadError(413, f"more than {gate.settings.most_body_bytes} bytes")
        self._head, self._body_bytes = head, length
        if head.values(b"expect") and len(self._data) < length:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return None

    async def _carry(self, head: Head, body: bytes) -> None:
        """Give one request to the router, and its answer to the client."""
        counters, began_at = self._gate.counters, time.monotonic()
        counters.add(Count.IN_FLIGHT)
        keeps = head.keeps_alive and not self._gate.leaving
        text = self._text_for_router(head) + body
        try:
            ended = await self._answered(text, keeps=keeps)
        except asyncio.CancelledError:
            counters.add(Count.ABANDONED)
            raise
        finally:
            counters.add(Count.IN_FLIGHT, -1.0)
            if self.answer is not None:
                self.answer.abort()
                self.answer = None
        self._exchange = None
        if ended is None:
            counters.add(Count.FAILED)
            self._refuse(502, "the router did not answer")
            return
        failed = ended.status.startswith(b"5") or not ended.is_complete
        counters.add(Count.FAILED if failed else Count.ANSWERED)
        if not ended.is_complete:
            # Only a connection that breaks shows a client that its answer is not whole.
            self.transport.abort()
            return
        ends_at = time.monotonic()
        counters.answered_after(ended.first_byte_at - began_at, ends_at - began_at)
        if not keeps or self._gate.leaving:
            self.transport.close()
            return
        self.transport.resume_reading()
        self._wait(_REQUEST_SECONDS if self._data else _IDLE_SECONDS)
        if self._data:
            self._next_request()

    async def _answered(self, text: bytes, *, keeps: bool) -> Answer | None:
        """Ask the router, again while not a byte of an answer has gone out; None without one."""
        gate = self._gate
        pause_seconds, tries = _FIRST_PAUSE_SECONDS, 0
        deadline = time.monotonic() + _ROUTER_AWAY_SECONDS
        while True:
            last = tries >= gate.router.retries
            answer = self.answer = Answer(self.transport, text, keeps=keeps, final=last)
            with contextlib.suppress(OSError):
                await _connect(answer, gate.settings.router_port)
                await asyncio.wait_for(answer.ended, _SILENT_SECONDS)
                if answer.has_begun:
                    return answer
                tries += 1
            if not answer.was_connected and time.monotonic() > deadline:
                return None
            if answer.was_connected and last:
                return None
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _text_for_router(self, head: Head) -> bytes:
        # The token is for the gate; replicas need none, and their logs must not get one.
        own: list[bytes] = [b"authorization"] if self._gate.tokens is not None else []
        lines = head.without(*own, b"x-forwarded-for")
        start = b" ".join((head.start[0], head.start[1], b"HTTP/1.1"))
        extra = [b"x-forwarded-for: " + self.client, b"connection: close"]
        return b"\r\n".join([start, *lines, *extra]) + b"\r\n\r\n"

    # -- answers of the gate itself --------------------------------------------------------

    def _refuse_unready(self) -> None:
        self._gate.counters.add(Count.REFUSED)
        after = f"Retry-After: {RETRY_AFTER_SECONDS}"
        self._refuse(503, "no replica is ready yet", after)

    def _refuse(self, status: int, message: str, *fields: str) -> None:
        """Answer with an error as the OpenAI API has them, and close the connection."""
        error = {"message": message, "type": "hpctrain_router", "code": status}
        self._write(status, json.dumps({"error": error}).encode(), [*fields, "Connection: close"])
        self._data.clear()
        self.transport.close()

    def _say(self, status: int, body: bytes, head: Head, length: int) -> None:
        """Answer a request that needs nobody else."""
        if length or not head.keeps_alive:
            self._write(status, body, ["Connection: close"])
            self.transport.close()
            return
        self._write(status, body, [])
        self._wait(_IDLE_SECONDS)
        if self._data:
            self._next_request()

    def _write(self, status: int, body: bytes, fields: list[str]) -> None:
        phrase = _PHRASES.get(status, "OK")
        lines = [f"HTTP/1.1 {status} {phrase}", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", *fields]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def _wait(self, seconds: float) -> None:
        """Close the connection unless something happens within so long."""
        self._stop_waiting()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._time_out)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_out(self) -> None:
        if self._exchange is None:
            self.transport.close()


class Answer(asyncio.Protocol):
    """One request at the router: its answer goes to the client as it comes.

    `final`: also an answer that says to try again goes out. `ended` is done when the connection is.
    """

    def __init__(self, client: asyncio.Transport, text: bytes, *, keeps: bool, final: bool) -> None:
        self._client, self._text, self._keeps, self._final = client, text, keeps, final
        self._data = bytearray()
        self._left: int | None = None
        self._tail: bytes | None = None
        self._transport: asyncio.Transport | None = None
        self.status = b""
        self.first_byte_at = 0.0
        self.was_connected = self.has_begun = False
        self.is_complete = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self.was_connected = transport, True
        transport.write(self._text)

    def data_received(self, data: bytes) -> None:
        if self.has_begun:
            self._relay(data)
            return
        self._data += data
        while not self.has_begun and (end := self._data.find(b"\r\n\r\n")) >= 0:
            try:
                head = parse_response(bytes(self._data[:end]))
            except BadHeadError:
                self.abort()
                return
            del self._data[: end + 4]
            if not head.start[1].startswith(b"1"):
                self._begin(head)
        if self.has_begun and self._data:
            rest, self._data = bytes(self._data), bytearray()
            self._relay(rest)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.has_begun and self._tail is not None:
            self.is_complete = self._tail.endswith(b"0\r\n\r\n")
        if not self.ended.done():
            self.ended.set_result(None)

    def pause(self) -> None:
        """Stop reading from the router: the client is slower."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """End the connection to the router, so that a replica stops computing for nobody."""
        if self._transport is not None:
            self._transport.abort()

    def _begin(self, head: Head) -> None:
        self.status = head.start[1]
        if self.status in _AGAIN and not self._final:
            self.abort()
            return
        chunked = b"chunked" in b",".join(head.values(b"transfer-encoding")).lower()
        length = head.value(b"content-length")
        self.has_begun, self.first_byte_at = True, time.monotonic()
        lines = head.without()
        if not chunked and length is None:
            # Its end is that of the connection, which cannot be told from a broken one.
            self._keeps = False
        self._tail = b"" if chunked else None
        self._left = None if chunked or length is None else int(length)
        self.is_complete = not chunked and (self._left is None or self._left == 0)
        lines.append(b"connection: " + (b"keep-alive" if self._keeps else b"close"))
        start = b"HTTP/1.1 " + self.status + b" " + head.start[2]
        self._client.write(b"\r\n".join([start, *lines]) + b"\r\n\r\n")

    def _relay(self, data: bytes) -> None:
        self._client.write(data)
        if self._tail is not None:
            self._tail = (self._tail + data)[-5:] if len(data) < 5 else data[-5:]
        elif self._left is not None:
            self._left -= len(data)
            self.is_complete = self._left == 0


async def _connect(answer: Answer, port: int) -> None:
    """Connect an answer to the router. Raises OSError."""
    await asyncio.get_running_loop().create_connection(lambda: answer, "127.0.0.1", port)


def main(argv: list[str]) -> int:
    """Serve until asked to end; 78 (EX_CONFIG) for settings that can never work."""
    path, descriptor, row = Path(argv[0]), int(argv[1]), int(argv[2])
    try:
        settings = GateSettings.model_validate_json(path.read_bytes())
        gate = Gate(settings, row)
    except (HpctrainError, OSError, ValueError) as error:
        say(f"error: {error}")
        return 78
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    asyncio.run(gate.serve(listener))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
