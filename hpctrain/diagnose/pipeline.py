"""Judge the pipeline's bubble and stages of unequal length.

Belongs here: that question. Does not belong here: messages (`messages`).
"""

from __future__ import annotations

from statistics import median

from hpctrain.diagnose.facts import DiagnosisInput, stage_of
from hpctrain.diagnose.findings import Measurement, Suggestion, TopicFinding, fine, unknown
from hpctrain.diagnose.messages import bubble_seconds
from hpctrain.diagnose.waiting import NO_WINDOW, OLD_RECORD
from hpctrain.plan.documents import Plan
from hpctrain.spec.engines.registry import abilities_of

_SHARE = 0.08
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
    if bubble < _SHARE * step:
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
