"""The physical factors that one site can be off by, and how each moves a prediction.

A multiplier m is the logarithm of the seconds (or bytes) of a kind of work over what the constants
say: 0 as predicted, 0.1 ten percent longer. Belongs here: how multipliers enter a case, the
derivatives of its time and memory with respect to them, and what configurations share beside them:
classes and neighbours. Does not belong here: how large all this is (`catalogue/uncertainty.yaml`),
what runs teach of it (`hpctrain.plan.uncertainty`), formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from hpctrain.plan.cost.case import Array, Case, Floats, Mask, once
from hpctrain.plan.cost.memory import outside_allocator_bytes, peak_bytes
from hpctrain.plan.cost.step import step_seconds
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.calibration import LearnedRest, SiteLearning

# -- Classes: reasons for which less is known of a case than of others --------------------------


# expert model: routing, permutation and dispatch change between releases; low precision: casts and
# scales around 8-bit and 4-bit products; new GPU: its constants are those of another one
CLASSES = ("expert model", "low precision", "new GPU")


def classes_of(case: Case, known_gpu: Mask = True) -> Floats:
    """Tell which of `CLASSES` hold: [cases, classes] of 0 and 1.

    `known_gpu`: whether constants were fitted to measurements of this kind of GPU.
    """
    columns = (
        np.asarray(case.shape.moe_blocks) > 0,
        np.asarray(case.mesh.low) > 0,
        ~np.asarray(known_gpu, dtype=bool),
    )
    shape = np.broadcast_shapes(*(np.shape(column) for column in columns), (1,))
    shape = np.broadcast_shapes(shape, np.shape(case.mesh.tp))
    return np.column_stack([np.broadcast_to(column, shape) for column in columns]).astype(float)


# -- Places: where a configuration lies among others; what is alike errs alike -------------------
# What a cost model leaves out, a kernel that a shape suits or a schedule that waits, it leaves out
# of neighbours too. A place counts doublings: two configurations that differ by twice the tensor
# parallelism are 1 apart, and a switch that one of them has set counts like 1.4 doublings. Data
# parallel ranks are no part of it, for more of the same errs the same, nor is the GPU: a cluster
# has one.


_SWITCH = 2.0**0.5  # doublings: as far as two categories are apart that are counted one by one
_APART = 1e-6  # variance, of 1, that places share with none: neighbours stay distinct numbers


def _doublings(size: Array) -> Array:
    return np.asarray(np.log2(np.maximum(size, 1)))


def _switch(value: Mask | Array) -> Array:
    return np.asarray(_SWITCH * np.asarray(value, dtype=float))


_AXES: dict[str, Callable[[Case], Array]] = {
    "hidden": lambda case: _doublings(case.shape.hidden),
    "layers": lambda case: _doublings(case.shape.layers),
    "experts": lambda case: _doublings(case.shape.experts),
    "seq": lambda case: _doublings(case.shape.seq),
    "tp": lambda case: _doublings(case.mesh.tp),
    "pp": lambda case: _doublings(case.mesh.pp),
    "vpp": lambda case: _doublings(case.mesh.vpp),
    "cp": lambda case: _doublings(case.mesh.cp),
    "ep": lambda case: _doublings(case.mesh.ep),
    "micro batch": lambda case: _doublings(case.mesh.micro_batch),
    "recompute": lambda case: _switch(np.asarray(case.mesh.recompute) > 0),
    "full recompute": lambda case: _switch(np.asarray(case.mesh.recompute) > 1),
    "zero": lambda case: _switch(case.mesh.zero),
    "low precision": lambda case: _switch(case.mesh.low),
    "sequence parallel": lambda case: _switch(case.mesh.sequence_parallel),
    "fused attention": lambda case: _switch(case.software.flash),
    "launches": lambda case: _switch(case.software.launched_layers),
    "overlapped experts": lambda case: _switch(case.software.overlaps_experts),
}
AXES: tuple[str, ...] = tuple(_AXES)


def places_of(case: Case, axes: Sequence[str] = AXES) -> Floats:
    """Compute the place of each case on these axes: [cases, axes]."""
    columns = [np.asarray(_AXES[name](case), dtype=float) for name in axes]
    count = np.broadcast_shapes(*(column.shape for column in columns), (1,))
    return np.column_stack([np.broadcast_to(column, count) for column in columns])


def alike(places: Floats, others: Floats, reach: float) -> Floats:
    """Compute how much of what configurations err by they share: [places, others], at most 1.

    The squared exponential of their distance over `reach` (Rasmussen and Williams 2006, Gaussian
    Processes for Machine Learning, eq. 4.9): smooth, and 0.6 at `reach` doublings.
    """
    squares = (places**2).sum(axis=1)[:, None] + (others**2).sum(axis=1) - 2 * places @ others.T
    return np.asarray(np.exp(-np.maximum(squares, 0.0) / (2 * reach**2)))


def weights_of(places: Floats, seen: Floats, reach: float) -> Floats:
    """Compute how what is left at places that were seen continues elsewhere: [places, seen].

    Interpolation between them, and nothing far from all of them: the mean of the process is 0
    (eq. 2.25 of the same book, with as good as no noise).
    """
    among = alike(seen, seen, reach) + _APART * np.eye(len(seen))
    return np.asarray(np.linalg.solve(among, alike(seen, places, reach)).T)


# -- Multipliers, and derivatives with respect to them -------------------------------------------


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


# -- What a site's own runs have taught ----------------------------------------------------------


def learning_of(request: PlanRequest) -> SiteLearning | None:
    """Return what runs of the request's engine have taught on this cluster."""
    return request.knowledge.learned.get(request.spec.engine.name) if request.knowledge else None


def knows_gpu(request: PlanRequest) -> bool:
    """Tell whether constants were fitted to measurements of the cluster's kind of GPU."""
    knowledge = request.knowledge
    if knowledge is None or knowledge.uncertainty is None or knowledge.gpu is None:
        return True
    return knowledge.gpu.name in knowledge.uncertainty.measured_gpus


def corrected(case: Case, request: PlanRequest) -> Case:
    """Scale the constants of a case by the mean of what runs have taught."""
    found = learning_of(request)
    if found is None:
        return case
    logs: dict[str, Array] = dict(zip(found.time.names, found.time.mean, strict=True))
    belongs = classes_of(case, knows_gpu(request))[0]  # alike in all layouts of a spec
    for name, share in zip(CLASSES, belongs, strict=True):
        logs["everything"] += float(share) * logs[name]
    if found.time.rest is not None and found.time.rest.places:
        logs["everything"] = logs["everything"] + _rest(case, found.time.rest, found.time.mean)
    if found.memory is not None:
        logs |= dict(zip(found.memory.names, found.memory.mean, strict=True))
    return scaled(case, {name: logs[name] for name in (*TIME, *MEMORY) if name in logs})


def _rest(case: Case, rest: LearnedRest, mean: tuple[float, ...]) -> Floats:
    """Compute what runs of configurations like each case have left to correct: [cases]."""
    weights = weights_of(places_of(case, rest.axes), np.array(rest.places), rest.reach)
    return np.asarray(weights @ np.array(mean[-len(rest.places) :]))
