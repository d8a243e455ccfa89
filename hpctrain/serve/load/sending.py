"""Send requests at their planned times, whatever became of those before (an open loop).

A closed loop waits for a slow service and so leaves out the requests that would have waited with
it (G. Tene, "How NOT to Measure Latency": coordinated omission). Here each request has a planned
time, latencies count from it, and how late the client itself was is recorded. Belongs here:
connections, timers, kinds of failure, what is asked and what an answer means. Does not belong here:
quantiles (see `summary`). aiohttp is imported where it is used.
"""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpctrain.base.errors import HpctrainError
from hpctrain.serve.load.measurement import (
    ClientUse,
    FailureKind,
    LoadPlan,
    LoadResult,
    LoadTarget,
    Measurement,
    RequestRecord,
)
from hpctrain.serve.load.summary import summarize
from hpctrain.serve.plan.traffic import Floats, Requests, draw_requests

if TYPE_CHECKING:
    import aiohttp

# Servers close idle connections after 5 seconds (uvicorn) or more: the client has to be first,
# or a request may meet a connection that is just being closed.
_KEEP_ALIVE_SECONDS = 2.0
_HEARTBEAT_SECONDS = 0.02
_LEAD_SECONDS = 0.05  # from now to the planned time zero


def run_load_test(
    target: LoadTarget,
    style: PromptStyle,
    plan: LoadPlan,
    *,
    name: str = "load",
    on_record: Callable[[RequestRecord], None] | None = None,
) -> Measurement:
    """Send the load and measure it; `on_record` gets each request as it ends.

    Blocks until the last answer. Raises HpctrainError if the HTTP library is not installed.
    """
    require_client()
    requests = draw_requests(plan.traffic, plan.requests, plan.seed)
    planned = requests.arrivals(plan.rate)
    result = send_requests(target, style, requests, planned, name=name, on_record=on_record)
    return summarize(target, plan, result)


def send_requests(
    target: LoadTarget,
    style: PromptStyle,
    requests: Requests,
    planned_seconds: Floats,
    *,
    name: str = "load",
    on_record: Callable[[RequestRecord], None] | None = None,
    goes_on: Callable[[], bool] | None = None,
) -> LoadResult:
    """Send all requests and wait for their ends; `on_record` gets each as it ends.

    Once `goes_on` is false no further request is sent; the result has those that were.
    """
    run = _LoadRun(target, style, requests, planned_seconds.tolist(), name, on_record, goes_on)
    # The search for reference cycles is kept off what exists already, while answers are timed. What
    # a caller has frozen stays frozen: there is one set of frozen objects in a process.
    callers = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        return asyncio.run(run.run())
    finally:
        if not callers:
            gc.unfreeze()


class _LoadRun:
    """One load test under way."""

    def __init__(
        self,
        target: LoadTarget,
        style: PromptStyle,
        requests: Requests,
        planned_seconds: list[float],
        name: str,
        on_record: Callable[[RequestRecord], None] | None,
        goes_on: Callable[[], bool] | None,
    ) -> None:
        self._target, self._style, self._name = target, style, name
        self._prompt_tokens: list[int] = requests.prompt_tokens.tolist()
        self._output_tokens: list[int] = requests.output_tokens.tolist()
        self._planned = planned_seconds
        self._on_record, self._goes_on = on_record, goes_on
        self._records: list[RequestRecord | None] = [None] * len(planned_seconds)
        self._lags: list[float] = []
        self._begin = self._began = 0.0
        self._most_outstanding = 0

    async def run(self) -> LoadResult:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._target.timeout_seconds)
        ca = self._target.ca_path
        tls = True if ca is None else ssl.create_default_context(cafile=ca)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, ssl=tls)
        headers = {"Content-Type": "application/json"}
        if self._target.token is not None:
            headers["Authorization"] = f"Bearer {self._target.token}"
        # The proxy of a site is for the world outside, not for its own nodes.
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers, trust_env=False
        ) as session:
            heartbeat = asyncio.create_task(self._measure_lag())
            used_seconds, began = time.process_time(), time.monotonic()
            await self._send_all(session)
            used_seconds = time.process_time() - used_seconds
            cpu_share = used_seconds / max(1e-9, time.monotonic() - began)
            heartbeat.cancel()
        records = tuple(record for record in self._records if record is not None)
        use = ClientUse(cpu_share, tuple(self._lags), self._most_outstanding)
        return LoadResult(records, use, self._began)

    async def _send_all(self, session: aiohttp.ClientSession) -> None:
        tasks: set[asyncio.Task[None]] = set()
        self._begin = asyncio.get_running_loop().time() + _LEAD_SECONDS
        self._began = time.time() + _LEAD_SECONDS
        for number, planned in enumerate(self._planned):
            body = request_body(
                self._style,
                self._target.model,
                number,
                self._prompt_tokens[number],
                self._output_tokens[number],
            )
            await asyncio.sleep(planned - self._now())
            if self._goes_on is not None and not self._goes_on():
                break
            task = asyncio.create_task(self._send(session, number, body))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            self._most_outstanding = max(self._most_outstanding, len(tasks))
        if tasks:
            await asyncio.wait(tasks)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._begin

    async def _send(self, session: aiohttp.ClientSession, number: int, body: bytes) -> None:
        sent = self._now()
        answer = StreamedAnswer()
        failure, detail = await self._ask(session, number, body, answer)
        asked = self._output_tokens[number]
        if failure is None and not answer.complete:
            failure, detail = "cut short", f"finish_reason {answer.finish_reason}"
        elif failure is None and self._style.exact and answer.tokens != asked:
            failure, detail = "cut short", f"{answer.tokens} of {asked} tokens"
        pieces = answer.piece_seconds
        record = RequestRecord(
            request_id=f"{self._name}-{number}",
            planned_seconds=self._planned[number],
            sent_seconds=sent,
            prompt_tokens=self._prompt_tokens[number],
            asked_tokens=asked,
            first_token_seconds=pieces[0] if pieces else None,
            last_token_seconds=pieces[-1] if pieces else None,
            answered_tokens=answer.tokens,
            gap_seconds=tuple(late - early for early, late in pairwise(pieces)),
            failure=failure,
            detail=detail,
        )
        self._records[number] = record
        if self._on_record is not None:
            self._on_record(record)

    async def _ask(
        self, session: aiohttp.ClientSession, number: int, body: bytes, answer: StreamedAnswer
    ) -> tuple[FailureKind | None, str]:
        """Send one request and feed its answer; return how it failed, and in whose words."""
        import aiohttp

        url = self._target.url.rstrip("/") + self._style.path
        headers = {"X-Request-Id": f"{self._name}-{number}"}
        try:
            async with session.post(url, data=body, headers=headers) as response:
                if response.status != 200:
                    text = (await response.content.read(200)).decode("utf-8", "replace")
                    own = 400 <= response.status < 500
                    kind: FailureKind = "http 4xx" if own else "http 5xx"
                    kind = "http 429" if response.status == 429 else kind
                    return kind, f"{response.status} {text}"
                async for data in response.content.iter_any():
                    answer.feed(data, self._now())
        except AnswerError as error:
            return "error event", str(error)
        except TimeoutError:
            return "timeout", f"no end within {self._target.timeout_seconds:g} s"
        except aiohttp.ClientConnectorError as error:
            return "refused", str(error)
        except (aiohttp.ClientError, OSError) as error:
            return "reset", f"{type(error).__name__}: {error}"
        return None, ""

    async def _measure_lag(self) -> None:
        """Record by how much sleeps are longer than asked: the event loop was busy meanwhile."""
        while True:
            begin = time.monotonic()
            await asyncio.sleep(_HEARTBEAT_SECONDS)
            self._lags.append(time.monotonic() - begin - _HEARTBEAT_SECONDS)


def require_client() -> None:
    """Raise HpctrainError unless the HTTP library can be imported."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        message = "a load test needs the package aiohttp"
        raise HpctrainError(message, hint="pip install 'hpctrain[serving]'") from error


# -- reading a streamed answer: server-sent events of OpenAI's completions and chat -------------


class AnswerError(Exception):
    """The stream has an event that says the request failed."""


class StreamedAnswer:
    """The pieces of one answer as they come; feed it bytes and the time at which they came."""

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.reported_tokens: int | None = None
        self._event_seconds: list[float] = []
        self._last_is_empty = False
        self._rest = b""

    @property
    def piece_seconds(self) -> list[float]:
        """Return when each piece came, which is one token where the engine sends each by itself.

        The event that says why the answer ended may have a last token, even one without visible
        text, or none: it counts unless the engine reports fewer tokens.
        """
        reported = self.reported_tokens
        extra = reported is not None and len(self._event_seconds) > reported
        return self._event_seconds[:-1] if extra and self._last_is_empty else self._event_seconds

    @property
    def tokens(self) -> int:
        """Return what the engine counted; the pieces, if it does not say."""
        return len(self._event_seconds) if self.reported_tokens is None else self.reported_tokens

    @property
    def complete(self) -> bool:
        """True once the engine has said that the answer ended by itself: a stream may break off."""
        return self.finish_reason not in (None, "abort", "error")

    def feed(self, data: bytes, seconds: float) -> None:
        """Read what has come. Raises AnswerError for an event that reports a failure."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), seconds)

    def _event(self, text: bytes, seconds: float) -> None:
        if text == b"[DONE]":
            return
        try:
            event: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise AnswerError(f"no JSON: {text[:200]!r}") from error
        if "error" in event:
            raise AnswerError(str(event["error"])[:200])
        usage = event.get("usage")
        if usage:
            self.reported_tokens = usage.get("completion_tokens")
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta")
            if delta is not None and "role" in delta:
                continue  # chat begins with whose turn it is, before the first token
            self._event_seconds.append(seconds)
            self._last_is_empty = not (delta if delta is not None else choice.get("text"))


# -- What is asked: bodies of requests whose lengths in tokens are exact where engines allow it -


Interface = Literal["completions", "chat"]


@dataclass(frozen=True)
class PromptStyle:
    """How prompts are made.

    `exact`: random token ids between `lowest_id` and `highest_id`, and answers that go on after the
    end-of-text token; otherwise words, of which each is about one token, and answers that may be
    shorter than asked. Chat has words always: its template adds tokens of its own.
    """

    interface: Interface = "completions"
    exact: bool = True
    lowest_id: int = 100
    highest_id: int = 30_000
    seed: int = 0
    shared_prefix_tokens: int = 0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.interface == "chat" else "/v1/completions"

    @property
    def exact_lengths(self) -> bool:
        return self.exact and self.interface == "completions"


def request_body(
    style: PromptStyle, model: str, number: int, prompt_tokens: int, output_tokens: int
) -> bytes:
    """Build the body of request `number`; the same style and number give the same bytes."""
    ids = _token_ids(style, number, prompt_tokens)
    fields: dict[str, object] = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if style.exact:
        # vLLM, SGLang and TensorRT-LLM take both; others ignore or refuse them
        fields |= {"ignore_eos": True, "min_tokens": output_tokens}
    if style.exact_lengths:
        fields["prompt"] = ids
    else:
        words = " ".join(f"w{one}" for one in ids)
        if style.interface == "chat":
            fields["messages"] = [{"role": "user", "content": words}]
        else:
            fields["prompt"] = words
    return json.dumps(fields, separators=(",", ":")).encode()


def _token_ids(style: PromptStyle, number: int, count: int) -> list[int]:
    """Draw ids: first those that all requests share, then this request's own."""
    shared = min(style.shared_prefix_tokens, count)
    bounds = style.lowest_id, style.highest_id + 1
    prefix = np.random.default_rng([style.seed, 0]).integers(*bounds, shared)
    own = np.random.default_rng([style.seed, 1, number]).integers(*bounds, count - shared)
    return [*prefix.tolist(), *own.tolist()]
