"""Run an engine as a child, ask it over HTTP, and tell whether it computes.

Belongs here: the process behind its shield, its output, its end; requests to the engine of this
node, with time limits; when an engine counts as hung. Does not belong here: when it is started
(`lifecycle`) and ended (`drain`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base import clock
from hpctrain.serve.engines.contract import ServingEngine
from hpctrain.serve.http_request import http_request
from hpctrain.serve.replica.life import EngineCrashedError, EngineLeftError, ReplicaError
from hpctrain.serve.replica.shield import DIRECTORY_VARIABLE
from hpctrain.telemetry.scraped_text import ScrapedText

_TAIL_LINES = 60
_READ_SECONDS = 2.0
_POLL_SECONDS = 0.05
_ADDRESS_TAKEN = re.compile(r"(?i)address already in use|EADDRINUSE|errno 98")
# The line of a traceback that names the error, such as `torch.OutOfMemoryError: CUDA out of ...`.
_ERROR = re.compile(r"(?:^|\s)(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b:?.*")
_METRICS_TIMEOUT_SECONDS = 5.0
_PROMPT = "The capital of France is"
# Health checks in a row that may fail; the lease is not renewed from the first one on.
_FAILED_CHECKS = 3
# Requests in flight and no token for so long: longer than the prompt of any request takes.
STUCK_SECONDS = 180.0
_CANARY_TIMEOUT_SECONDS = 60.0


class EngineProcess:
    """One process group of an engine, from its start to its end."""

    def __init__(
        self, words: tuple[str, ...], environment: Mapping[str, str], directory: Path | None = None
    ) -> None:
        """Start it, in `directory` if that is given. Raises OSError."""
        self._place = tempfile.TemporaryDirectory(prefix="hpctrain-engine-")
        shield = (sys.executable, "-P", "-m", "hpctrain.serve.replica.shield")
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._process = subprocess.Popen(
            [*shield, str(os.getpid()), *words],
            env={**os.environ, **environment, DIRECTORY_VARIABLE: self._place.name},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True, name="engine-output")
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def tail(self) -> str:
        """Its last lines."""
        return "\n".join(self._tail)

    def failure(self) -> ReplicaError | None:
        """How it has ended, which nobody has asked for; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(_READ_SECONDS)
        if code == 0:
            return EngineLeftError("the engine has left with exit code 0, unasked", self.tail)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        errors = [line.strip() for line in self._tail if _ERROR.search(line)]
        words = f": {errors[-1]}" if errors else ""
        return EngineCrashedError(f"the engine has ended with {how}{words}"[:400], self.tail)

    @property
    def lacks_its_port(self) -> bool:
        """Whether it has ended because another process has its port."""
        ended = self._process.poll() is not None
        return ended and _ADDRESS_TAKEN.search(self.tail) is not None

    def end(self, seconds: float) -> None:
        """Ask it to end, wait, and kill what is left of its group."""
        deadline = clock.monotonic() + seconds
        if self._process.poll() is None:
            # The engine and its own children, which do not hear SIGTERM. Not all: workers of a
            # tensor parallel group end at once by SIGINT, and the process above them is the one
            # that finishes what has begun.
            for pid in (self.pid, *_children(self.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
        while self._process.poll() is None and clock.monotonic() < deadline:
            clock.sleep(_POLL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(_READ_SECONDS)
        self._place.cleanup()

    def _read(self) -> None:
        """Copy its output line by line into this task's, which is the log of the rank."""
        stream = self._process.stdout
        assert stream is not None
        for line in stream:
            self._tail.append(line.decode(errors="replace").rstrip())
            with contextlib.suppress(OSError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()


def _children(pid: int) -> list[int]:
    """List the children of a process (proc(5), /proc/PID/task/TID/children)."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


@dataclass(frozen=True)
class EngineLoad:
    """What an engine is doing: requests that it computes or that wait, and tokens so far."""

    in_flight: int
    tokens: float


class EngineAnswers:
    """Requests to one engine; none of them raises for an engine that does not answer."""

    def __init__(
        self,
        engine: ServingEngine,
        host: str,
        port: int,
        model: str,
        health_timeout_seconds: float,
        key_path: str | None = None,
    ) -> None:
        self._engine, self._host, self._port, self._model = engine, host, port, model
        self._health_timeout_seconds, self._key_path = health_timeout_seconds, key_path

    def is_ready(self) -> bool:
        """Whether the engine's own check says that requests may come."""
        status, _ = self._request("GET", self._engine.ready_path, self._health_timeout_seconds)
        return status == 200

    def canary(self, timeout_seconds: float) -> str | None:
        """Have it compute one token; returns what is wrong, None if it has."""
        completion = {"model": self._model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        status, text = self._request("POST", "/v1/completions", timeout_seconds, completion)
        if status in (404, 405):  # an engine that only chats
            chat: dict[str, Any] = {"model": self._model, "max_tokens": 1}
            chat["messages"] = [{"role": "user", "content": _PROMPT}]
            status, text = self._request("POST", "/v1/chat/completions", timeout_seconds, chat)
        if not status:
            return f"a request for one token got no answer in {timeout_seconds:.0f} s"
        try:
            answered = status == 200 and bool(json.loads(text)["choices"])
        except (ValueError, KeyError, TypeError):
            answered = False
        words = text.decode(errors="replace").strip()[:200]
        return None if answered else f"a request for one token got HTTP {status}: {words}"

    def load(self) -> EngineLoad | None:
        """Read what it is doing; None where it has no metrics or does not answer."""
        names = self._engine.metrics
        if names is None:
            return None
        status, text = self._request("GET", names.path, _METRICS_TIMEOUT_SECONDS)
        if status != 200:
            return None
        counted = (names.generation_tokens_total, names.prompt_tokens_total)
        wanted = (names.requests_running, names.requests_waiting, *counted)
        try:
            shown = ScrapedText(text.decode(errors="replace"), wanted)
        except ValueError:
            return None
        running = shown.total(names.requests_running)
        if running is None:
            return None
        return EngineLoad(
            in_flight=round(running + (shown.total(names.requests_waiting) or 0.0)),
            tokens=sum(shown.total(name) or 0.0 for name in counted),
        )

    def _request(
        self,
        method: str,
        path: str,
        timeout_seconds: float,
        document: Mapping[str, Any] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body; status 0 where nothing answers in time."""
        token = None
        try:
            if self._key_path is not None:
                token = Path(self._key_path).read_text().strip()
        except OSError:
            return 0, b""
        address = self._host, self._port
        return http_request(address, method, path, timeout_seconds, document, token=token)


class HealthWatch:
    """Looks at one engine again and again; `doubtful` while its last check has failed.

    An engine whose worker hangs may go on answering its health check. So tokens are looked at, too:
    an engine that computes requests makes some, and one that has nothing to do is asked for one.
    """

    def __init__(
        self, answers: EngineAnswers, health_seconds: float, canary_seconds: float
    ) -> None:
        self._answers = answers
        self._health_seconds, self._canary_seconds = health_seconds, canary_seconds
        self._next_at: float | None = None
        self._failed = 0
        self._tokens: float | None = None
        self._moved_at: float | None = None

    @property
    def doubtful(self) -> bool:
        return self._failed > 0

    def problem(self, now: float) -> str | None:
        """Look if it is time to; returns what is wrong. `now` is in monotonic seconds."""
        if self._next_at is not None and now < self._next_at:
            return None
        self._next_at = now + self._health_seconds
        if not self._answers.is_ready():
            self._failed += 1
            if self._failed < _FAILED_CHECKS:
                return None
            return f"{self._failed} health checks in a row have failed"
        self._failed = 0
        load = self._answers.load()
        tokens = load.tokens if load is not None else None
        if self._moved_at is None or (load is not None and tokens != self._tokens):
            self._tokens, self._moved_at = tokens, now
            return None
        still_seconds = now - self._moved_at
        if load is not None and load.in_flight:
            if still_seconds <= STUCK_SECONDS:
                return None
            return (
                f"{load.in_flight} requests are in flight, and no token was computed for "
                f"{still_seconds:.0f} s"
            )
        if still_seconds <= self._canary_seconds:
            return None
        self._moved_at = now
        problem = self._answers.canary(_CANARY_TIMEOUT_SECONDS)
        return None if problem is None else f"the engine is idle, and {problem}"
