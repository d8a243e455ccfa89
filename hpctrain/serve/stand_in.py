"""An engine that computes nothing and answers as vLLM does, to rehearse services without a model.

    python -m hpctrain.serve.stand_in WORDS_OF_VLLM_SERVE...

Belongs here: that program: vLLM's words (options that have no effect here are left alone), OpenAI's
routes over HTTP/1.1 with server-sent events, vLLM's metrics, its drain, and failures on request.
Does not belong here: choosing it. No job script names it: an interpreter that is written for a
sandbox starts it in place of vLLM (`write_engine_interpreter`). A file that the variable
STAND_IN_ENGINE names has its times and how it is to fail; without it the defaults hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hpctrain.spec.document import Document

Failure = Literal["crash", "exit", "hang", "out_of_memory", "no_weights", "gpu_fault"]
_VARIABLE = "STAND_IN_ENGINE"
_POLL_SECONDS = 0.02
# What engines write when they fail like this, for signatures to find (sources: the catalogue).
_LAST_LINES: dict[Failure, str] = {
    "crash": "RuntimeError: Engine core initialization failed. See root cause above.",
    "out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. "
    "GPU 0 has a total capacity of 79.10 GiB of which 1.18 GiB is free.",
    "no_weights": "RuntimeError: Cannot find any model weights with `/weights`",
    "gpu_fault": "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
}
# Those of vLLM 0.32, shortened: vllm/v1/metrics/buckets.
_LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# The words of answers; which ones come is a function of the weights and the prompt.
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}
_DEFAULT_TOKENS = 16  # of OpenAI's completions
_INTERPRETER = """\
#!/bin/sh
# Made by hpctrain for a sandbox: an engine that computes nothing takes the place of vLLM.
if [ "$1 $2 $3" = "-m vllm.entrypoints.cli.main serve" ]; then
    shift 3
    exec {python} -m hpctrain.serve.stand_in "$@"
fi
# `serve up` asks it whether it has vLLM (`hpctrain.serve.up`).
[ "$1 $2 $4" = "-P -c vllm" ] && exit 0
exec {python} "$@"
"""


class StandInSettings(Document):
    """Times in seconds, and one failure.

    A request takes `first_token_seconds`, `prompt_token_seconds` for each token of its prompt, and
    `token_seconds` for each further token of its answer, whatever else runs: batching costs
    nothing here. `fails` is what happens after `after_requests` requests have begun (0: while the
    weights are loaded). It happens on `nodes` only (empty: on all), and only as often as a file of
    `tickets` can be removed (empty: always), so that a test can let one start fail and the next one
    succeed.
    """

    load_seconds: float = 0.0
    first_token_seconds: float = 0.01
    prompt_token_seconds: float = 0.0
    token_seconds: float = 0.002
    fails: Failure | None = None
    after_requests: int = 0
    nodes: tuple[str, ...] = ()
    tickets: tuple[str, ...] = ()

    def failure_here(self, node: str) -> Failure | None:
        """Return the failure of this process, taking a ticket for it; None if it is to work."""
        if self.fails is None or (self.nodes and node not in self.nodes):
            return None
        for ticket in self.tickets:
            with contextlib.suppress(FileNotFoundError):  # another process was first
                Path(ticket).unlink()
                return self.fails
        return None if self.tickets else self.fails


@dataclass(frozen=True)
class Generation:
    """What a client asks for: a prompt in words, and how many tokens come back."""

    prompt: str
    tokens: int

    @property
    def prompt_tokens(self) -> int:
        return max(1, len(self.prompt.split()))


class EngineMetrics:
    """The metrics of vLLM 0.32 that hpctrain and its dashboards read, by vLLM's own names."""

    def __init__(self, served_name: str) -> None:
        self.registry = registry = CollectorRegistry()
        self._labels = labels = {"model_name": served_name, "engine": "0"}

        def gauge(name: str, words: str) -> Gauge:
            return Gauge(f"vllm:{name}", words, labels, registry=registry).labels(**labels)

        def counter(name: str, words: str) -> Counter:
            return Counter(f"vllm:{name}", words, labels, registry=registry).labels(**labels)

        def histogram(name: str, words: str) -> Histogram:
            family = Histogram(
                f"vllm:{name}", words, labels, registry=registry, buckets=_LATENCY_BUCKETS
            )
            return family.labels(**labels)

        self.running = gauge("num_requests_running", "Requests in execution batches")
        self.waiting = gauge("num_requests_waiting", "Requests waiting to be processed")
        self.kv_use = gauge("kv_cache_usage_perc", "Share of KV cache in use, 1 is all")
        self.prompt_tokens = counter("prompt_tokens", "Prefill tokens processed")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.preemptions = counter("num_preemptions", "Preemptions by the engine")
        self.ttft = histogram("time_to_first_token_seconds", "Time to first token")
        self.between_tokens = histogram("inter_token_latency_seconds", "Between tokens")
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Time per output token of a request"
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Request latency")
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended well",
            (*labels, "finished_reason"),
            registry=registry,
        )
        self.ended("length", 0)
        self.ended("abort", 0)

    def ended(self, reason: str, count: int = 1) -> None:
        """Count requests that have ended for a reason, such as `length` and `abort`."""
        self._ended.labels(**self._labels, finished_reason=reason).inc(count)


class RequestEngine:
    """Answers requests, as many at a time as there are slots; the others wait in their order.

    `begun` is called when a request begins to be computed, with how many have begun.
    """

    def __init__(
        self,
        settings: StandInSettings,
        served_name: str,
        weights: Path,
        max_sequences: int,
        begun: Callable[[int], None],
    ) -> None:
        self.metrics = EngineMetrics(served_name)
        self.in_flight = 0
        self._settings, self._begun = settings, begun
        self._max_sequences = max_sequences
        self._slots = asyncio.Semaphore(max_sequences)
        self._count = self._running = 0
        config = weights / "config.json"
        self._seed = hashlib.sha256(config.read_bytes() if config.is_file() else b"").digest()

    def words(self, generation: Generation) -> list[str]:
        """List the answer's words: the same for the same weights and prompt, as greedy tokens."""
        digest = hashlib.sha256(self._seed + generation.prompt.encode()).digest()
        return [
            _WORDS[digest[position % len(digest)] % len(_WORDS)]
            for position in range(generation.tokens)
        ]

    async def answer(self, generation: Generation) -> AsyncIterator[str]:
        """Yield the words of an answer, each at its time."""
        arrived_at, metrics = time.perf_counter(), self.metrics
        self.in_flight += 1
        self._show()
        finished = False
        try:
            async with self._slots:
                self._running += 1
                self._count += 1
                self._show()
                self._begun(self._count)
                try:
                    times = self._settings
                    prompt_seconds = times.prompt_token_seconds * generation.prompt_tokens
                    await asyncio.sleep(times.first_token_seconds + prompt_seconds)
                    first_at = last_at = time.perf_counter()
                    metrics.prompt_tokens.inc(generation.prompt_tokens)
                    metrics.ttft.observe(first_at - arrived_at)
                    for position, word in enumerate(self.words(generation)):
                        if position:
                            await asyncio.sleep(times.token_seconds)
                            now = time.perf_counter()
                            metrics.between_tokens.observe(now - last_at)
                            last_at = now
                        metrics.generation_tokens.inc()
                        yield word
                finally:
                    self._running -= 1
            now = time.perf_counter()
            metrics.e2e.observe(now - arrived_at)
            metrics.per_token.observe((now - first_at) / max(1, generation.tokens - 1))
            finished = True
        finally:
            metrics.ended("length" if finished else "abort")
            self.in_flight -= 1
            self._show()

    def _show(self) -> None:
        self.metrics.running.set(self._running)
        self.metrics.waiting.set(self.in_flight - self._running)
        self.metrics.kv_use.set(self._running / self._max_sequences)


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
                text = generate_latest(self._engine.metrics.registry)
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


class _Process:
    """One process of the stand-in: from its arguments to its exit code."""

    def __init__(self, arguments: argparse.Namespace, settings: StandInSettings) -> None:
        self._arguments, self._settings = arguments, settings
        self._failure = settings.failure_here(os.environ.get("SLURMD_NODENAME", ""))
        self._stopping = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal asks to end; returns the exit code."""
        arguments, settings = self._arguments, self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        # as long as weights would take to load; it fails in between if told to
        deadline = time.monotonic() + settings.load_seconds
        while (left := deadline - time.monotonic()) > 0 and not self._stopping.is_set():
            await asyncio.sleep(min(_POLL_SECONDS, left))
        self._begun(0)
        if self._stopping.is_set():
            return 0
        names = tuple(arguments.served_model_name or (arguments.model,))
        weights = Path(arguments.model)
        engine = RequestEngine(settings, names[0], weights, arguments.max_num_seqs, self._begun)
        http = HttpServer(engine, names, say if arguments.enable_log_requests else None)
        server = await asyncio.start_server(http.connected, arguments.host, arguments.port)
        say(f"Started server process [{os.getpid()}], {arguments.host}:{arguments.port}")
        await self._stopping.wait()
        http.refuses = True
        say(f"[shutdown] draining {engine.in_flight} requests, {arguments.shutdown_timeout} s")
        deadline = time.monotonic() + arguments.shutdown_timeout
        while engine.in_flight and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        # The last bytes of answers are written before their connections are closed.
        await asyncio.sleep(_POLL_SECONDS)
        server.close()
        say(f"[shutdown] {engine.in_flight} requests aborted")
        return 0

    def _begun(self, count: int) -> None:
        """End this process as a real engine would, or stop answering, if told to by now."""
        if self._failure is None or count != self._settings.after_requests:
            return
        if self._failure == "hang":
            say("hanging, as told")
            while True:
                time.sleep(60)
        if self._failure == "exit":
            say("exiting with code 0, as told")
            os._exit(0)
        say("Traceback (most recent call last):")
        say(_LAST_LINES[self._failure])
        os._exit(1)


def say(text: str) -> None:
    """Write a line where vLLM writes its log."""
    print(text, file=sys.stderr, flush=True)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read those options of `vllm serve` that have an effect here; others are left alone."""
    parser = argparse.ArgumentParser(prog="python -m hpctrain.serve.stand_in", allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?", help="directory of the weights, as of `vllm serve`")
    parser.add_argument("--model", default="")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--shutdown-timeout", type=float, default=0.0)
    parser.add_argument("--enable-log-requests", action="store_true")
    arguments, _ = parser.parse_known_args(words)
    arguments.model = arguments.model or arguments.model_tag or ""
    return arguments


def main(words: Sequence[str]) -> int:
    """Run the stand-in; returns its exit code. Raises ValidationError for useless settings."""

    async def run() -> int:
        path = os.environ.get(_VARIABLE)
        text = Path(path).read_bytes() if path else b"{}"
        # made inside the event loop
        return await _Process(parse(words), StandInSettings.model_validate_json(text)).run()

    try:
        return asyncio.run(run())
    except OSError as error:
        say(f"OSError: {error}")
        return 1


def write_engine_interpreter(path: Path) -> Path:
    """Write an interpreter that starts the stand-in where a job starts vLLM, and return its path.

    A profile or a spec of a test names it as the Python of the engine, and every script and command
    line stays what it is. Raises OSError.
    """
    path.write_text(_INTERPRETER.format(python=shlex.quote(sys.executable)))
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # connections that are still open end with the process
