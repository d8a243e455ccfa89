"""Answer all questions of a diagnosis, sorted by possible gain.

Belongs here: that order, and the shares of a step. Does not belong here: the answers.
"""

from __future__ import annotations

from statistics import median

from hpctrain.diagnose.buckets import buckets
from hpctrain.diagnose.course import saves, unsteady, warm_up
from hpctrain.diagnose.facts import DiagnosisInput
from hpctrain.diagnose.findings import TopicFinding
from hpctrain.diagnose.hardware import hardware
from hpctrain.diagnose.memory import memory
from hpctrain.diagnose.messages import communication
from hpctrain.diagnose.pipeline import pipeline
from hpctrain.diagnose.waiting import data_loading, imbalance

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
