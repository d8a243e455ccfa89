"""The physical factors that one site can be off by, and how each moves a prediction.

A multiplier m is the logarithm of the seconds (or bytes) of a kind of work over what the constants
say: 0 as predicted, 0.1 ten percent longer. Belongs here: how multipliers enter a case, and the
derivatives of its time and memory with respect to them. Does not belong here: how large they are
(`hpctrain.plan.uncertainty`), formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.plan.cost.case import Array, Case, Floats, once
from hpctrain.plan.cost.memory import outside_allocator_bytes, peak_bytes
from hpctrain.plan.cost.step import step_seconds

# multiplier: (record of the case, field, sign): rates shrink by it, overheads grow
_FIELDS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "products": (
        ("machine", "product_efficiency", -1),
        ("machine", "low_efficiency", -1),
        ("machine", "scan_efficiency", -1),
    ),
    "attention": (
        ("machine", "flash_efficiency", -1),
        ("machine", "batched_efficiency", -1),
    ),
    "elementwise": (("machine", "memory_efficiency", -1),),
    "nvlink": (("machine", "nvlink_efficiency", -1),),
    "network": (("machine", "network_efficiency", -1),),
    "launch": (
        ("software", "layer_overhead", 1),
        ("software", "expert_overhead", 1),
        ("software", "step_overhead", 1),
    ),
    "experts": (("software", "dispatch_efficiency", -1),),
    # data sheets shrink, and overheads grow: all parts of a step but the start of messages
    "everything": (
        ("machine", "peak", -1),
        ("machine", "peak_low", -1),
        ("machine", "memory_bandwidth", -1),
        ("machine", "nvlink_bandwidth", -1),
        ("machine", "network_bandwidth", -1),
        ("machine", "host_bandwidth", -1),
        ("machine", "nvme_bandwidth", -1),
        ("machine", "host_memory_bandwidth", -1),
        ("software", "layer_overhead", 1),
        ("software", "expert_overhead", 1),
        ("software", "step_overhead", 1),
    ),
    # the formulas of what a step keeps, and what the allocator adds to them: one factor in a case
    "activations": (("software", "slack", 1),),
    "allocator": (("software", "slack", 1),),
    "outside": (("software", "context_bytes", 1), ("software", "communicator_bytes", 1)),
}
TIME: tuple[str, ...] = (
    *("products", "attention", "elementwise", "nvlink", "network"),
    *("launch", "experts", "everything"),
)
MEMORY: tuple[str, ...] = ("activations", "allocator", "outside")
NUDGE = 0.02  # of a logarithm, for derivatives: step times have kinks where something hides


def scaled(case: Case, logs: Mapping[str, Array]) -> Case:
    """Put multipliers into a case: `logs` by name, those that are absent are 0."""
    changed: dict[str, dict[str, Array]] = {"machine": {}, "software": {}}
    for name, log in logs.items():
        for record, field, sign in _FIELDS[name] if np.any(log) else ():
            value = changed[record].get(field, getattr(getattr(case, record), field))
            changed[record][field] = value * np.exp(sign * log)
    return replace(
        case,
        machine=replace(case.machine, **changed["machine"]),
        software=replace(case.software, **changed["software"]),
    )


@once
def sensitivities(case: Case) -> Floats:
    """Compute d log(seconds of a step) / d log(multiplier) of `TIME`: [cases, multipliers]."""
    found = _derivatives(case, TIME[:-1], lambda one: step_seconds(one).total)
    return np.column_stack([found, np.ones(len(found))])  # `everything` scales the whole step


def pass_seconds(case: Case) -> Array:
    """Compute the seconds of all forward and backward passes of the slowest stage.

    With the messages inside of them, without waiting for other stages and for gradients: what ranks
    of megatron-core report as their computation.
    """
    step = step_seconds(case)
    inside = step.tensor_messages + step.context_messages + step.expert_messages
    return step.compute + step.recompute + inside


def pass_sensitivities(case: Case) -> Floats:
    """Compute d log(seconds of the passes) / d log(multiplier) of `TIME`: [cases, multipliers]."""
    found = _derivatives(case, TIME[:-1], pass_seconds)
    return np.column_stack([found, np.ones(len(found))])


def memory_sensitivities(case: Case, peak: Array | None = None) -> Floats:
    """Compute d log(bytes of the fullest GPU) / d log(multiplier) of `MEMORY`: [cases, MEMORY].

    `peak`: these bytes, where they are known. They are linear in both factors, but where another
    stage becomes the fullest.
    """
    base = np.atleast_1d(np.asarray(peak_bytes(case) if peak is None else peak, dtype=float))
    more = np.asarray(peak_bytes(scaled(case, {"activations": NUDGE})))
    kept = np.broadcast_to((more / base - 1) / np.expm1(NUDGE), base.shape)
    outside = np.broadcast_to(outside_allocator_bytes(case) / base, base.shape)
    return np.column_stack([kept, kept, outside])


def _derivatives(case: Case, names: Sequence[str], price: Callable[[Case], Array]) -> Floats:
    """Differentiate the logarithm of a price by central differences: [cases, names].

    All nudges at once, each a row of the price: a call of the cost model costs more than its rows.
    """
    logs = {
        name: NUDGE * np.array([[one == number, -(one == number)] for one in range(len(names))])
        for number, name in enumerate(names)
    }
    nudged = {name: log.reshape(-1, 1) for name, log in logs.items()}
    prices = np.log(np.asarray(price(scaled(case, nudged))))
    found = (prices[::2] - prices[1::2]) / (2 * NUDGE)
    return np.asarray(found.T)
