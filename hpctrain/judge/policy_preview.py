"""Preview what the supervisor would do for each possible failure, if it happened now. Pure.

It asks `policy.decide` with the same counts (`launch_history`) as in the job, for a hypothetical
end of the launch. Belongs here: previews and remaining budgets. Does not belong here: deciding
(`policy`), words around them (`hpctrain.runs.why`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.judge.attempts import open_launch
from hpctrain.judge.causes import FAILURE_CAUSES, Cause, can_happen
from hpctrain.judge.documents import History, Situation, Verdict
from hpctrain.judge.launch_history import history
from hpctrain.judge.policy import budget_of, decide
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.supervise_config import SuperviseConfig

# Each cause as a condition; the previews are in this order.
FAILURE_CONDITIONS: dict[Cause, str] = {
    Cause.PREEMPTED: "the job is preempted",
    Cause.TIME_LIMIT: "the time limit comes",
    Cause.NODE_FAILURE: "a node is lost",
    Cause.GPU_ERROR: "a GPU fails",
    Cause.FABRIC: "the network fails",
    Cause.STORAGE: "the file system fails",
    Cause.HANG: "the run hangs",
    Cause.CRASH: "a rank crashes",
    Cause.LAUNCH_FAILURE: "srun cannot start the step",
    Cause.NODE_COMMAND: "a command of the site fails on a node",
    Cause.PORT: "a port is taken",
    Cause.GPU_OOM: "a GPU runs out of memory",
    Cause.HOST_OOM: "a node runs out of memory",
    Cause.DATA_LOADER: "the data loader dies",
    Cause.WEIGHTS: "the weights of a service cannot be read",
    Cause.ENGINE_EXIT: "the engine of a service ends by itself",
    Cause.ENDED_EARLY: "a trainer ends before its target",
    Cause.UNKNOWN: "a launch ends and nothing says why",
    Cause.SUSPECT_NUMERICS: "a result cannot be reproduced",
    Cause.DIVERGED: "the loss is not finite or jumps",
    Cause.DISK_FULL: "the disk is full",
    Cause.LOAD_FAILED: "a checkpoint cannot be loaded",
    Cause.BAD_CHECKPOINT: "no checkpoint can be used",
    Cause.DATA_CHANGED: "the data have changed",
    Cause.STARTS_OVER: "a trainer does not resume where it was told to",
    Cause.CONFIG_ERROR: "the trainer refuses its settings",
    Cause.SITE_COMMAND: "a command of the site fails everywhere",
    Cause.USER_ERROR: "the code has an error",
}
_SUSPECT = "the suspected node"


class PolicyPreview(BaseModel):
    """One decision of the policy, and all conditions that lead to it.

    `action` is an `ActionKind`, `observed` what would be done if the spec allowed it.
    """

    model_config = ConfigDict(frozen=True)

    causes: tuple[str, ...]
    conditions: tuple[str, ...]
    action: str
    reason: str
    delay_seconds: float = 0.0
    observed: tuple[str, ...] = ()


class CauseBudget(BaseModel):
    """Failures of one cause since the last new checkpoint, and the retries allowed (None: any)."""

    model_config = ConfigDict(frozen=True)

    cause: str
    used: int
    allowed: int | None


def budgets(past: History, config: SuperviseConfig) -> list[CauseBudget]:
    """List the budgets of all causes that are counted."""
    counted = [
        cause
        for cause in Cause
        if cause in FAILURE_CAUSES or cause is Cause.TIME_LIMIT
        if can_happen(cause, serves=config.serves, foreign=config.launcher == "agent")
    ]
    return [
        CauseBudget(cause=cause, used=past.of(cause), allowed=budget_of(cause, config))
        for cause in counted
    ]


def counts_serving(found: Sequence[CauseBudget]) -> bool:
    """Whether budgets are of a replica: only those have one for ends of their engine."""
    return any(budget.cause == Cause.ENGINE_EXIT for budget in found)


def preview_policy(
    events: Sequence[Event], config: SuperviseConfig, now: float, checkpoint_step: int, step: int
) -> list[PolicyPreview]:
    """Preview the decision for each cause; causes with the same decision are in one preview.

    `checkpoint_step` is the newest good checkpoint (0: none), `step` the last finished step.
    """
    running = open_launch(events)
    resume_step = checkpoint_step if running is None else running.resume_step or 0
    needed = config.shapes[0].nodes if config.shapes else 1
    least = config.shapes[-1].nodes if config.shapes else needed
    allocated = needed + config.spare_nodes
    again = "the loss is not finite or jumps twice at the same step"
    conditions = [
        (cause, words)
        for cause, words in (*FAILURE_CONDITIONS.items(), (Cause.DIVERGED, again))
        if can_happen(cause, serves=config.serves, foreign=config.launcher == "agent")
    ]
    groups: dict[PolicyPreview, list[tuple[str, str]]] = {}
    for cause, condition in conditions:
        end = Event(
            event=EventKind.LAUNCH_ENDED,
            time=now,
            cause=cause,
            resume_step=resume_step,
            checkpoint_step=checkpoint_step or None,
            failed_step=step + 1,
        )
        assumed = [*events, end]
        if condition == again:  # the second launch makes no progress
            assumed.append(end.model_copy(update={"resume_step": checkpoint_step}))
        past = history(assumed, config.storm_window_seconds)
        # `hard` stays False, because the consequence of broken hardware depends on its node. The
        # verdict has no reason, so that the reason of the action is the decision alone.
        verdict = Verdict(cause, reason="", nodes=(_SUSPECT,), step=step + 1)
        # All nodes answer, but for a lost one. Without spare nodes and smaller sizes the job ends
        # with its node.
        lost = 1 if cause is Cause.NODE_FAILURE else 0
        situation = Situation(
            keeps_nodes=not lost or allocated - lost >= least,
            allocated_nodes=allocated,
            healthy_nodes=allocated - lost,
            needed_nodes=needed,
            least_nodes=least,
            good_checkpoints=(checkpoint_step,) if checkpoint_step else (),
        )
        action = decide(verdict, past, situation, config)
        decision = PolicyPreview(
            causes=(),
            conditions=(),
            action=action.kind,
            reason=action.reason,
            delay_seconds=action.delay_seconds,
            observed=action.observed,
        )
        groups.setdefault(decision, []).append((cause, condition))
    return [
        decision.model_copy(
            update={
                "causes": tuple(cause for cause, _ in group),
                "conditions": tuple(condition for _, condition in group),
            }
        )
        for decision, group in groups.items()
    ]
