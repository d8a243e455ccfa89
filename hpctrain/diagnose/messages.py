"""Judge exposed communication, by axis and link, and the bubble of a pipeline.

A trace measures it exactly; without one it is estimated from the time of passes beyond their
computation. Messages of a measured step show which axis takes longer than the plan assumes.
Belongs here: these two questions. Does not belong here: gradient buckets (`judge`).
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from hpctrain.diagnose.facts import (
    DiagnosisInput,
    Measurement,
    Planned,
    Suggestion,
    TopicFinding,
    fine,
    stage_of,
    unknown,
)
from hpctrain.diagnose.waiting import NO_WINDOW, OLD_RECORD
from hpctrain.plan.documents import Plan
from hpctrain.plan.layout_words import Axis
from hpctrain.spec.engines.registry import abilities_of

_SHARE = 0.08
_ESTIMATED_SHARE = 0.15
# A backward pass does twice the work of a forward pass, three times with full recomputation.
_BACKWARD, _BACKWARD_AGAIN = 2.0, 3.0
# Messages are slower than planned: twice the predicted time (parts of a prediction are less exact
# than its sum, and waiting for others is in what is measured), and a share of a step that matters.
_TIMES_PLANNED = 2.0
_SLOWER_SHARE = 0.05
_TO_TRACE = "a trace tells: `profile: {start: 50, count: 2}`"


@dataclass(frozen=True)
class _Exposed:
    """Exposed communication of a step, and its source."""

    seconds: float
    step_seconds: float
    evidence: Measurement
    estimated: bool

    @property
    def share(self) -> float:
        return self.seconds / self.step_seconds

    @property
    def matters(self) -> bool:
        return self.share >= (_ESTIMATED_SHARE if self.estimated else _SHARE)


@dataclass(frozen=True)
class _Slower:
    """An axis whose messages take longer than the plan assumes."""

    axis: Axis
    seconds: float
    planned_seconds: float

    @property
    def words(self) -> str:
        times = self.seconds / self.planned_seconds
        return f"along {self.axis} {self.seconds:.3g} s, {times:.1f} times what the plan assumes"


def communication(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether messages between ranks delay a step, without the wait for a slow rank."""
    if facts.planned is not None and facts.planned.plan.layout.world_size == 1:
        return fine("communication", "there is one rank only")
    exposed = _of_traces(facts) or _of_times(facts)
    slower = _slower_than_planned(facts)
    if slower and (exposed is None or not exposed.matters):
        return _disagreement(facts, slower, exposed)
    if exposed is None:
        old = facts.ranks is not None and facts.step_seconds is None
        return unknown("communication", f"{OLD_RECORD if old else NO_WINDOW}; {_TO_TRACE}")
    proof = (exposed.evidence, *_said_by_plan_and_step(facts))
    about = "about " if exposed.estimated else ""
    if not exposed.matters:
        words = f"{about}{exposed.share:.0%} of a step is not hidden"
        return fine("communication", words, *proof)
    axis = _dominant(facts.planned)
    where = "" if axis is None else f", mostly along {axis}"
    if slower:
        where += f"; messages take {', '.join(one.words for one in slower)}"
    more = [Suggestion(words=_TO_TRACE)] if exposed.estimated else []
    return TopicFinding(
        topic="communication",
        answer="yes",
        words=f"{about}{exposed.share:.0%} of a step is communication that nothing hides{where}",
        evidence=proof,
        remedies=(*_less_of_it(facts.planned, axis), *more),
        gain_seconds=exposed.seconds,
    )


def _disagreement(
    facts: DiagnosisInput, slower: tuple[_Slower, ...], exposed: _Exposed | None
) -> TopicFinding:
    """Answer that messages take longer than planned, though most of it may be hidden."""
    proof = (() if exposed is None else (exposed.evidence,)) + _said_by_plan_and_step(facts)
    words = "measure the links by themselves, and compare the nodes"
    return TopicFinding(
        topic="communication",
        answer="yes",
        words=f"messages take {', '.join(one.words for one in slower)}",
        evidence=proof,
        remedies=(
            Suggestion(words=words, changes=("supervise.speed_check.mode=report",)),
            Suggestion(words="have the network looked at: cables, other jobs, NCCL's choice of it"),
        ),
        gain_seconds=sum(one.seconds - one.planned_seconds for one in slower),
    )


def _slower_than_planned(facts: DiagnosisInput) -> tuple[_Slower, ...]:
    """Compare each axis with the plan, on the rank that waits least.

    What computation hides is measured, too, and is not in the plan's seconds: sums of gradients
    that overlap with it are not compared. Stages wait for each other in their messages: the bubble
    is none of them.
    """
    measured, planned = facts.messages, facts.planned
    if measured is None or planned is None or planned.plan.prediction is None:
        return ()
    parts, found = planned.plan.prediction.parts, []
    hidden = {"dp"} if planned.spec.optimizer.overlap_grad_reduce else set()
    by_axis = {one.axis: one for one in measured.axes}
    for axis, expected in parts.message_seconds.items():
        one = by_axis.get(axis)
        if one is None or axis in hidden or expected <= 0:
            continue
        seconds = one.seconds - (parts.bubble_seconds if axis == "pp" else 0.0)
        beyond = seconds - expected
        if seconds >= _TIMES_PLANNED * expected and beyond >= _SLOWER_SHARE * measured.step_seconds:
            found.append(_Slower(axis, seconds, expected))
    return tuple(found)


def _said_by_plan_and_step(facts: DiagnosisInput) -> tuple[Measurement, ...]:
    return (*_planned_messages(facts.planned), *_measured_messages(facts), *_rates(facts))


def _measured_messages(facts: DiagnosisInput) -> tuple[Measurement, ...]:
    """List seconds, bytes and calls of each axis in the step that was measured."""
    measured = facts.messages
    if measured is None or not measured.axes:
        return ()
    parts = ", ".join(
        f"{one.axis} {one.seconds:.3g} s ({one.calls} calls, {one.most_bytes / 1e9:.3g} GB)"
        for one in measured.axes
    )
    words = f"measured in a step of {measured.step_seconds:.4g} s, hidden or not: {parts}; seconds "
    words += "of the rank that waits least, bytes of the one that hands over most"
    return (Measurement(words=words, source=measured.source),)


def _of_traces(facts: DiagnosisInput) -> _Exposed | None:
    """Measure it on the rank that waits least for others: more elsewhere is the wait for it."""
    traces = [trace for trace in facts.traces if trace.messages or trace.communication_seconds]
    if not traces:
        return None
    least = min(traces, key=lambda trace: trace.exposed_seconds)
    words = (
        f"rank {least.rank}: {least.communication_seconds:.4g} s of messages in a step of "
        f"{least.step_seconds:.4g} s, {least.exposed_seconds:.4g} s of them while nothing was "
        "computed"
    )
    evidence = Measurement(words=words, source=least.file)
    return _Exposed(least.exposed_seconds, least.step_seconds, evidence, False)


def _of_times(facts: DiagnosisInput) -> _Exposed | None:
    """Estimate it from step times, on the rank that waits least."""
    ranks, step = facts.ranks, facts.step_seconds
    if ranks is None or step is None or not ranks.rest_seconds:
        return None
    pipelined = facts.planned is not None and facts.planned.plan.layout.pp > 1
    forward, backward = ranks.compute_seconds, ranks.backward_seconds
    if max(backward) > 0 and not pipelined:  # a pipeline sums gradients after its passes
        again = facts.planned is not None and facts.planned.plan.recompute == "full"
        times = _BACKWARD_AGAIN if again else _BACKWARD
        left = [b - times * f for b, f in zip(backward, forward, strict=True)]
        rank = min(range(len(left)), key=left.__getitem__)
        words = (
            f"rank {rank}: backward passes take {backward[rank]:.4g} s, forward passes "
            f"{forward[rank]:.4g} s; without messages about {times:g} times as long is usual"
        )
        evidence = Measurement(words=words, source=ranks.source)
        return _Exposed(max(0.0, left[rank]), step, evidence, True)
    rest = min(ranks.rest_seconds)
    seconds = max(0.0, rest - bubble_seconds(facts))
    words = f"{rest:.4g} s of {step:.4g} s are neither passes, data nor optimizer"
    return _Exposed(seconds, step, Measurement(words=words, source=ranks.source), True)


def bubble_seconds(facts: DiagnosisInput) -> float:
    """Compute the bubble, (p - 1) / v microbatches: Narayanan et al. 2021 (arXiv 2104.04473)."""
    if facts.planned is None or facts.ranks is None:
        return 0.0
    layout, batch = facts.planned.plan.layout, facts.planned.plan.batch
    computing = sum(facts.ranks.pass_seconds) / len(facts.ranks.pass_seconds)
    return computing * (layout.pp - 1) / (layout.vpp * batch.accumulation)


def _planned_messages(planned: Planned | None) -> tuple[Measurement, ...]:
    """List the predicted seconds of each axis, the location of its ranks, and their link."""
    if planned is None or planned.plan.prediction is None:
        return ()
    parts, spans = planned.plan.prediction.parts, _spans(planned)
    found = [
        f"{axis} {planned_seconds:.3g} s {spans[axis]}"
        for axis, planned_seconds in parts.message_seconds.items()
        if axis in spans and planned_seconds > 0
    ]
    links = (
        f"links per GPU: NVLink {planned.profile.nvlink.bandwidth:.3g} B/s, "
        if planned.profile.nvlink
        else "links per GPU: "
    )
    gradients = f"; gradients in fp32: {planned.gradient_bytes / 1e9:.3g} GB per GPU"
    words = f"predicted, not hidden: {', '.join(found) or 'nothing'}; {links}network "
    words += f"{planned.network_per_gpu():.3g} B/s{gradients}"
    return (Measurement(words=words, source="plan.json, profile.yaml"),)


def _spans(planned: Planned) -> dict[Axis, str]:
    return {axis.axis: axis.span for axis in planned.plan.placements if axis.size > 1}


def _rates(facts: DiagnosisInput) -> tuple[Measurement, ...]:
    """Compute bytes per second of the largest messages of a trace, beside the network's."""
    sent = [
        (message.size_bytes, message.size_bytes / message.seconds, trace.file)
        for trace in facts.traces
        for message in trace.messages
        if message.size_bytes and message.seconds > 0
    ]
    if not sent:
        return ()
    size, fastest, file = max(sent)
    words = f"the largest message, {size} B, goes at up to {fastest:.3g} B/s"
    return (Measurement(words=words, source=file),)


def _dominant(planned: Planned | None) -> Axis | None:
    """Find the axis with the most predicted messages; without a prediction the only axis."""
    if planned is None:
        return None
    spans = _spans(planned)
    if planned.plan.prediction is None:
        return next(iter(spans)) if len(spans) == 1 else None
    parts = planned.plan.prediction.parts
    known = {axis: parts.message_seconds[axis] for axis in spans}
    best = max(known, key=lambda axis: known[axis], default=None)
    return best if best is not None and known[best] > 0 else next(iter(spans), None)


def _less_of_it(planned: Planned | None, axis: Axis | None) -> list[Suggestion]:
    if planned is None or axis is None:
        return []
    if axis != "dp":
        words = f"have the planner lay out the axes anew: {axis} is {_spans(planned)[axis]}"
        return [Suggestion(words=words, changes=("parallel=auto",))]
    spec, plan = planned.spec, planned.plan
    across = _spans(planned)["dp"] in ("across nodes", "across islands")
    found = []
    abilities = abilities_of(plan.engine)
    sums_late = abilities.sums_behind_pipeline and plan.layout.pp > 1
    chooses_overlap = abilities.chooses_overlap and not sums_late
    if chooses_overlap and not spec.optimizer.overlap_grad_reduce:
        words = "sum gradients while the backward pass goes on"
        found.append(Suggestion(words=words, changes=("optimizer.overlap_grad_reduce=true",)))
    if abilities.gradient_hook and attrgetter(abilities.gradient_hook)(spec) == "none":
        hook = "hierarchical" if across and plan.nodes.gpus_per_node > 1 else "bf16"
        words = "send fewer bytes: half precision, or in full within nodes and half between them"
        found.append(Suggestion(words=words, changes=(f"{abilities.gradient_hook}={hook}",)))
    if (
        abilities.shards_over_part
        and across
        and plan.nodes.gpus_per_node > 1
        and plan.shard_gpus is None
    ):
        words = "shard within a node, with copies across nodes (HSDP)"
        change = f"optimizer.shard_gpus={plan.nodes.gpus_per_node}"
        found.append(Suggestion(words=words, changes=(change,)))
    if abilities.sum_precision and attrgetter(abilities.sum_precision)(spec) == "auto":
        change = f"{abilities.sum_precision}=bf16"
        found.append(Suggestion(words="sum gradients in half precision", changes=(change,)))
    if plan.zero == 3 and 2 in abilities.zero_stages:
        words = "keep weights gathered between the passes, for more memory"
        found.append(Suggestion(words=words, changes=("optimizer.zero=2",)))
    larger = 2 * spec.batch.global_
    words = "sum gradients half as often: a larger batch, which changes what is learned"
    return [*found, Suggestion(words=words, changes=(f"batch.global={larger}",))]


# -- Judge the pipeline's bubble and stages of unequal length -----------------------------------


_BUBBLE_SHARE = 0.08
_UNEQUAL = 1.1


def pipeline(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether stages wait for each other."""
    if facts.planned is None:
        return unknown("pipeline", "plan.json cannot be read")
    plan, ranks, step = facts.planned.plan, facts.ranks, facts.step_seconds
    if plan.layout.pp == 1:
        return fine("pipeline", "there is no pipeline")
    if ranks is None or step is None:
        return unknown("pipeline", NO_WINDOW)
    if not ranks.rest_seconds:
        return unknown("pipeline", OLD_RECORD)
    by_stage: dict[int, list[float]] = {}
    for rank, seconds in enumerate(ranks.pass_seconds):
        by_stage.setdefault(stage_of(plan.layout, rank), []).append(seconds)
    stages = [median(by_stage[stage]) for stage in sorted(by_stage)]
    unequal = max(stages) - sum(stages) / len(stages)
    bubble = min(bubble_seconds(facts) + unequal, median(ranks.rest_seconds))
    listed = ", ".join(f"{seconds:.3g}" for seconds in stages)
    proof = (
        Measurement(words=f"stages compute {listed} s", source=ranks.source),
        Measurement(
            words=f"(pp - 1) / (vpp x microbatches) = {plan.layout.pp - 1} / ({plan.layout.vpp} x "
            f"{plan.batch.accumulation}) of the computing",
            source="plan.json",
        ),
    )
    if bubble < _BUBBLE_SHARE * step:
        return fine("pipeline", f"about {bubble / step:.0%} of a step", *proof)
    return TopicFinding(
        topic="pipeline",
        answer="yes",
        words=f"stages stand still for about {bubble / step:.0%} of a step",
        evidence=proof,
        remedies=tuple(_shorter(plan, stages)),
        gain_seconds=bubble,
    )


def _shorter(plan: Plan, stages: list[float]) -> list[Suggestion]:
    """List changes that shorten the bubble."""
    found = []
    if plan.batch.micro_batch > 1:
        half = plan.batch.micro_batch // 2
        words = "smaller microbatches, hence more of them"
        found.append(Suggestion(words=words, changes=(f"batch.micro={half}",)))
    layers = sum(sum(stage.chunk_layers) for stage in plan.stages)
    interleaves = "vpp" in abilities_of(plan.engine).axes
    if interleaves and layers % (2 * plan.layout.vpp * plan.layout.pp) == 0:
        layout = plan.layout
        changes = [f"parallel.{name}={getattr(layout, name)}" for name in ("tp", "pp", "cp", "ep")]
        words = "interleave: more chunks of the model per stage"
        found.append(Suggestion(words=words, changes=(*changes, f"parallel.vpp={2 * layout.vpp}")))
    if max(stages) > _UNEQUAL * sum(stages) / len(stages):
        words = "give the longest stage fewer layers"
        words += " (`parallel.stages`), or let the planner lay out anew"
        found.append(Suggestion(words=words, changes=("parallel=auto",)))
    return found or [Suggestion(words="let the planner lay out anew", changes=("parallel=auto",))]
