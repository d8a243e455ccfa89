"""Serve OpenAI's routes of the stand-in over HTTP/1.1, with server-sent events.

Belongs here: reading requests and writing responses. Does not belong here: computing them
(`answers`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from hpctrain.serve.stand_in.answers import Generation, RequestEngine

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}
_DEFAULT_TOKENS = 16  # of OpenAI's completions


@dataclass(frozen=True)
class _Request:
    """One request as it was read; `name` is the client's own id of it."""

    method: str
    path: str
    body: bytes
    name: str = ""


class HttpServer:
    """Answers connections until the process ends.

    `refuses`: shutting down. Then new completions get 500 and /health goes on answering 200, which
    is what vLLM 0.32 does. `log` gets a line for each completion with its id, as vLLM writes it if
    asked to.
    """

    def __init__(
        self,
        engine: RequestEngine,
        served_names: tuple[str, ...],
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.refuses = False
        self._log = log
        self._engine, self._names = engine, served_names

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection, one after the other."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while (request := await _read(reader)) is not None:
                await self._respond(request, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def _respond(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        match request.method, request.path:
            case "GET", "/health" | "/ping":
                await _send(writer, 200, b"")
            case "GET", "/metrics":
                text = self._engine.metrics.text()
                await _send(writer, 200, text, "text/plain; version=0.0.4; charset=utf-8")
            case "GET", "/v1/models":
                models = [{"id": name, "object": "model", "owned_by": "x"} for name in self._names]
                await _send_json(writer, 200, {"object": "list", "data": models})
            case "POST", "/v1/completions" | "/v1/chat/completions":
                await self._complete(request, writer)
            case _:
                await _send_json(writer, 404, {"detail": "Not Found"})

    async def _complete(self, request: _Request, writer: asyncio.StreamWriter) -> None:
        chat = request.path.endswith("/chat/completions")
        try:
            wanted = json.loads(request.body)
            generation = _generation(wanted, chat)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            await _send_json(writer, 400, _error(str(error), 400))
            return
        name = wanted.get("model", self._names[0])
        if name not in self._names:
            await _send_json(writer, 404, _error(f"The model `{name}` does not exist.", 404))
            return
        if self.refuses:
            await _send_json(writer, 500, _error("Request was aborted", 500))
            return
        if self._log is not None:
            self._log(f"Received request cmpl-{request.name}-0: ")
        answer = self._engine.answer(generation)
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": generation.tokens,
            "total_tokens": generation.prompt_tokens + generation.tokens,
        }
        frame = _Frame(name, chat)
        if not wanted.get("stream"):
            words = [word async for word in answer]
            await _send_json(writer, 200, frame.whole(" ".join(words), usage))
            return
        counted = bool((wanted.get("stream_options") or {}).get("include_usage"))
        events = frame.events(answer, generation.tokens, usage if counted else None)
        await _stream(writer, events)


@dataclass(frozen=True)
class _Frame:
    """The JSON around the text of one answer."""

    model: str
    chat: bool

    def whole(self, text: str, usage: Mapping[str, int]) -> dict[str, Any]:
        kind = "chat.completion" if self.chat else "text_completion"
        part = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **part, "finish_reason": "length", "logprobs": None}
        return {**self._head(kind), "choices": [choice], "usage": dict(usage)}

    async def events(
        self, words: AsyncIterator[str], count: int, usage: Mapping[str, int] | None
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events: one per token, then the usage if it was asked for.

        That of the last of `count` tokens says that the answer has ended, and why.
        """
        head = self._head("chat.completion.chunk" if self.chat else "text_completion")
        left = count
        async for word in words:
            left -= 1
            part = {"delta": {"content": f"{word} "}} if self.chat else {"text": f"{word} "}
            reason = None if left else "length"
            choice = {"index": 0, **part, "finish_reason": reason, "logprobs": None}
            yield _event(json.dumps({**head, "choices": [choice]}))
        if usage is not None:
            yield _event(json.dumps({**head, "choices": [], "usage": dict(usage)}))
        yield _event("[DONE]")

    def _head(self, kind: str) -> dict[str, Any]:
        identity = f"cmpl-{uuid4().hex}"
        return {"id": identity, "object": kind, "created": int(time.time()), "model": self.model}


def _generation(wanted: Mapping[str, Any], chat: bool) -> Generation:
    """Read what is asked for. Raises KeyError, TypeError and ValueError for what it is not."""
    prompt = wanted["prompt"] if not chat else [one["content"] for one in wanted["messages"]]
    if isinstance(prompt, list):
        prompt = " ".join(map(str, prompt))
    most = wanted.get("max_completion_tokens") or wanted.get("max_tokens") or _DEFAULT_TOKENS
    if int(most) < 1:
        raise ValueError("max_tokens must be at least 1")
    return Generation(prompt=str(prompt), tokens=int(most))


def _error(message: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": "stand-in", "param": None, "code": code}}


def _event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


async def _read(reader: asyncio.StreamReader) -> _Request | None:
    """Read one request; None at the end of the connection."""
    head = await reader.readline()
    if not head.strip():
        return None
    method, target, _ = head.decode("latin-1").split(" ", 2)
    size, own_name = 0, ""
    while (line := await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        if name.strip().lower() == "content-length":
            size = int(value)
        elif name.strip().lower() == "x-request-id":
            own_name = value.strip()
    body = await reader.readexactly(size) if size else b""
    return _Request(method, target.partition("?")[0], body, own_name)


async def _send_json(writer: asyncio.StreamWriter, code: int, document: dict[str, Any]) -> None:
    await _send(writer, code, json.dumps(document).encode(), "application/json")


async def _send(
    writer: asyncio.StreamWriter, code: int, body: bytes, kind: str = "text/plain"
) -> None:
    writer.write(
        f"HTTP/1.1 {code} {_REASONS[code]}\r\ncontent-type: {kind}\r\n"
        f"content-length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await writer.drain()


async def _stream(writer: asyncio.StreamWriter, events: AsyncIterator[bytes]) -> None:
    """Write events as they come, in chunks; a client that is gone ends the computation."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    async with contextlib.aclosing(events) as open_events:  # type: ignore[type-var]
        async for event in open_events:
            if writer.is_closing():
                raise ConnectionResetError("the client is gone")
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()
