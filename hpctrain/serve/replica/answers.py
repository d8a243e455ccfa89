"""Ask an engine over HTTP: whether it is ready, for one token, what it is computing.

Belongs here: requests to the engine of this node, with time limits. Does not belong here: what
follows from an answer (`lifecycle`, `drain`).
"""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.serve.engines.contract import ServingEngine

_METRICS_TIMEOUT_SECONDS = 5.0
_PROMPT = "The capital of France is"
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


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
        code, _ = self._request("GET", self._engine.ready_path, self._health_timeout_seconds)
        return code == 200

    def canary(self, timeout_seconds: float) -> str | None:
        """Have it compute one token; returns what is wrong, None if it has."""
        completion = {"model": self._model, "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        code, text = self._request("POST", "/v1/completions", timeout_seconds, completion)
        if code in (404, 405):  # an engine that only chats
            chat: dict[str, Any] = {"model": self._model, "max_tokens": 1}
            chat["messages"] = [{"role": "user", "content": _PROMPT}]
            code, text = self._request("POST", "/v1/chat/completions", timeout_seconds, chat)
        if code is None:
            return f"a request for one token got no answer in {timeout_seconds:.0f} s"
        try:
            answered = code == 200 and bool(json.loads(text)["choices"])
        except (ValueError, KeyError, TypeError):
            answered = False
        words = text.decode(errors="replace").strip()[:200]
        return None if answered else f"a request for one token got HTTP {code}: {words}"

    def load(self) -> EngineLoad | None:
        """Read what it is doing; None where it has no metrics or does not answer."""
        names = self._engine.metrics
        if names is None:
            return None
        code, text = self._request("GET", names.path, _METRICS_TIMEOUT_SECONDS)
        if code != 200:
            return None
        sums: dict[str, float] = {}
        for name, value in _SAMPLE.findall(text):
            with_value = name.decode()
            sums[with_value] = sums.get(with_value, 0.0) + _number(value)
        waiting = (names.requests_running, names.requests_waiting)
        if names.requests_running not in sums:
            return None
        return EngineLoad(
            in_flight=round(sum(sums.get(name, 0.0) for name in waiting)),
            tokens=sums.get(names.generation_tokens_total, 0.0)
            + sums.get(names.prompt_tokens_total, 0.0),
        )

    def _request(
        self,
        method: str,
        path: str,
        timeout_seconds: float,
        document: Mapping[str, Any] | None = None,
    ) -> tuple[int | None, bytes]:
        """Status and body; no status where nothing answers in time."""
        headers = {"Content-Type": "application/json"} if document is not None else {}
        body = None if document is None else json.dumps(document)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_seconds)
        try:
            if self._key_path is not None:
                headers["Authorization"] = f"Bearer {Path(self._key_path).read_text().strip()}"
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException):
            return None, b""
        finally:
            connection.close()


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
