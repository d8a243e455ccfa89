"""Judge the course of a run: time of saves, first steps of launches, occasional slow steps.

Belongs here: those three questions, by the metrics. Does not belong here: time within a step
(`waiting`, `messages`).
"""

from __future__ import annotations

from statistics import mean, quantiles

from hpctrain.diagnose.facts import DiagnosisInput
from hpctrain.diagnose.findings import Measurement, Suggestion, TopicFinding, fine, unknown

_SHARE = 0.03
_UNSTEADY = 1.3  # the slowest twentieth over the median
_FEWEST = 20
_NO_STEPS = "no usual step is through yet: the first one of a launch does not count"


def saves(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether training stalls for checkpoints."""
    recorded, steps = facts.saves, facts.steps
    if recorded is None or steps is None or not steps.all_seconds:
        return unknown("saves", "no save is through yet")
    share = recorded.stall_seconds / (steps.all_seconds + recorded.stall_seconds)
    proof = Measurement(
        words=f"saves while training: {recorded.count}, {recorded.stall_seconds:.4g} s of standing "
        f"still in all; steps took {steps.all_seconds:.4g} s",
        source="saves.jsonl, metrics.jsonl",
    )
    if share < _SHARE:
        return fine("saves", f"{share:.1%} of the time", proof)
    remedies = [
        Suggestion(words="save as often as saves and failures make it worth (Young/Daly)",
               changes=("checkpoint.every=auto",))
    ]  # fmt: skip
    if not recorded.asynchronous:
        words = "write in the background"
        remedies.insert(0, Suggestion(words=words, changes=("checkpoint.asynchronous=true",)))
    return TopicFinding(
        topic="saves",
        answer="yes",
        words=f"training stands still for {share:.0%} of the time",
        evidence=(proof,),
        remedies=tuple(remedies),
        gain_seconds=share * (facts.step_seconds or 0.0) / (1 - share),
    )


def warm_up(facts: DiagnosisInput) -> TopicFinding:
    """Judge the cost of the first steps of launches (connections, compilation, caches)."""
    steps = facts.steps
    if steps is None or steps.median_seconds is None:
        return unknown("warm_up", _NO_STEPS)
    share = steps.lost_seconds / steps.all_seconds
    proof = Measurement(
        words=f"first steps of {steps.launches} launches took {steps.lost_seconds:.4g} s more than "
        f"others, of {steps.all_seconds:.4g} s of steps",
        source="metrics.jsonl",
    )
    if steps.launches == 1 or share < _SHARE:
        launches = "one launch" if steps.launches == 1 else f"{steps.launches} launches"
        return fine("warm_up", f"{share:.1%} of the steps' time, {launches}", proof)
    return TopicFinding(
        topic="warm_up",
        answer="yes",
        words=f"first steps of {steps.launches} launches are {share:.0%} of the steps' time",
        evidence=(proof,),
        remedies=(
            Suggestion(
                words="`hpctrain goodput` says why the run starts so often, and what that costs"
            ),
        ),
        gain_seconds=share * steps.median_seconds,
    )


def unsteady(facts: DiagnosisInput) -> TopicFinding:
    """Judge whether some steps take much longer than the median, for example after saves."""
    steps = facts.steps
    if steps is None or len(steps.usual) < _FEWEST:
        count = 0 if steps is None else len(steps.usual)
        return unknown("unsteady", f"{count} usual steps are too few to tell ({_FEWEST})")
    middle = steps.median_seconds
    assert middle is not None
    slowest = sorted(sorted(steps.usual, key=lambda step: -step[1])[:3])
    listed = ", ".join(f"{step} ({seconds:.4g} s)" for step, seconds in slowest)
    slow = quantiles((seconds for _, seconds in steps.usual), n=20)[-1]
    proof = Measurement(
        words=f"median {middle:.4g} s, slowest twentieth from {slow:.4g} s; slowest steps {listed}",
        source="metrics.jsonl",
    )
    if slow < _UNSTEADY * middle:
        return fine(
            "unsteady", f"the slowest twentieth is {slow / middle - 1:.0%} above the median", proof
        )
    return TopicFinding(
        topic="unsteady",
        answer="yes",
        words=f"the slowest twentieth of the steps takes {slow / middle:.1f} times the median",
        evidence=(proof,),
        remedies=(
            Suggestion(
                words="compare these steps with saves (`hpctrain checkpoints`), evaluations and "
                "what else ran on the nodes"
            ),
        ),
        gain_seconds=max(0.0, mean(seconds for _, seconds in steps.usual) - middle),
    )
