"""Gradient buckets of DDP and DeepSpeed: how many there are, and what the last one costs.

A bucket is sent while the backward pass goes on; the last one, ready at its end, is hidden by
nothing. One bucket for everything hides nothing, hundreds of small ones cost a start each. Belongs
here: that question. Does not belong here: other messages (`messages`).
"""

from __future__ import annotations

from operator import attrgetter

from hpctrain.diagnose.facts import Facts, Planned
from hpctrain.diagnose.findings import Evidence, Finding, Remedy, fine, unknown
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.telemetry.traces import Message, TraceSummary

_SHARE = 0.05
_TOO_MANY = 200
_USEFUL = 8  # buckets: an eighth of the gradients stays in the open at most
_LEAST_BYTES = 8 * 2**20  # of gradients: below that no shape matters
_SMALL_BYTES = 4096  # agreements and sums of losses are no gradients
_MIB = 2**20


def buckets(facts: Facts) -> Finding:
    """Judge whether another size of buckets would hide more."""
    planned = facts.planned
    if planned is None:
        return unknown("buckets", "plan.json cannot be read")
    size, abilities = _bucket_bytes(planned), abilities_of(planned.plan.engine)
    if abilities.sums_behind_pipeline and planned.plan.layout.pp > 1:
        # of DeepSpeed runtime/pipe/engine.py, _exec_reduce_grads
        words = f"a pipeline of {abilities.title}'s sums gradients after its passes"
        return fine("buckets", words)
    if size is None:
        return fine("buckets", f"{planned.plan.engine} has no size of buckets to choose here")
    if planned.plan.layout.dp == 1:
        return fine("buckets", "gradients are summed over one rank only")
    for trace in facts.traces:
        gradients = [one for one in trace.messages if _is_gradients(one)]
        if gradients:
            return _by_trace(planned, trace, gradients, size)
    return _by_plan(planned, size)


def _bucket_bytes(planned: Planned) -> int | None:
    plan, abilities = planned.plan, abilities_of(planned.plan.engine)
    if abilities.bucket is None or plan.zero not in abilities.bucket_stages:
        return None
    return int(attrgetter(abilities.bucket)(planned.spec))


def _is_gradients(message: Message) -> bool:
    kinds = ("all_reduce", "reduce_scatter", "reduce")
    return message.kind in kinds and (message.size_bytes or _SMALL_BYTES) >= _SMALL_BYTES


def _by_trace(planned: Planned, trace: TraceSummary, sent: list[Message], size: int) -> Finding:
    last, step = sent[-1], trace.step_seconds
    known = [one.size_bytes for one in sent if one.size_bytes is not None]
    bounds = [f"{one / _MIB:.3g}" for one in sorted({min(known), max(known)})] if known else []
    sizes = f", {' to '.join(bounds)} MiB" if bounds else ""
    proof = Evidence(
        words=f"{len(sent)} messages of gradients in a step{sizes}; of the last one "
        f"{last.exposed_seconds:.4g} s of {last.seconds:.4g} s are hidden by nothing "
        f"(step {step:.4g} s)",
        source=trace.file,
    )
    if last.exposed_seconds < _SHARE * step and len(sent) <= _TOO_MANY:
        number = "one bucket, which" if len(sent) == 1 else f"{len(sent)} buckets, the last one"
        return fine("buckets", f"{number} hardly shows", proof)
    if len(sent) > _TOO_MANY:
        words = f"{len(sent)} messages are so many that each one's start counts"
        gain = None
    else:
        share = last.exposed_seconds / step
        words = f"the last of {len(sent)} buckets shows with {share:.0%} of a step"
        gain = last.exposed_seconds
    return _finding(planned, words, proof, size, gain)


def _by_plan(planned: Planned, size: int) -> Finding:
    """Estimate without a trace how many buckets the gradients fill."""
    gradients = planned.gradient_bytes
    count = max(1, round(gradients / size))
    proof = Evidence(
        words=f"{gradients / _MIB:.4g} MiB of gradients in buckets of {size / _MIB:.4g} MiB",
        source="plan.json, spec.yaml",
    )
    if gradients < _LEAST_BYTES:
        return fine("buckets", f"gradients are {gradients / _MIB:.2g} MiB only", proof)
    if count == 1:
        return _finding(
            planned, "one bucket holds all gradients: nothing hides it", proof, size, None
        )
    if count > _TOO_MANY:
        return _finding(
            planned, f"about {count} buckets: each one's start counts", proof, size, None
        )
    return fine("buckets", f"about {count} buckets", proof)


def _finding(
    planned: Planned, words: str, proof: Evidence, size: int, gain: float | None
) -> Finding:
    better = max(1, round(planned.gradient_bytes / _USEFUL / _MIB))
    name = abilities_of(planned.plan.engine).bucket
    remedies: tuple[Remedy, ...] = ()
    if not 0.5 <= better * _MIB / size <= 2 and better * _MIB < planned.gradient_bytes:
        remedy = Remedy(words=f"about {_USEFUL} buckets", changes=(f"{name}={better}MiB",))
        remedies = (remedy,)
    else:
        why = (
            "the gradients are too few" if better == 1 else "the buckets are already of a good size"
        )
        remedies = (Remedy(words=f"{why}: fewer messages help, see the question of communication"),)
    return Finding(
        topic="buckets",
        answer="yes",
        words=words,
        evidence=(proof,),
        remedies=remedies,
        gain_seconds=gain,
    )
