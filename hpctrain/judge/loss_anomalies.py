"""Decide about a loss that is not finite or jumps: repeat, then go back, then stop. Pure.

A GPU that computes wrongly gives NaN once; data or settings that do so give it again at the same
step. So the same steps are repeated once, on other nodes where that is possible. If the anomaly
comes again at the same step it is the run's own: go back and leave the batches out (PaLM, arXiv
2204.02311, section 5.1: restart about 100 steps earlier and skip 200-500 batches), if the spec
allows it, and stop otherwise. Belongs here: this part of the policy.
"""

from __future__ import annotations

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Action, ActionKind, History, Situation, Verdict
from hpctrain.records.supervise_config import SuperviseConfig

_STOPPED_EXIT_CODE = 1
# Anomalies at one step: the first, the repetition, and one more after going back.
_MOST_AT_ONE_STEP = 2


def decide_numerics(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action:
    """Decide about `diverged` and `suspect_numerics`, as if the nodes could be kept."""
    retries = config.budgets.get(str(verdict.cause), 1)
    if verdict.cause is Cause.SUSPECT_NUMERICS or history.anomalies_at_step < retries:
        return _once_more(verdict, situation, config)
    if history.anomalies_at_step > _MOST_AT_ONE_STEP:
        reason = verdict.followed_by("it came again after going back")
        return Action(ActionKind.STOP, reason, _STOPPED_EXIT_CODE)
    rollback, good = config.rollback, situation.good_checkpoints
    target = good[min(rollback.checkpoints, len(good)) - 1] if good else 0
    plan = f"go back to step {target} and leave out {rollback.skip_steps} batches"
    if not rollback.act:
        return Action(
            ActionKind.STOP,
            verdict.followed_by("again at the same step, so the run itself is its cause", ", "),
            _STOPPED_EXIT_CODE,
            observed=(f"would {plan}",),
        )
    if situation.skip_list_problem:
        reason = verdict.followed_by(
            f"cannot {plan}: {situation.skip_list_problem}; restore the file, then continue with "
            "`hpctrain resume`"
        )
        return Action(ActionKind.STOP, reason, _STOPPED_EXIT_CODE)
    return Action(
        ActionKind.RELAUNCH,
        verdict.followed_by(f"again at the same step: {plan}", ", "),
        rollback_to=target,
        skip_steps=rollback.skip_steps,
    )


def _once_more(verdict: Verdict, situation: Situation, config: SuperviseConfig) -> Action:
    reason = verdict.followed_by("repeat the steps since the last checkpoint once")
    spares = situation.healthy_nodes - situation.needed_nodes
    if 0 < len(verdict.nodes) <= spares and config.exclude_nodes == "act":
        reason = f"{reason}, with a spare node"
        return Action(ActionKind.RELAUNCH, reason, exclude=tuple(verdict.nodes))
    others = config.cluster_nodes - situation.allocated_nodes
    can_change = config.continuation == "requeue" and others >= situation.needed_nodes
    if not can_change or not verdict.nodes:
        return Action(ActionKind.RELAUNCH, f"{reason}, on the same nodes")
    if config.exclude_nodes == "act":
        return Action(ActionKind.REQUEUE, f"{reason}, on other nodes", exclude=tuple(verdict.nodes))
    observed = f"would repeat them without {', '.join(verdict.nodes)}"
    return Action(ActionKind.RELAUNCH, f"{reason}, on the same nodes", observed=(observed,))
