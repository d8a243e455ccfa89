"""`python -m bench.router_gate [--json]`: what the gate before vllm-router costs.

Seconds of one core per request and per streamed piece of an answer, of one process of the gate. A
router that is played answers; requests go to it directly for comparison of latencies. Processor
times are compared, because they hardly change with what else this machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hpctrain.serving.router.counters import Counters
from hpctrain.serving.router.gate_settings import GateSettings
from hpctrain.store.service_settings import RouterSettings

_REQUESTS, _STREAMS, _PIECES = 400, 40, 200
_PIECE = b'7d\r\ndata: {"id":"cmpl-0","object":"text_completion","created":0,"model":"m","choices":'
_PIECE += b'[{"index":0,"text":" word","finish_reason":null}]}\n\n\r\n'
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PIECE_SECONDS = 0.002
_AT_ONCE = 8
# Short requests one after the other: latency, not throughput.
_ALONE = 200


@dataclass(frozen=True)
class GateCost:
    """Milliseconds: of a core per request and per piece, and medians of whole short requests."""

    cpu_ms_per_request: float
    cpu_ms_per_piece: float
    direct_ms: float
    through_gate_ms: float


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(_HEAD)
    for _ in range(_PIECES if b"/v1/stream" in head else 1):
        writer.write(_PIECE)
        await writer.drain()
        await asyncio.sleep(_PIECE_SECONDS if b"/v1/stream" in head else 0)
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    writer.close()


async def _serve(listener: socket.socket) -> None:
    server = await asyncio.start_server(_answer, sock=listener)
    await server.serve_forever()


async def _ask(port: int, path: str) -> float:
    began_at = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
    while await reader.read(65536):
        pass
    writer.close()
    return time.perf_counter() - began_at


async def _ask_all(port: int, path: str, count: int) -> list[float]:
    found: list[float] = []
    for _ in range(count // _AT_ONCE):
        found += await asyncio.gather(*(_ask(port, path) for _ in range(_AT_ONCE)))
    return sorted(found)


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure() -> GateCost:
    """Start a gate before a played router, and measure."""
    with socket.create_server(("127.0.0.1", 0), backlog=256) as answering:
        router_port = answering.getsockname()[1]
        words = ["-m", "bench.router_gate", "--answer", str(answering.fileno())]
        router = subprocess.Popen([sys.executable, *words], pass_fds=[answering.fileno()])
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        counters = Counters(place / "counters", create=True)
        counters.ready = 1
        settings = GateSettings(
            router=RouterSettings(name="vllm-router", policy="least_loaded", place="job"),
            router_port=router_port,
            counters=str(place / "counters"),
        )
        (place / "gate.json").write_text(settings.model_dump_json())
        with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
            port = listener.getsockname()[1]
            words = ["-m", "hpctrain.serving.router.gate", str(place / "gate.json")]
            gate = subprocess.Popen(
                [sys.executable, *words, str(listener.fileno()), "0"],
                pass_fds=[listener.fileno()],
            )
        try:
            while not counters.listening:
                await asyncio.sleep(0.05)
            await _ask_all(port, "/v1/short", _AT_ONCE)
            before = _cpu_seconds(gate.pid)
            await _ask_all(port, "/v1/short", _REQUESTS)
            short = _cpu_seconds(gate.pid)
            await _ask_all(port, "/v1/stream", _STREAMS)
            streamed = _cpu_seconds(gate.pid)
            through = sorted([await _ask(port, "/v1/short") for _ in range(_ALONE)])
            direct = sorted([await _ask(router_port, "/v1/short") for _ in range(_ALONE)])
        finally:
            for process in (gate, router):
                process.kill()
                process.wait(10)
    per_request = (short - before) / _REQUESTS
    per_piece = ((streamed - short) / _STREAMS - per_request) / _PIECES
    return GateCost(
        cpu_ms_per_request=1e3 * per_request,
        cpu_ms_per_piece=1e3 * per_piece,
        direct_ms=1e3 * direct[len(direct) // 2],
        through_gate_ms=1e3 * through[len(through) // 2],
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="What the gate before vllm-router costs.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--answer", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer is not None:
        asyncio.run(_serve(socket.socket(fileno=given.answer)))
        return
    cost = asyncio.run(measure())
    if given.json:
        print(json.dumps(asdict(cost)))
        return
    print(f"a request      {cost.cpu_ms_per_request:.2f} ms of a core")
    print(f"a piece        {cost.cpu_ms_per_piece:.3f} ms of a core")
    print(
        f"short request  {cost.direct_ms:.1f} ms direct, {cost.through_gate_ms:.1f} ms by the gate"
    )


if __name__ == "__main__":
    main()
