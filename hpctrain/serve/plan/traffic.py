"""The requests that a service is planned for: when they come and how long they are.

Belongs here: distributions, traces, and drawing requests from them with a seed. Does not belong
here: what happens to a request (`batching`), the user's document (`hpctrain.spec.service`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hpctrain.spec.service import LengthsSpec, TrafficSpec

Floats: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

# Of the standard normal distribution: its 99th percentile, and the one at which lengths are cut,
# because a log-normal has no longest request and an engine's context window has.
_NORMAL_P99 = 2.3263478740408408
_NORMAL_LONGEST = 3.7190164854556804  # 99.99 %


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens: log-normal by median and 99th percentile; equal ones are one number."""

    p50: float
    p99: float

    @classmethod
    def of(cls, given: int | LengthsSpec) -> Lengths:
        """Read what a spec has."""
        if isinstance(given, LengthsSpec):
            return cls(given.p50, given.p99)
        return cls(float(given), float(given))

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return math.log(self.p99 / self.p50) / _NORMAL_P99

    @property
    def mean(self) -> float:
        return self.p50 * math.exp(self.spread**2 / 2)

    @property
    def longest(self) -> int:
        """The longest that is drawn: the 99.99th percentile."""
        return math.ceil(self.p50 * math.exp(_NORMAL_LONGEST * self.spread))

    def draw(self, generator: np.random.Generator, count: int) -> Integers:
        normal = generator.standard_normal(count)
        tokens = np.rint(self.p50 * np.exp(self.spread * normal))
        return np.clip(tokens, 1, self.longest).astype(np.int64)


@dataclass(frozen=True)
class Trace:
    """Requests as they came: times between them in seconds, and lengths in tokens."""

    gap_seconds: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """What comes, whatever its rate: lengths or a trace, burstiness, and a shared beginning.

    `burstiness` is the squared coefficient of variation of the times between requests (1: Poisson).
    """

    prompt: Lengths | None = None
    output: Lengths | None = None
    trace: Trace | None = None
    burstiness: float = 1.0
    shared_prefix_tokens: int = 0

    @classmethod
    def of(cls, spec: TrafficSpec, trace: Trace | None = None) -> Traffic:
        """Read what a spec has; `trace` is the content of the file that it names."""
        return cls(
            prompt=None if spec.prompt_tokens is None else Lengths.of(spec.prompt_tokens),
            output=None if spec.output_tokens is None else Lengths.of(spec.output_tokens),
            trace=trace,
            shared_prefix_tokens=spec.shared_prefix_tokens,
        )

    @property
    def mean_prompt_tokens(self) -> float:
        if self.trace is not None:
            return float(np.mean(self.trace.prompt_tokens))
        assert self.prompt is not None
        return self.prompt.mean

    @property
    def mean_output_tokens(self) -> float:
        if self.trace is not None:
            return float(np.mean(self.trace.output_tokens))
        assert self.output is not None
        return self.output.mean

    @property
    def longest_tokens(self) -> int:
        """The longest prompt with its answer that is drawn."""
        if self.trace is not None:
            prompts, outputs = self.trace.prompt_tokens, self.trace.output_tokens
            return max(map(sum, zip(prompts, outputs, strict=True)))
        assert self.prompt is not None and self.output is not None
        return self.prompt.longest + self.output.longest


@dataclass(frozen=True)
class Requests:
    """Drawn requests; `arrival_units` are times of arrival at one request per second.

    At another rate the same requests come in the same order, so that results at two rates differ
    by the rate and not by chance.
    """

    arrival_units: Floats
    prompt_tokens: Integers
    output_tokens: Integers
    shared_prefix_tokens: int = 0

    @property
    def count(self) -> int:
        return len(self.arrival_units)

    def first(self, count: int) -> Requests:
        """Return the first `count` of them."""
        return Requests(
            self.arrival_units[:count],
            self.prompt_tokens[:count],
            self.output_tokens[:count],
            self.shared_prefix_tokens,
        )

    def arrivals(self, rate: float) -> Floats:
        """Return the times of arrival in seconds at `rate` requests per second."""
        return self.arrival_units / rate


def draw_requests(traffic: Traffic, count: int, seed: int) -> Requests:
    """Draw `count` requests; the same seed gives the same ones.

    Times between requests follow a gamma distribution with mean 1 and variance `burstiness`, which
    is the exponential one for 1. A trace is repeated as often as it takes, scaled to mean 1.
    """
    generator = np.random.default_rng(seed)
    if traffic.trace is not None:
        gaps = np.resize(np.asarray(traffic.trace.gap_seconds, dtype=np.float64), count)
        return Requests(
            arrival_units=np.cumsum(gaps / np.mean(traffic.trace.gap_seconds)),
            prompt_tokens=np.resize(np.asarray(traffic.trace.prompt_tokens), count),
            output_tokens=np.resize(np.asarray(traffic.trace.output_tokens), count),
            shared_prefix_tokens=traffic.shared_prefix_tokens,
        )
    assert traffic.prompt is not None and traffic.output is not None
    shape = 1 / traffic.burstiness
    gaps = generator.gamma(shape, traffic.burstiness, count)
    return Requests(
        arrival_units=np.cumsum(gaps),
        prompt_tokens=traffic.prompt.draw(generator, count),
        output_tokens=traffic.output.draw(generator, count),
        shared_prefix_tokens=traffic.shared_prefix_tokens,
    )
