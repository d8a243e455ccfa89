"""Compute answers of the stand-in: slots, times, tokens and metrics. Nothing is learned or known.

Belongs here: what the engine of vLLM would do. Does not belong here: HTTP (`http_server`), signals
and the failures that end the process (`__main__`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hpctrain.serve.stand_in.settings import StandInSettings

# Those of vLLM 0.32, shortened: vllm/v1/metrics/buckets.
_LATENCY_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0),
    *(7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
# The words of answers; which ones come is a function of the weights and the prompt.
_WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")


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
        self.registry = CollectorRegistry()
        self._labels = {"model_name": served_name, "engine": "0"}
        self.running = self._gauge("num_requests_running", "Requests in execution batches")
        self.waiting = self._gauge("num_requests_waiting", "Requests waiting to be processed")
        self.kv_use = self._gauge("kv_cache_usage_perc", "Share of KV cache in use, 1 is all")
        self.prompt_tokens = self._counter("prompt_tokens", "Prefill tokens processed")
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens")
        self.preemptions = self._counter("num_preemptions", "Preemptions by the engine")
        self.ttft = self._histogram("time_to_first_token_seconds", "Time to first token")
        self.between_tokens = self._histogram("inter_token_latency_seconds", "Between tokens")
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds", "Time per output token of a request"
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Request latency")
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended well",
            (*self._labels, "finished_reason"),
            registry=self.registry,
        )
        self.ended("length", 0)
        self.ended("abort", 0)

    def ended(self, reason: str, count: int = 1) -> None:
        """Count requests that have ended for a reason, such as `length` and `abort`."""
        self._ended.labels(**self._labels, finished_reason=reason).inc(count)

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def _gauge(self, name: str, words: str) -> Gauge:
        labels = tuple(self._labels)
        return Gauge(f"vllm:{name}", words, labels, registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, words: str) -> Counter:
        labels = tuple(self._labels)
        return Counter(f"vllm:{name}", words, labels, registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, words: str) -> Histogram:
        family = Histogram(
            f"vllm:{name}",
            words,
            tuple(self._labels),
            registry=self.registry,
            buckets=_LATENCY_BUCKETS,
        )
        return family.labels(**self._labels)


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
