"""Judge gradient buckets of DDP and DeepSpeed: their number, and the cost of the last one.

A bucket is sent during the backward pass; the last one, ready at its end, overlaps with nothing. A
single bucket hides nothing, and hundreds of small ones each cost a start. Belongs here: that
question. Does not belong here: other messages (`messages`).
"""

from __future__ import annotations

from operator import attrgetter

from hpctrain.diagnose.facts import (
    DiagnosisInput,
    Measurement,
    Planned,
    Suggestion,
    TopicFinding,
    fine,
    unknown,
)
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.telemetry.traces import Message, TraceSummary

_SHARE = 0.05
_TOO_MANY = 200
_USEFUL = 8  # buckets: at most an eighth of the gradients is exposed
_LEAST_BYTES = 8 * 2**20  # of gradients: below that no bucket size matters
_SMALL_BYTES = 4096  # smaller messages are barriers and sums of losses, not gradients
_MIB = 2**20


def buckets(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether another bucket size would hide more communication."""
    planned = facts.planned
    if planned is None:
        return unknown("buckets", "plan.json cannot be read")
    abilities, size = abilities_of(planned.plan.engine), None
    if abilities.bucket is not None and planned.plan.zero in abilities.bucket_stages:
        size = int(attrgetter(abilities.bucket)(planned.spec))
    if abilities.sums_behind_pipeline and planned.plan.layout.pp > 1:
        # of DeepSpeed runtime/pipe/engine.py, _exec_reduce_grads
        words = f"a pipeline of {abilities.title}'s sums gradients after its passes"
        return fine("buckets", words)
    if size is None:
        return fine("buckets", f"{planned.plan.engine} has no size of buckets to choose here")
    if planned.plan.layout.dp == 1:
        return fine("buckets", "gradients are summed over one rank only")
    for trace in facts.traces:
        gradients = [
            message
            for message in trace.messages
            if message.kind in ("all_reduce", "reduce_scatter", "reduce")
            and (message.size_bytes or _SMALL_BYTES) >= _SMALL_BYTES
        ]
        if gradients:
            return _by_trace(planned, trace, gradients, size)
    return _by_plan(planned, size)


def _by_trace(
    planned: Planned, trace: TraceSummary, sent: list[Message], size: int
) -> TopicFinding:
    last, step = sent[-1], trace.step_seconds
    known = [message.size_bytes for message in sent if message.size_bytes is not None]
    bounds = [f"{bound / _MIB:.3g}" for bound in sorted({min(known), max(known)})] if known else []
    sizes = f", {' to '.join(bounds)} MiB" if bounds else ""
    proof = Measurement(
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


def _by_plan(planned: Planned, size: int) -> TopicFinding:
    """Judge without a trace, by the number of buckets that the gradients fill."""
    gradients = planned.gradient_bytes
    count = max(1, round(gradients / size))
    proof = Measurement(
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
    planned: Planned, words: str, proof: Measurement, size: int, gain: float | None
) -> TopicFinding:
    better = max(1, round(planned.gradient_bytes / _USEFUL / _MIB))
    name = abilities_of(planned.plan.engine).bucket
    remedies: tuple[Suggestion, ...] = ()
    if not 0.5 <= better * _MIB / size <= 2 and better * _MIB < planned.gradient_bytes:
        remedy = Suggestion(words=f"about {_USEFUL} buckets", changes=(f"{name}={better}MiB",))
        remedies = (remedy,)
    else:
        why = (
            "the gradients are too few" if better == 1 else "the buckets are already of a good size"
        )
        remedies = (
            Suggestion(words=f"{why}: fewer messages help, see the question of communication"),
        )
    return TopicFinding(
        topic="buckets",
        answer="yes",
        words=words,
        evidence=(proof,),
        remedies=remedies,
        gain_seconds=gain,
    )
