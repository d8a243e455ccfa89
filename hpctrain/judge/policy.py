"""Decide what to do about a verdict. Pure.

One function, so that the same decision can be tested, shown (`hpctrain why`) and simulated
(`hpctrain simulate`). Principles:

- A user's cancel and a user's mistake stop the run at once; ends by the scheduler cost nothing.
- Every other cause, signals without an explanation included, has a budget, which progress refills.
- A run that ends unfinished, without a request to end, exits with a code other than 0.
- Nodes are kept while enough of them are good: a queue costs hours, a relaunch seconds.
- What could do harm (excluding nodes, going back) is only recorded until the spec allows it. A node
  on which this run cannot work as it is (unfit) is excluded in any case.
- The cause "unknown" never leads to anything that could lose work.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.base.units import short_duration
from hpctrain.judge.causes import (
    CHECKPOINT_CAUSES,
    FAILURE_CAUSES,
    FINAL_CAUSES,
    SCHEDULER_CAUSES,
    Cause,
)
from hpctrain.judge.documents import Action, ActionKind, History, Situation, Verdict
from hpctrain.records.supervise_config import SuperviseConfig

STOPPED_EXIT_CODE = 1
# Retries without a new checkpoint, where they differ from `failures_without_progress` - 1.
# Five where the cause is not the run's own and may pass: a lost node, which the next attempt
# replaces; a signal without an explanation, before which the run was saved; storage and ports,
# which are shared; a GPU or a link, on which the largest runs fail several times between two
# checkpoints (docs/simulation.md). One where it may recur at the same data, such as full memory
# (NVRx gives "may recover" one retry, docs/design/attribution).
RETRIES = {
    Cause.NODE_FAILURE: 5,
    Cause.PROLOG_FAILURE: 5,
    Cause.NODE_COMMAND: 5,
    Cause.EXTERNAL_SIGNAL: 5,
    Cause.GPU_ERROR: 5,
    Cause.FABRIC: 5,
    Cause.STORAGE: 5,
    Cause.PORT: 5,
    Cause.GPU_OOM: 1,
    Cause.HOST_OOM: 1,
    Cause.DATA_LOADER: 1,
    # Weights that cannot be read may be those of one moment; missing ones stay missing.
    Cause.WEIGHTS: 1,
    Cause.DIVERGED: 1,
    Cause.SUSPECT_NUMERICS: 1,
    # Two tries for each of two checkpoints: when both cannot be loaded, something else is wrong.
    Cause.LOAD_FAILED: 3,
}
# All causes together: a run that fails in ever new ways is stopped, too.
_ALL_CAUSES_FACTOR = 4
_FIRST_DELAY_SECONDS = 1.0
# What others have to repair: a retry within a minute is of no use.
_SLOW_CAUSES = frozenset({Cause.STORAGE, Cause.FABRIC})
_SLOW_FIRST_DELAY_SECONDS = 30.0
_LONGEST_DELAY_SECONDS = 300.0
_MOST_DOUBLINGS = 20
_STORM_DELAY_SECONDS = 300.0
_LONGEST_STORM_DELAY_SECONDS = 1800.0


def budget_of(cause: Cause, config: SuperviseConfig) -> int | None:
    """Return the retries after this cause without a new checkpoint; None: no limit."""
    if str(cause) in config.budgets:
        return config.budgets[str(cause)]
    if cause in RETRIES:
        return RETRIES[cause]
    if cause in FAILURE_CAUSES or cause is Cause.TIME_LIMIT:
        return config.failures_without_progress - 1
    return 0 if cause in FINAL_CAUSES else None


def missing_progress(config: SuperviseConfig) -> str:
    """Name what launches have not brought, while a budget is used up."""
    if config.serves:
        return f"without having served for {short_duration(config.served_progress_seconds)}"
    return "without a new checkpoint"


def _goes_on(config: SuperviseConfig) -> str:
    """Say who continues a run that has no job any more."""
    if config.serves:
        return "the controller of the service starts another replica"
    return "`hpctrain resume` goes on"


def decide(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action:
    """Decide about one verdict. `history` includes the launch that the verdict is about."""
    action = _needs_no_decision(verdict, config)
    if action is None and verdict.cause is Cause.LOAD_FAILED:
        # Going back did not help, before the run goes back once more.
        action = _spent(verdict, history, situation, config)
    if action is None:
        action = _about_checkpoint(verdict, history, situation)
    if action is None:
        action = _final(verdict, history, config) or _spent(verdict, history, situation, config)
    if action is None and verdict.cause in (Cause.DIVERGED, Cause.SUSPECT_NUMERICS):
        action = _about_numerics(verdict, history, situation, config)
    if action is not None:
        return _where_possible(action, verdict, situation, config)
    if verdict.already_requeued:
        return Action(ActionKind.LEAVE, "Slurm has requeued the job already")
    if verdict.cause in SCHEDULER_CAUSES or verdict.broken_allocation or not situation.keeps_nodes:
        return _leave_to_next_attempt(verdict, situation, config)
    return _retry(verdict, history, situation, config)


def _needs_no_decision(verdict: Verdict, config: SuperviseConfig) -> Action | None:
    """Handle the ends of launches that need no decision."""
    if verdict.cause is Cause.DONE:
        return Action(ActionKind.FINISH, "the run is done")
    if verdict.cause is Cause.SUPERSEDED:
        return Action(ActionKind.LEAVE, "leave the run to the newer launch")
    if verdict.hold and config.continuation == "requeue":
        return Action(ActionKind.HOLD, verdict.followed_by("go on with `hpctrain resume`", "; "))
    if verdict.cause is Cause.YIELDED and config.serves:
        return Action(ActionKind.STOP, verdict.followed_by("the replica has left", "; "))
    if verdict.cause is Cause.YIELDED:
        return Action(ActionKind.STOP, verdict.followed_by("go on with `hpctrain resume`", "; "))
    return None


def _where_possible(
    action: Action, verdict: Verdict, situation: Situation, config: SuperviseConfig
) -> Action:
    """Turn a relaunch into the next attempt of the run where the job loses its nodes.

    Where no attempt follows, nothing is repeated: the reason then says what happened and who goes
    on. That the run goes back to an older checkpoint is recorded all the same.
    """
    if action.kind is not ActionKind.RELAUNCH:
        return action
    if verdict.already_requeued:
        return replace(action, kind=ActionKind.LEAVE)
    if not situation.keeps_nodes:
        later = _leave_to_next_attempt(replace(verdict, reason=""), situation, config)
        action = replace(action, kind=later.kind, exit_code=later.exit_code)
        if later.exit_code and (action.rejected_step, action.rollback_to) == (None, None):
            reason = verdict.followed_by(later.reason, "; ")
            return replace(action, reason=reason, observed=later.observed)
        if later.exit_code:
            return replace(action, reason=f"{action.reason}; {later.reason}")
    return action


def _final(verdict: Verdict, history: History, config: SuperviseConfig) -> Action | None:
    """Stop for good: a person cancelled the run, or no retry can help."""
    if verdict.cause is Cause.CANCELLED:
        return _stop("cancelled runs stay cancelled")
    if verdict.cause in FINAL_CAUSES:
        return _stop(verdict.followed_by("a retry cannot help"))
    if verdict.cause is Cause.GPU_OOM and not history.ever_progressed:
        smaller = "`hpctrain plan --explain` shows smaller layouts"
        if config.serves:
            smaller = "`hpctrain serve plan` shows what fits"
        return _stop(verdict.followed_by(f"it has never fitted, so a retry cannot help; {smaller}"))
    return None


def _spent(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    """Stop if the budget of this cause, or of all causes, is used up without progress."""
    cause, budget = verdict.cause, budget_of(verdict.cause, config)
    if cause is Cause.TIME_LIMIT:
        count = history.time_limits_without_progress
        if budget is not None and count > budget:
            reached = f"{count} time limits in a row" if count > 1 else "the time limit was reached"
            remedy = "" if config.serves else " or save more often"
            return _stop(
                f"{reached} {missing_progress(config)}: raise `resources.walltime`{remedy}"
            )
        return None
    if cause not in FAILURE_CAUSES or cause is Cause.DIVERGED:
        return None
    count = history.of(cause)
    spent = budget is not None and count > budget
    if cause is Cause.STORAGE and situation.storage_away:
        stormy = history.recent_failures >= config.storm_failures
        requeue = _requeue_elsewhere(verdict, situation, config) if spent or stormy else None
        if requeue is not None:
            return requeue
    if spent:
        name = str(cause).replace("_", " ")
        failed = f"{count} failed launches in a row" if count > 1 else "1 launch"
        return _stop(verdict.preceded_by(f"{failed} ({name}) {missing_progress(config)}"))
    if history.failures_without_progress >= limit_of_all(config):
        return _stop(
            verdict.preceded_by(
                f"{history.failures_without_progress} failed launches in a row "
                f"{missing_progress(config)}, the last"
            )
        )
    return None


def _requeue_elsewhere(
    verdict: Verdict, situation: Situation, config: SuperviseConfig
) -> Action | None:
    """Requeue a job whose run directory cannot be written: other nodes may reach it.

    The ledger has no record of it then, so Slurm's count of starts replaces the budget.
    """
    budget = budget_of(Cause.STORAGE, config)
    if config.continuation != "requeue" or budget is None:
        return None
    if situation.restarts >= budget:
        times = f"started {situation.restarts + 1} times"
        return _stop(verdict.followed_by(f"{times} without a ledger that can be written"))
    decision = "other nodes may reach it, so the next attempt tries"
    return Action(ActionKind.REQUEUE, verdict.followed_by(decision))


def limit_of_all(config: SuperviseConfig) -> int:
    """Return how many failures by all causes without a new checkpoint stop the run."""
    return _ALL_CAUSES_FACTOR * config.failures_without_progress


def _leave_to_next_attempt(
    verdict: Verdict, situation: Situation, config: SuperviseConfig
) -> Action:
    """Leave the run to the next attempt: the nodes are gone or will be."""
    if config.continuation == "requeue":
        return _avoiding(
            Action(ActionKind.REQUEUE, verdict.followed_by("the next attempt resumes")),
            situation,
            config,
        )
    if config.continuation == "none":
        return _stop(verdict.followed_by(f"this site does not requeue: {_goes_on(config)}", "; "))
    chain = _CHAINS[config.continuation]
    if situation.followed:
        reason = verdict.followed_by(f"the next job of the {chain} resumes")
        return _avoiding(Action(ActionKind.LEAVE, reason), situation, config)
    decision = f"no job of the {chain} is left: {_goes_on(config)}"
    return Action(ActionKind.LEAVE, verdict.followed_by(decision, "; "), STOPPED_EXIT_CODE)


_CHAINS = {"chain": "chain", "singleton": "singletons", "array": "array"}


def _retry(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action:
    """Relaunch on the nodes at hand, unless too few of them are good."""
    failures, budget = history.of(verdict.cause), budget_of(verdict.cause, config)
    limit = "" if budget is None else f" of {budget + 1}"
    count = f"failure {failures}{limit} {missing_progress(config)}"
    if not failures:
        count = "it had made progress"
    if history.recent_failures >= config.storm_failures:
        return _slow_down(history, situation, config, count)
    left = situation.healthy_nodes
    if verdict.hard and config.exclude_nodes == "act":
        left -= len(situation.exclude_here)
    if left < situation.least_nodes:
        later = _leave_to_next_attempt(verdict, situation, config)
        usable = "are fit" if situation.unfit else "answer"
        too_few = (
            f"{situation.healthy_nodes} of {situation.allocated_nodes} nodes {usable}, "
            f"{situation.least_nodes} are needed"
        )
        return replace(later, reason=f"{too_few} ({count}); {later.reason}")
    avoided = len(situation.exclude_here) if config.exclude_nodes == "act" else 0
    used = situation.healthy_nodes - avoided
    if used < situation.needed_nodes <= situation.healthy_nodes:
        used = situation.healthy_nodes
    where = "on the same nodes"
    if used < situation.needed_nodes:
        where = f"on {used} of {situation.needed_nodes} nodes"
    elif used < situation.allocated_nodes:
        where = "with a spare node"
    reason = f"start again {where} ({count})"
    slow = verdict.cause in _SLOW_CAUSES
    first_seconds = _SLOW_FIRST_DELAY_SECONDS if slow else _FIRST_DELAY_SECONDS
    doublings = min(max(failures - 1, 0), _MOST_DOUBLINGS)
    delay_seconds = min(first_seconds * float(2**doublings), _LONGEST_DELAY_SECONDS)
    action = Action(ActionKind.RELAUNCH, reason, delay_seconds=delay_seconds)
    return _avoiding(action, situation, config)


def _slow_down(
    history: History, situation: Situation, config: SuperviseConfig, count: str
) -> Action:
    """Slow down in a storm of failures, which an immediate retry would make worse.

    Nodes that wait cost as much as nodes that train, so they are given back where the job can be
    put back into the queue; Slurm lets it wait there for at least two minutes (cred_expire).
    """
    window = config.storm_window_seconds / 60
    storm = f"{history.recent_failures} failures within {window:.0f} min"
    if config.continuation == "requeue":
        action = Action(ActionKind.REQUEUE, f"{storm}: give the nodes back and queue ({count})")
        return _avoiding(action, situation, config)
    beyond = min(history.recent_failures - config.storm_failures, _MOST_DOUBLINGS)
    delay = min(_STORM_DELAY_SECONDS * float(2**beyond), _LONGEST_STORM_DELAY_SECONDS)
    reason = f"{storm}: wait {delay / 60:.0f} min before the next launch ({count})"
    action = Action(ActionKind.RELAUNCH, reason, delay_seconds=delay)
    return _avoiding(action, situation, config)


def _avoiding(action: Action, situation: Situation, config: SuperviseConfig) -> Action:
    """Exclude the nodes that are unfit for this run and those that the node ledger blames.

    Where the spec does not allow the latter, only record that they would be excluded.
    """
    if config.exclude_nodes == "act":
        exclude = tuple(dict.fromkeys((*situation.exclude, *situation.unfit)))
        return replace(action, exclude=exclude)
    action = replace(action, exclude=situation.unfit)
    others = [node for node in situation.exclude if node not in situation.unfit]
    if not others:
        return action
    why = f" ({situation.why_exclude})" if situation.why_exclude else ""
    return replace(action, observed=(*action.observed, f"would avoid {', '.join(others)}{why}"))


def _stop(reason: str) -> Action:
    return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)


# ----------------------------------------------------------------------------------------------
# Decide about a checkpoint that has changed since it was written, or that cannot be loaded. Pure.
# Content that differs from its digests is proof, so that checkpoint is rejected at once. A failure
# to load may be due to a node, a library or the checkpoint: it is tried twice, then the previous
# one is used. A rejected checkpoint stays in quarantine. If the previous checkpoint cannot be
# loaded either, the cause is probably elsewhere, so the run stops instead of rejecting one
# checkpoint after another.


# Launches that may fail to load one checkpoint before it is rejected.
TRIES_PER_CHECKPOINT = 2


def _about_checkpoint(verdict: Verdict, history: History, situation: Situation) -> Action | None:
    """Decide whether to reject a checkpoint or stop the run; None leaves it to the other rules."""
    step = verdict.checkpoint_step
    if step is None or verdict.cause not in CHECKPOINT_CAUSES:
        return None
    proven = verdict.cause is Cause.BAD_CHECKPOINT
    if not proven and history.failed_loads < TRIES_PER_CHECKPOINT:
        return None
    older = max((good for good in situation.good_checkpoints if good < step), default=None)
    if older is None:
        reason = verdict.followed_by(
            f"there is no checkpoint before step {step}; restore it from a copy, or "
            "`hpctrain resume --from-scratch` gives up all steps"
        )
        # A checkpoint that is proven to be damaged is rejected; another one may load elsewhere.
        rejected = step if proven else None
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE, rejected_step=rejected)
    name = "has other content than was written" if proven else "verifies and cannot be loaded"
    reason = verdict.followed_by(
        f"the checkpoint of step {step} {name}; go back to step {older} and "
        f"keep step {step} in quarantine"
    )
    return Action(ActionKind.RELAUNCH, reason, rejected_step=step)


# -- Decide about a loss that is not finite or jumps: repeat, then go back, then stop. Pure -----
# A GPU that computes wrongly gives NaN once; data or settings that do so give it again at the same
# step. So the same steps are repeated once, on other nodes where that is possible. If the anomaly
# comes again at the same step it is the run's own: go back and leave the batches out (PaLM, arXiv
# 2204.02311, section 5.1: restart about 100 steps earlier and skip 200-500 batches), if the spec
# allows it, and stop otherwise.


# Anomalies at one step: the first, the repetition, and one more after going back.
_MOST_AT_ONE_STEP = 2


def _about_numerics(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action:
    """Decide about `diverged` and `suspect_numerics`, as if the nodes could be kept."""
    retries = config.budgets.get(str(verdict.cause), 1)
    if verdict.cause is Cause.SUSPECT_NUMERICS or history.anomalies_at_step < retries:
        return _once_more(verdict, situation, config)
    if history.anomalies_at_step > _MOST_AT_ONE_STEP:
        reason = verdict.followed_by("it came again after going back")
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)
    rollback, good = config.rollback, situation.good_checkpoints
    target = good[min(rollback.checkpoints, len(good)) - 1] if good else 0
    plan = f"go back to step {target} and leave out {rollback.skip_steps} batches"
    if not rollback.act:
        return Action(
            ActionKind.STOP,
            verdict.followed_by("again at the same step, so the run itself is its cause", ", "),
            STOPPED_EXIT_CODE,
            observed=(f"would {plan}",),
        )
    if situation.skip_list_problem:
        reason = verdict.followed_by(
            f"cannot {plan}: {situation.skip_list_problem}; restore the file, then continue with "
            "`hpctrain resume`"
        )
        return Action(ActionKind.STOP, reason, STOPPED_EXIT_CODE)
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
