"""A server of streamed completions whose behaviour each test decides, in a thread of its own.

Belongs here: HTTP and events with known delays. Does not belong here: any engine.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Behaviour:
    """What happens to one request: a wait, then tokens, then an end or none."""

    first_seconds: float = 0.0
    after_answers: int = 0  # of other requests, for which its first token waits, too
    gap_seconds: float = 0.0
    status: int = 200
    tokens: int | None = None  # None: as many as were asked for
    reason: str = "length"
    breaks_after: int | None = None
    error_event: bool = False


@dataclass
class StreamingServer:
    """Answers on loopback; `seen` has the headers and bodies of all requests."""

    behave: Callable[[int], Behaviour]
    port: int = 0
    seen: list[tuple[dict[str, str], dict[str, object]]] = field(default_factory=list)
    answered: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False to close the connection."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        self.seen.append((headers, body))
        behaviour = self.behave(int(headers["x-request-id"].rpartition("-")[2]))
        if behaviour.status != 200:
            text = b'{"error": "no"}'
            writer.write(
                f"HTTP/1.1 {behaviour.status} No\r\nContent-Length: {len(text)}\r\n\r\n".encode()
            )
            writer.write(text)
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(behaviour.first_seconds)
        while self.answered < behaviour.after_answers:
            await asyncio.sleep(0.01)
        tokens = body["max_tokens"] if behaviour.tokens is None else behaviour.tokens
        for number in range(tokens):
            if number == behaviour.breaks_after:
                writer.transport.abort()
                return False
            if number:
                await asyncio.sleep(behaviour.gap_seconds)
            reason = behaviour.reason if number == tokens - 1 else None
            self._event(writer, {"choices": [{"text": "w", "finish_reason": reason}]})
            await writer.drain()
        if behaviour.error_event:
            self._event(writer, {"error": {"message": "the engine died"}})
        self._event(writer, {"choices": [], "usage": {"completion_tokens": tokens}})
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.answered += 1
        return True

    @staticmethod
    def _event(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
        text = f"data: {json.dumps(event)}\n\n".encode()
        writer.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")


@contextmanager
def streaming_server(behave: Callable[[int], Behaviour]) -> Iterator[StreamingServer]:
    """Serve until the block ends."""
    server = StreamingServer(behave)
    started, ended = threading.Event(), []

    async def run() -> None:
        stop = asyncio.Event()
        ended.append((asyncio.get_running_loop(), stop))
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        server.port = listening.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        listening.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop, stop = ended[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
