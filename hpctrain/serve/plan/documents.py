"""The plan of a service, as `serve plan` prints it and `serve up` keeps it.

Belongs here: these documents, and how their latencies are shown. Does not belong here: how they
come about (the other modules of this folder).
"""

from __future__ import annotations

from typing import Literal

from hpctrain.base.units import short_duration
from hpctrain.spec.document import Document
from hpctrain.spec.service import (
    KvPrecision,
    LatencyName,
    ServingEngineName,
    WeightPrecision,
)


class ReplicaPlan(Document):
    """One replica: its shape, what the engine is told, and the memory of one GPU in bytes.

    `kv_capacity_tokens` are tokens of keys and values that the whole replica can hold, and
    `gpu_memory_bytes` is all memory of one GPU.
    """

    engine: ServingEngineName
    gpu: str
    gpus: int
    nodes: int
    tp: int
    pp: int
    precision: WeightPrecision
    kv_precision: KvPrecision
    max_sequences: int
    batch_tokens: int
    max_length: int
    weight_bytes: float
    activation_bytes: float
    overhead_bytes: float
    kv_bytes_per_token: float
    kv_capacity_tokens: int
    gpu_memory_bytes: float | None = None


class Promise(Document):
    """One latency at one percentile: the limit, what the simulation gives, and its interval.

    `percentile` is such as `p99`; `low_seconds` and `high_seconds` bound the prediction with a
    probability of 95 %, from the simulation's own spread and the cost model's error.
    """

    latency: LatencyName
    percentile: str
    limit_seconds: float
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    holds: bool


class Alternative(Document):
    """Another plan and why it is not the one: too dear, or which limit it breaks."""

    summary: str
    cost_per_hour: float | None
    holds: bool
    reason: str


class Reading(Document):
    """What a limit costs if it is meant for one latency; `reason` tells why it cannot be kept."""

    latency: LatencyName
    summary: str
    cost_per_hour: float | None
    holds: bool
    reason: str


class Clarification(Document):
    """The answer to a limit that does not say of which latency: the price of each reading."""

    profile: str
    limit_seconds: float
    currency: str | None
    readings: tuple[Reading, ...]


class ServicePlan(Document):
    """What is started: replicas that carry the traffic, and spares for those that are away.

    `replicas` carry `traffic.rate` within the objectives; `spare` more are up so that the
    objectives hold for the wanted share of time (`availability`) though replicas fail, are
    preempted or load. `capacity_rate`: requests per second up to which the objectives hold with
    `replicas`. Costs are of `currency`; None where the profile has no prices. `load_seconds`: from
    the start of a job to its first answer. `drain_seconds`: how long a replica gets for what it has
    begun. `lost_per_preemption`: requests that a preemption is expected to break off.
    `gpu_hours_per_hour`: GPUs that are paid for, with spares and the overlap of successors.
    """

    schema_version: Literal[1] = 1
    profile: str | None = None
    replica: ReplicaPlan
    replicas: int
    spare: int
    rate: float
    capacity_rate: float
    availability: float
    promises: tuple[Promise, ...]
    currency: str | None
    cost_per_hour: float | None
    cost_per_million_output_tokens: float | None
    load_seconds: float
    drain_seconds: float
    lost_per_preemption: float
    gpu_hours_per_hour: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """All replicas that are up at the busiest hour."""
        return self.replicas + self.spare

    @property
    def gpus(self) -> int:
        return self.count * self.replica.gpus


def seconds_text(seconds: float) -> str:
    """Format a latency with three digits: `36.1 ms`, `378 ms`, `6.54 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else short_duration(seconds)
