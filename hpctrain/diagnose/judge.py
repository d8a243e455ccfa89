"""Answer all questions of a diagnosis, sorted by possible gain.

Belongs here: that order, the shares of a step, the course of a run, and its check before training.
Does not belong here: time within a step (`waiting`, `messages`).
"""

from __future__ import annotations

from statistics import mean, median, quantiles

from hpctrain.diagnose.buckets import buckets
from hpctrain.diagnose.facts import (
    DiagnosisInput,
    Measurement,
    SpeedFacts,
    Suggestion,
    TopicFinding,
    fine,
    unknown,
)
from hpctrain.diagnose.memory import memory
from hpctrain.diagnose.messages import communication, pipeline
from hpctrain.diagnose.waiting import data_loading, imbalance

# -- Judge the course of a run: time of saves, first steps of launches, occasional slow steps ---


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


# ----------------------------------------------------------------------------------------------


_JUDGES = (
    data_loading,
    communication,
    imbalance,
    pipeline,
    buckets,
    memory,
    saves,
    warm_up,
    unsteady,
)
_ORDER = {"yes": 0, "no": 1, "unknown": 2}


def judge(facts: DiagnosisInput) -> tuple[TopicFinding, ...]:
    """Answer all questions: problems first, by gain, then `no`, then `unknown`."""
    answers = [judge_topic(facts) for judge_topic in _JUDGES]
    if facts.speed is not None:  # a launch may start without a check
        answers.append(hardware(facts.speed))
    return tuple(sorted(answers, key=lambda a: (_ORDER[a.answer], -(a.gain_seconds or 0.0))))


def shares(facts: DiagnosisInput) -> dict[str, float]:
    """Compute the share of each part of a step, at the median rank; empty if not known."""
    ranks, step = facts.ranks, facts.step_seconds
    if ranks is None or not ranks.step_seconds or not step:
        return {}
    parts = {
        "passes" if not any(ranks.backward_seconds) else "forward": ranks.compute_seconds,
        "backward": ranks.backward_seconds,
        "data": ranks.data_seconds,
        "optimizer": ranks.optimizer_seconds,
        "rest": ranks.rest_seconds,
    }
    return {name: median(each) / step for name, each in parts.items() if any(each)}


# -- Judge the check of GPUs and links that a launch has made before training -------------------


def hardware(speed: SpeedFacts) -> TopicFinding:
    """Judge whether a GPU or a link was slow before training, measured twice."""
    if not speed.slow:
        return fine("hardware", f"{speed.ranks} ranks were as fast as their peers and the plan")
    parts = "1 part was" if len(speed.slow) == 1 else f"{len(speed.slow)} parts were"
    if speed.nodes:
        where = f" on {', '.join(speed.nodes[:4])}"
        remedies = [
            Suggestion(words="have these nodes looked at: clocks, temperature, cables, other jobs"),
            Suggestion(
                words="let the supervisor replace such nodes",
                changes=("supervise.speed_check.mode=exclude",),
            ),
        ]
    else:
        where = ", and no single node is the reason"
        compare = (
            "compare the profile's figures and variables with what the site has: "
            "`hpctrain describe` lists all measurements"
        )
        remedies = [Suggestion(words=compare)]
    return TopicFinding(
        topic="hardware",
        answer="yes",
        words=f"{parts} slow{where}",
        evidence=tuple(Measurement(words=one, source=speed.source) for one in speed.slow),
        remedies=tuple(remedies),
    )
