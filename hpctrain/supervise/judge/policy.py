"""What to do about a verdict. One pure function, so that the same answer can be tested, shown
(`hpctrain why`) and simulated (`hpctrain simulate`).

Principles: a user's cancel and a user's mistake stop at once; what the scheduler does costs
nothing; every other cause, a signal that nobody explains among them, has a budget of its own, which
progress fills up again; a run that is over without being done and without having been asked to end
leaves with a code that is not 0; nodes are kept
while enough of them are good, because a queue costs hours and a relaunch seconds; what could do
harm (avoiding nodes, going back) is only said until the spec allows it, but a node on which this
run cannot work as it is (unfit) is left in any case; "unknown" never does anything that could lose
work.
"""

from __future__ import annotations

from dataclasses import replace

from hpctrain.store.supervise_config import SuperviseConfig
from hpctrain.supervise.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES, Cause
from hpctrain.supervise.judge.documents import Action, ActionKind, History, Situation, Verdict
from hpctrain.supervise.judge.loss_anomalies import decide_numerics
from hpctrain.supervise.judge.unusable_checkpoint import decide_checkpoint

STOPPED_EXIT_CODE = 1
# Retries without a new checkpoint, where they differ from `failures_without_progress` - 1.
# A node is lost by no fault of the run, and the next attempt has another one: five; so it is with a
# signal that nobody explains, before which the run was saved. Storage and
# ports are shared with others and recover: five; so does a GPU or a link, on which the largest
# runs fail several times between two checkpoints (docs/simulation.md). Memory that is full at one
# place of the data is full there again: one (NVRx gives "may recover" one retry,
# docs/design/attribution).
RETRIES = {
    Cause.NODE_FAILURE: 5,
    Cause.PROLOG_FAILURE: 5,
    Cause.EXTERNAL_SIGNAL: 5,
    Cause.GPU_ERROR: 5,
    Cause.FABRIC: 5,
    Cause.STORAGE: 5,
    Cause.PORT: 5,
    Cause.GPU_OOM: 1,
    Cause.HOST_OOM: 1,
    Cause.DATA_LOADER: 1,
    Cause.DIVERGED: 1,
    Cause.SUSPECT_NUMERICS: 1,
    # Two tries for each of two checkpoints: when both cannot be loaded, something else is wrong.
    Cause.LOAD_FAILED: 3,
}
# All causes together: a run that fails in ever new ways is stopped, too.
_ALL_CAUSES_FACTOR = 4
_FIRST_DELAY_SECONDS = 1.0
# What others have to repair: no use in asking again within a minute.
_SLOW_CAUSES = frozenset({Cause.STORAGE, Cause.FABRIC})
_SLOW_FIRST_DELAY_SECONDS = 30.0
_LONGEST_DELAY_SECONDS = 300.0
_MOST_DOUBLINGS = 20
_STORM_DELAY_SECONDS = 300.0
_LONGEST_STORM_DELAY_SECONDS = 1800.0


def budget_of(cause: Cause, config: SuperviseConfig) -> int | None:
    """Retries after this cause without a new checkpoint; None: as often as it comes."""
    if str(cause) in config.budgets:
        return config.budgets[str(cause)]
    if cause in RETRIES:
        return RETRIES[cause]
    if cause in FAILURE_CAUSES or cause is Cause.TIME_LIMIT:
        return config.failures_without_progress - 1
    return 0 if cause in FINAL_CAUSES else None


def decide(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action:
    """The action for one verdict. `history` includes the launch that the verdict is about."""
    for rule in (_ended, _spent_loading, _checkpoint, _final, _spent, _numerics):
        action = rule(verdict, history, situation, config)
        if action is not None:
            return action
    if verdict.already_requeued:
        return Action(ActionKind.LEAVE, "Slurm has requeued the job already")
    if verdict.cause in SCHEDULER_CAUSES or verdict.broken_allocation or not situation.keeps_nodes:
        return _go_on_later(verdict, situation, config)
    return _retry(verdict, history, situation, config)


def _ended(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    """What needs no decision."""
    if verdict.cause is Cause.DONE:
        return Action(ActionKind.FINISH, "the run is done")
    if verdict.cause is Cause.SUPERSEDED:
        return Action(ActionKind.LEAVE, "leave the run to the newer launch")
    if verdict.hold and config.continuation == "requeue":
        return Action(ActionKind.HOLD, f"{verdict.reason}; go on with `hpctrain resume`")
    if verdict.cause is Cause.YIELDED:
        return Action(ActionKind.STOP, f"{verdict.reason}; go on with `hpctrain resume`")
    return None


def _checkpoint(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    action = decide_checkpoint(verdict, history, situation, config)
    if action is None or action.kind is not ActionKind.RELAUNCH:
        return action
    if verdict.already_requeued:
        return replace(action, kind=ActionKind.LEAVE)
    if not situation.keeps_nodes:
        later = _go_on_later(verdict, situation, config)
        return replace(action, kind=later.kind, exit_code=later.exit_code)
    return action


def _spent_loading(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    """Before stepping back once more: it does not help."""
    if verdict.cause is not Cause.LOAD_FAILED:
        return None
    return _spent(verdict, history, situation, config)


def _final(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    """A person has said so, or no retry can help."""
    if verdict.cause is Cause.CANCELLED:
        return _stop("cancelled runs stay cancelled")
    if verdict.cause in FINAL_CAUSES:
        return _stop(f"{verdict.reason}: a retry cannot help")
    if verdict.cause is Cause.GPU_OOM and not history.ever_progressed:
        return _stop(
            f"{verdict.reason}: it has never fitted, so a retry cannot help; "
            "`hpctrain plan --explain` shows smaller layouts"
        )
    return None


def _spent(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    """The budget of this cause, or of all, is used up without progress."""
    cause, budget = verdict.cause, budget_of(verdict.cause, config)
    if cause is Cause.TIME_LIMIT:
        count = history.time_limits_without_progress
        if budget is not None and count > budget:
            return _stop(
                f"{count} time limits in a row without a new checkpoint: raise "
                "`resources.walltime` or save more often"
            )
        return None
    if cause not in FAILURE_CAUSES or cause is Cause.DIVERGED:
        return None
    count = history.of(cause)
    spent = budget is not None and count > budget
    if cause is Cause.STORAGE and situation.storage_away:
        stormy = history.recent_failures >= config.storm_failures
        elsewhere = _elsewhere(verdict, situation, config) if spent or stormy else None
        if elsewhere is not None:
            return elsewhere
    if spent:
        return _stop(f"{_failures(count, cause)} without a new checkpoint: {verdict.reason}")
    if history.failures_without_progress >= limit_of_all(config):
        return _stop(
            f"{history.failures_without_progress} failed launches in a row without a new "
            f"checkpoint, the last: {verdict.reason}"
        )
    return None


def _elsewhere(verdict: Verdict, situation: Situation, config: SuperviseConfig) -> Action | None:
    """What cannot be written from here can perhaps be from other nodes. Nothing of it is in the
    ledger then, so Slurm's own count of starts takes the place of the budget."""
    budget = budget_of(Cause.STORAGE, config)
    if config.continuation != "requeue" or budget is None:
        return None
    if situation.restarts >= budget:
        times = f"started {situation.restarts + 1} times"
        return _stop(f"{verdict.reason}: {times} without a ledger that can be written")
    reason = f"{verdict.reason}: other nodes may reach it, so the next attempt tries"
    return Action(ActionKind.REQUEUE, reason)


def limit_of_all(config: SuperviseConfig) -> int:
    """Failures by all causes without a new checkpoint at which the run is stopped."""
    return _ALL_CAUSES_FACTOR * config.failures_without_progress


def _failures(count: int, cause: Cause) -> str:
    words = str(cause).replace("_", " ")
    return f"{count} failed launches in a row ({words})" if count > 1 else f"1 launch ({words})"


def _numerics(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    if verdict.cause not in (Cause.DIVERGED, Cause.SUSPECT_NUMERICS):
        return None
    action = decide_numerics(verdict, history, situation, config)
    if action.kind is not ActionKind.RELAUNCH:
        return action
    if verdict.already_requeued:
        return replace(action, kind=ActionKind.LEAVE)
    if not situation.keeps_nodes:
        later = _go_on_later(verdict, situation, config)
        return replace(action, kind=later.kind, exit_code=later.exit_code)
    return action


def _go_on_later(verdict: Verdict, situation: Situation, config: SuperviseConfig) -> Action:
    """The nodes are gone or going: the next attempt resumes."""
    if config.continuation == "requeue":
        return _avoiding(
            Action(ActionKind.REQUEUE, f"{verdict.reason}: the next attempt resumes"),
            situation,
            config,
        )
    if config.continuation == "none":
        return _stop(f"{verdict.reason}; this site does not requeue: `hpctrain resume` goes on")
    chain = _CHAINS[config.continuation]
    if situation.followed:
        words = f"{verdict.reason}: the next job of the {chain} resumes"
        return _avoiding(Action(ActionKind.LEAVE, words), situation, config)
    reason = f"{verdict.reason}; no job of the {chain} is left: `hpctrain resubmit` goes on"
    return Action(ActionKind.LEAVE, reason, STOPPED_EXIT_CODE)


_CHAINS = {"chain": "chain", "singleton": "singletons", "array": "array"}


def _retry(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action:
    """Relaunch on the nodes at hand, unless too few of them are good."""
    count = _count(verdict, history, config)
    if history.recent_failures >= config.storm_failures:
        return _weather(history, situation, config, count)
    delay = _delay(verdict, history)
    if _must_change_nodes(verdict, situation, config):
        later = _go_on_later(verdict, situation, config)
        return replace(later, reason=f"{_too_few(situation)} ({count}); {later.reason}")
    reason = f"start again {_where(verdict, situation, config)} ({count})"
    action = Action(ActionKind.RELAUNCH, reason, delay_seconds=delay)
    return _avoiding(action, situation, config)


def _must_change_nodes(verdict: Verdict, situation: Situation, config: SuperviseConfig) -> bool:
    if situation.healthy_nodes < situation.least_nodes:
        return True
    if not verdict.hard or config.exclude_nodes != "act":
        return False
    return situation.healthy_nodes - len(situation.exclude_here) < situation.least_nodes


def _too_few(situation: Situation) -> str:
    good = situation.healthy_nodes
    what = "are fit" if situation.unfit else "answer"
    return f"{good} of {situation.allocated_nodes} nodes {what}, {situation.least_nodes} are needed"


def _where(verdict: Verdict, situation: Situation, config: SuperviseConfig) -> str:
    avoided = len(situation.exclude_here) if config.exclude_nodes == "act" else 0
    left = situation.healthy_nodes - avoided
    if left < situation.needed_nodes <= situation.healthy_nodes:
        left = situation.healthy_nodes
    if left < situation.needed_nodes:
        return f"on {left} of {situation.needed_nodes} nodes"
    if left < situation.allocated_nodes:
        return "with a spare node"
    return "on the same nodes"


def _count(verdict: Verdict, history: History, config: SuperviseConfig) -> str:
    failures, budget = history.of(verdict.cause), budget_of(verdict.cause, config)
    if not failures:
        return "it had made progress"
    limit = "" if budget is None else f" of {budget + 1}"
    return f"failure {failures}{limit} without a new checkpoint"


def _delay(verdict: Verdict, history: History) -> float:
    slow = verdict.cause in _SLOW_CAUSES
    first = _SLOW_FIRST_DELAY_SECONDS if slow else _FIRST_DELAY_SECONDS
    repeats = max(history.of(verdict.cause) - 1, 0)
    return min(first * float(2 ** min(repeats, _MOST_DOUBLINGS)), _LONGEST_DELAY_SECONDS)


def _weather(history: History, situation: Situation, config: SuperviseConfig, count: str) -> Action:
    """A storm: something around the run is broken, and trying again at once feeds it.

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
    """Without the nodes that are unfit for this run, and those that the node ledger says to avoid;
    where the spec does not allow the latter, with the word that they would be."""
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
