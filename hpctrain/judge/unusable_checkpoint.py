"""Decide about a checkpoint that has changed since it was written, or that cannot be loaded. Pure.

Content that differs from its digests is proof, so that checkpoint is rejected at once. A failure to
load may be due to a node, a library or the checkpoint: it is tried twice, then the previous one is
used. A rejected checkpoint stays in quarantine. If the previous checkpoint cannot be loaded either,
the cause is probably elsewhere, so the run stops instead of rejecting one checkpoint after another.
Belongs here: this part of the policy.
"""

from __future__ import annotations

from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import Action, ActionKind, History, Situation, Verdict
from hpctrain.records.supervise_config import SuperviseConfig

_STOPPED_EXIT_CODE = 1
# Launches that may fail to load one checkpoint before it is rejected.
TRIES_PER_CHECKPOINT = 2


def decide_about_checkpoint(
    verdict: Verdict, history: History, situation: Situation, config: SuperviseConfig
) -> Action | None:
    """Decide whether to reject a checkpoint or stop the run; None leaves it to the other rules."""
    step = verdict.checkpoint_step
    if step is None or verdict.cause not in (Cause.BAD_CHECKPOINT, Cause.LOAD_FAILED):
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
        return Action(ActionKind.STOP, reason, _STOPPED_EXIT_CODE, rejected_step=rejected)
    name = "has other content than was written" if proven else "verifies and cannot be loaded"
    reason = verdict.followed_by(
        f"the checkpoint of step {step} {name}; go back to step {older} and "
        f"keep step {step} in quarantine"
    )
    return Action(ActionKind.RELAUNCH, reason, rejected_step=step)
