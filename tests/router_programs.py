"""Programs that serve, as processes of a test: real routers, and stand-in engines.

Belongs here: having vllm-router of the serving environment and HAProxy of Debian, stand-in engines
for them to ask, and requests to all of them. Does not belong here: what is tested with them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from bench.free_ports import free_port

ROOT = Path(__file__).resolve().parents[1]
SERVED_NAME = "tiny"
# sysexits.h, EX_UNAVAILABLE: the mirror cannot be reached.
_OFFLINE_EXIT_CODE = 69
_FETCH_SECONDS = 900.0


def vllm_router() -> str:
    """The program of the serving environment, or one on PATH; else the test is skipped."""
    given = os.environ.get("HPCTRAIN_SERVING_ENVIRONMENT", str(ROOT / ".venv" / "serving"))
    program = Path(given) / "bin" / "vllm-router"
    found = str(program) if program.exists() else shutil.which("vllm-router")
    if found is None:
        pytest.skip("NOT TRIED with vllm-router: `scripts/serving-environment` installs it")
    return found


def haproxy() -> str:
    """HAProxy of this machine, or fetched on first use; skipped where the mirror is away."""
    found = shutil.which("haproxy", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if found is not None:
        return found
    directory = ROOT / ".slurm" / "haproxy"
    directory.parent.mkdir(exist_ok=True)
    command = ["bash", str(ROOT / "scripts" / "haproxy-from-debian"), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_SECONDS)
    if done.returncode == _OFFLINE_EXIT_CODE:
        pytest.skip(f"NOT TRIED with HAProxy: {done.stderr.partition('error: ')[2].strip()}")
    assert done.returncode == 0, done.stderr
    return str(directory / "bin" / "haproxy")


@dataclass
class Engine:
    """A stand-in engine that runs."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)


@contextlib.contextmanager
def engines(
    place: Path, count: int, settings: Mapping[str, Any] | None = None, *words: str
) -> Iterator[list[Engine]]:
    """Stand-in engines that answer, with these settings and words; gone afterwards."""
    told = {"answers": False, **(settings or {})}
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(stand_in(place, *words, **told)) for _ in range(count)]
        for engine in running:
            await_engine(engine)
        yield running


@contextlib.contextmanager
def stand_in(place: Path, *words: str, answers: bool = True, **settings: Any) -> Iterator[Engine]:
    """Start a stand-in with weights in `place`; given once it answers, and gone afterwards."""
    place.mkdir(parents=True, exist_ok=True)
    port = free_port()
    told = place / f"engine-{port}.json"
    told.write_text(json.dumps(settings))
    argv = [sys.executable, "-m", "hpctrain.serve.stand_in", "--model", str(place)]
    argv += ["--served-model-name", SERVED_NAME, "--port", str(port), *words]
    with (place / f"engine-{port}.log").open("wb") as log:
        process = subprocess.Popen(
            argv,
            env={**os.environ, "STAND_IN_ENGINE": str(told)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    engine = Engine(port, process, place / f"engine-{port}.log")
    try:
        if answers:
            await_engine(engine)
        yield engine
    finally:
        engine.kill()


def await_engine(engine: Engine) -> None:
    wait_until(lambda: ask(engine.port, "GET", "/health").status == 200, "an engine")


@dataclass(frozen=True)
class Reply:
    """An answer; status 0 where there was none."""

    status: int
    fields: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


def ask(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    fields: Mapping[str, str] | None = None,
    *,
    tls: Any = None,
) -> Reply:
    """Send one request to this machine."""
    connection: http.client.HTTPConnection
    if tls is not None:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=30, context=tls)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, dict(fields or {}))
        answer = connection.getresponse()
        named = {name.lower(): value for name, value in answer.getheaders()}
        return Reply(answer.status, named, answer.read())
    except (OSError, http.client.HTTPException) as error:
        return Reply(0, {}, str(error).encode())
    finally:
        connection.close()


def complete(port: int, *, stream: bool = False, tokens: int = 4, **others: Any) -> Reply:
    """Ask for a completion, as clients do."""
    asked = {"model": SERVED_NAME, "prompt": "hello", "max_tokens": tokens, "stream": stream}
    fields = {"Content-Type": "application/json", **others.pop("fields", {})}
    return ask(port, "POST", "/v1/completions", json.dumps(asked).encode(), fields, **others)


def request(url: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
    """Status and text of an answer; status 0 where there is none."""
    parts = urlsplit(url)
    sent = None if body is None else json.dumps(body).encode()
    method, fields = "GET" if sent is None else "POST", {"Content-Type": "application/json"}
    reply = ask(parts.port or 80, method, parts.path, sent, fields)
    return reply.status, reply.body.decode()
