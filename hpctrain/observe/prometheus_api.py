"""Ask a Prometheus server: values of labels, values of now, values over a time.

Belongs here: its HTTP API (prometheus.io, HTTP API) as records. Does not belong here: which
questions are asked (`dashboards/`, `hpctrain.observe.dashboards`).
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.observe.panel_data import Series

_TIMEOUT_SECONDS = 30.0
# More than four dashboards of a thousand runs; a server that sends without an end is stopped.
_MOST_BYTES = 64 << 20


class QueryRefusedError(HpctrainError):
    """Prometheus understood the request and refused the query."""


class PrometheusServer:
    """A Prometheus server, without a proxy in between."""

    def __init__(self, url: str) -> None:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise UsageError(f"`{url}` is no URL of Prometheus", "such as http://127.0.0.1:9090")
        self._url = url.rstrip("/")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def label_values(self, selector: str, label: str, begin: float, end: float) -> list[str]:
        """List the values of a label in the series of a selector, sorted."""
        asked = {"match[]": selector, "start": f"{begin:.3f}", "end": f"{end:.3f}"}
        found = self._ask(f"label/{quote(label)}/values?{urlencode(asked)}", None)
        return sorted(str(value) for value in found)

    def now(self, query: str, time: float) -> tuple[Series, ...]:
        """Evaluate a query at a time."""
        found = self._ask("query", {"query": query, "time": f"{time:.3f}"})
        if found["resultType"] == "scalar":
            return (Series({}, (_point(found["result"]),)),)
        return tuple(_series(one, [one["value"]]) for one in found["result"])

    def over(self, query: str, begin: float, end: float, step: float) -> tuple[Series, ...]:
        """Evaluate a query every `step` seconds from begin to end."""
        asked = {"query": query, "start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step:g}"}
        found = self._ask("query_range", asked)
        return tuple(_series(one, one["values"]) for one in found["result"])

    def _ask(self, path: str, form: dict[str, str] | None) -> Any:
        """Send one request; a form is sent as POST, because queries may be longer than URLs."""
        data = urlencode(form).encode() if form is not None else None
        request = urllib.request.Request(f"{self._url}/api/v1/{path}", data)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
                text = answer.read(_MOST_BYTES)
        except urllib.error.HTTPError as error:
            raise QueryRefusedError(_refusal(error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise UsageError(f"Prometheus at {self._url} does not answer: {reason}") from None
        try:
            return json.loads(text)["data"]
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{self._url} does not answer as Prometheus does") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    """Read why a query was refused, which Prometheus writes as JSON."""
    try:
        return str(json.loads(error.read(1 << 16))["error"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"HTTP status {error.code}"


def _series(found: dict[str, Any], values: list[Any]) -> Series:
    labels = {str(key): str(value) for key, value in found["metric"].items() if key != "__name__"}
    return Series(labels, tuple(_point(value) for value in values))


def _point(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])  # values are texts, such as "NaN" and "+Inf"
