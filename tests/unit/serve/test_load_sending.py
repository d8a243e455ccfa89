"""The load generator against a server with known delays, and as a program."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from hpctrain.serve.load.__main__ import main
from hpctrain.serve.load.measurement import FailureKind, LoadTarget, RequestRecord
from hpctrain.serve.load.sending import PromptStyle, send_requests
from hpctrain.serve.plan.traffic import Lengths, Requests, Traffic, draw_requests


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


pytest.importorskip("aiohttp", reason="NOT TRIED: load tests need aiohttp")
STYLE = PromptStyle(lowest_id=3, highest_id=99)


def equal_requests(count: int, output_tokens: int = 3) -> Requests:
    traffic = Traffic(prompt=Lengths(4, 4), output=Lengths(output_tokens, output_tokens))
    return draw_requests(traffic, count, seed=0)


def send(
    server: StreamingServer,
    planned: list[float],
    *,
    style: PromptStyle = STYLE,
    token: str | None = None,
    timeout_seconds: float = 20.0,
) -> tuple[RequestRecord, ...]:
    target = LoadTarget(server.url, "tiny", token, timeout_seconds=timeout_seconds)
    requests = equal_requests(len(planned))
    return send_requests(target, style, requests, np.asarray(planned)).records


def test_latencies_are_those_of_the_server() -> None:
    """Each token arrives after it was sent; a busy machine may read the first one late, and so
    shorten the gap behind it."""
    began = time.perf_counter()
    with streaming_server(lambda _: Behaviour(first_seconds=0.1, gap_seconds=0.03)) as server:
        (one,) = send(server, [0.0])
    took = time.perf_counter() - began
    assert one.failure is None and one.answered_tokens == 3
    first, last, further = one.ttft_seconds, one.e2e_seconds, one.tpot_seconds
    assert first is not None and last is not None and further is not None
    assert first >= 0.1 and 0.1 + 2 * 0.03 <= last <= took
    assert len(one.gap_seconds) == 2 and sum(one.gap_seconds) == pytest.approx(last - first)
    assert further == pytest.approx((last - first) / 2)


def test_a_slow_answer_delays_no_later_request() -> None:
    """A closed loop would send nothing while the first request waits: for those after it."""
    with streaming_server(lambda number: Behaviour(after_answers=0 if number else 3)) as server:
        records = send(server, [0.0, 0.1, 0.2, 0.3])
    assert [record.failure for record in records] == [None] * 4
    assert max(record.sent_seconds for record in records) < (records[0].first_token_seconds or 0)


def test_what_was_sent_before_the_end_is_waited_for() -> None:
    ended: list[RequestRecord] = []
    with streaming_server(lambda number: Behaviour(first_seconds=0.0 if number else 0.5)) as server:
        result = send_requests(
            LoadTarget(server.url, "tiny", timeout_seconds=20.0),
            STYLE,
            equal_requests(1000),
            np.linspace(0.0, 100.0, 1000),
            on_record=ended.append,
            goes_on=lambda: len(ended) < 2,
        )
    assert 3 <= len(result.records) < 100
    assert [record.failure for record in result.records] == [None] * len(result.records)
    assert (result.records[0].ttft_seconds or 0) >= 0.5


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour(status=503), "http 5xx"),
        (Behaviour(status=404), "http 4xx"),
        (Behaviour(status=429), "http 429"),
        (Behaviour(breaks_after=1), "reset"),
        (Behaviour(error_event=True), "error event"),
        (Behaviour(reason="abort"), "cut short"),
        (Behaviour(tokens=2), "cut short"),
        (Behaviour(first_seconds=5.0), "timeout"),
    ],
)
def test_failures_are_named(behaviour: Behaviour, kind: FailureKind) -> None:
    other = Behaviour()
    with streaming_server(lambda number: behaviour if number == 1 else other) as server:
        limit_seconds = 3.0 if kind == "timeout" else 20.0
        records = send(server, [0.0, 0.02, 0.04], timeout_seconds=limit_seconds)
    assert [record.failure for record in records] == [None, kind, None]
    assert records[1].request_id == "load-1" and records[1].detail


def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = StreamingServer(lambda _: Behaviour(), port=taken.getsockname()[1])
        (one,) = send(nobody, [0.0])
    assert one.failure == "refused"


def test_the_token_is_a_header_and_in_no_text() -> None:
    with streaming_server(lambda _: Behaviour()) as server:
        send(server, [0.0], token="very-secret")
        target = LoadTarget(server.url, "tiny", "very-secret")
    assert server.seen[0][0]["authorization"].endswith("very-secret")
    assert "very-secret" not in repr(target)


def test_a_thousand_requests_on_one_core() -> None:
    """Every one is sent, at its time within what a busy machine allows, and answered whole."""
    planned = [number / 500 for number in range(1000)]
    with streaming_server(lambda _: Behaviour()) as server:
        records = send(server, planned)
    assert [record.failure for record in records] == [None] * 1000
    assert [record.request_id for record in records] == [f"load-{n}" for n in range(1000)]
    assert all(record.sent_seconds >= record.planned_seconds - 0.001 for record in records)


def test_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "records.jsonl"
    words = "--model tiny --rate 100 --requests 30 --warm-up 0 --prompt-tokens 4:9 --seed 3"
    with streaming_server(lambda n: Behaviour(status=500 if n == 7 else 200)) as server:
        common = [*words.split(), "--output-tokens", "3", "--url", server.url]
        main([*common, "--records", str(log), "--json"])
        found = json.loads(capsys.readouterr().out)
        main(common)
    table = capsys.readouterr().out
    records = [RequestRecord.from_line(line) for line in log.read_text().splitlines()]
    assert len(records) == found["requests"] == 30
    assert found["failures"][0]["request_ids"] == ["load-7"]
    assert "1 http 5xx" in table and "load-7 planned at" in table and "never" in table
    lengths = {record.request_id: record.prompt_tokens for record in records}
    sent = {headers["x-request-id"]: len(body["prompt"]) for headers, body in server.seen}  # type: ignore[arg-type]
    assert sent == lengths and len(set(lengths.values())) > 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rate 0", "not above 0"),
        ("--prompt-tokens 9:4 --rate 1", "1 <= P50 <= P99"),
        ("--prompt-tokens x --rate 1", "not like 512"),
        ("--token-ids 9 --rate 1", "not like 100:30000"),
        ("--prompt-tokens 4 --rate 1", "give --prompt-tokens and --output-tokens"),
        ("--trace t.csv --prompt-tokens 4 --rate 1", "a --trace has the lengths"),
    ],
)
def test_usage(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--url", "http://127.0.0.1:1", "--model", "m", *words.split()])
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_a_missing_token_is_an_error_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--url http://127.0.0.1:1 --model m --rate 1 --prompt-tokens 4 --output-tokens 3"
    assert main([*words.split(), "--token-file", str(tmp_path / "none")]) == 3
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_the_program_imports_no_torch() -> None:
    code = "import hpctrain.serve.load.__main__, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = set(done.stdout.split())
    assert "hpctrain.serve.load.sending" in loaded
    assert not loaded & {"torch", "pandas", "transformers", "scipy", "aiohttp"}


@pytest.mark.parametrize("frozen", [True, False])
def test_objects_that_a_caller_has_frozen_stay_frozen(frozen: bool) -> None:
    """One process has one set of them; tests that build models take ten times as long without."""
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        with streaming_server(lambda _: Behaviour()) as server:
            send(server, [0.0])
        assert bool(gc.get_freeze_count()) is frozen
    finally:
        gc.freeze()
