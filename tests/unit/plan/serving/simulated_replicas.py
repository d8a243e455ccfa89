"""Replicas whose iterations take what a test says, and requests that it can count by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.serve.plan.batching import BatchLimits
from hpctrain.serve.plan.routing import Policy, SimulatedService, Window
from hpctrain.serve.plan.step_time import IterationLoad, IterationTable
from hpctrain.serve.plan.traffic import Requests

PLENTY = 1e12


def table(cost: Callable[[IterationLoad], object], prompts: int = 4096, sequences: int = 512):
    return IterationTable(cost, prompts, sequences, 500.0)  # type: ignore[arg-type]


def typical(load: IterationLoad) -> object:
    """Roughly a 70B model on four H100."""
    tokens = load.prefill_tokens + load.decode_sequences
    keys = load.decode_sequences * load.decode_context_tokens
    return 0.012 + 4e-5 * tokens + 2e-9 * keys


def service(
    cost: Callable[[IterationLoad], object] = typical,
    *,
    max_sequences: int = 256,
    batch_tokens: int = 2048,
    kv_tokens: float = PLENTY,
    replicas: int = 1,
    policy: Policy = "least_loaded",
    prefilled: bool = False,
) -> SimulatedService:
    return SimulatedService(
        table(cost, sequences=max(max_sequences, 2)),
        BatchLimits(max_sequences, batch_tokens, kv_tokens),
        replicas,
        policy,
        prefilled=prefilled,
    )


def all_of() -> Window:
    """Count every request."""
    return Window(warm_up=0)


def requests_of(
    gaps: list[float], prompt: int | list[int], output: int | list[int], shared: int = 0
) -> Requests:
    count = len(gaps)
    return Requests(
        np.cumsum(np.asarray(gaps, dtype=float)),
        np.resize(np.asarray(prompt), count),
        np.resize(np.asarray(output), count),
        shared,
    )
