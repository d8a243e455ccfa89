"""Decide whether a run without a checkpoint may start at step 0.

It may if no record shows that there ever was a checkpoint, or if a person has accepted the loss.
Belongs here: that decision. Does not belong here: reading them
(`hpctrain.records.known_steps`), looking for checkpoints (`hpctrain.checkpoints.discover`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.discover import HOW_TO_START_OVER, Decisions
from hpctrain.judge.launch_history import pending_rejections, pending_rollback
from hpctrain.records.known_steps import accepted_fresh_start, fresh_start_pending, known_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event


def decisions_of(events: Sequence[Event]) -> Decisions:
    """Collect the decisions in the ledger about the checkpoint of the next launch."""
    accepted = accepted_fresh_start(events)
    pending = accepted if fresh_start_pending(events) else None
    return Decisions(
        at_most_step=pending_rollback(events),
        rejected=pending_rejections(events),
        from_scratch=f"{pending.user} had the run start at step 0" if pending else None,
        loss_accepted=accepted is not None,
    )


def why_fresh_start(run: RunLayout, events: Sequence[Event]) -> str:
    """Return why the run starts at step 0, for the ledger.

    Raises CheckpointError when the run has published a checkpoint whose loss nobody has accepted,
    OSError when its records cannot be read.
    """
    known = known_steps(run, events)
    if fresh_start_pending(events):
        accepted = accepted_fresh_start(events)
        return f"fresh start, accepted by {accepted.user if accepted else 'somebody'}"
    if known.saved:
        raise CheckpointError(
            f"{run.checkpoints} holds no checkpoint, and the run has published some: "
            f"{known.sources}; a start from step 0 would lose that work",
            hint=f"restore them from a copy, or {HOW_TO_START_OVER}",
        )
    if known.trained:
        return f"fresh start: {known.trained} steps that no checkpoint holds are trained again"
    return "fresh start"
