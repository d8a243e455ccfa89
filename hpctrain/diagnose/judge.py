"""All questions, answered, in order of what there is to gain.

Belongs here: that order, and where a step's time goes in one line. Does not belong here: the
answers.
"""

from __future__ import annotations

from statistics import median

from hpctrain.diagnose.buckets import buckets
from hpctrain.diagnose.course import saves, unsteady, warm_up
from hpctrain.diagnose.facts import Facts
from hpctrain.diagnose.findings import Finding
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


def judge(facts: Facts) -> tuple[Finding, ...]:
    """Answer all questions: problems first, by gain, then what is fine, then what is unknown."""
    found = [ask(facts) for ask in _JUDGES]
    return tuple(sorted(found, key=lambda one: (_ORDER[one.answer], -(one.gain_seconds or 0.0))))


def shares(facts: Facts) -> dict[str, float]:
    """Compute shares of a step, of the middle rank in each; empty when they are not known."""
    ranks, step = facts.ranks, facts.step_seconds
    if ranks is None or not ranks.step or not step:
        return {}
    parts = {
        "passes" if not any(ranks.backward) else "forward": ranks.compute,
        "backward": ranks.backward,
        "data": ranks.data,
        "optimizer": ranks.optimizer,
        "rest": ranks.rest,
    }
    return {name: median(each) / step for name, each in parts.items() if any(each)}
