"""Records what a person accepts when a run resumes: a start at step 0, or changed data.

Belongs here: whether there is anything to accept, and the line in the ledger. Does not belong here:
resuming the run (`control`), refusing without such a line (`hpctrain.supervise`).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.job.data_records import record_data
from hpctrain.judge.causes import Cause
from hpctrain.judge.launch_history import pending_rejections
from hpctrain.records.data_identity import compare, read_identity
from hpctrain.records.epochs import current_epoch
from hpctrain.records.find import RunFiles
from hpctrain.records.known_steps import known_steps
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import printable_reason, user_name

# After these causes the remaining checkpoints are of no use.
_OF_CHECKPOINTS = frozenset({Cause.BAD_CHECKPOINT, Cause.LOAD_FAILED})


@dataclass(frozen=True)
class Acceptance:
    """What a person accepts with `hpctrain resume`."""

    from_scratch: bool = False
    data: bool = False

    @property
    def anything(self) -> bool:
        return self.from_scratch or self.data


def accept(run: RunFiles, acceptance: Acceptance, reason: str) -> list[str]:
    """Write what is accepted into the ledger, and apply it; returns a sentence for each part.

    The run must not be running. Raises UsageError where there is nothing to accept, so that nobody
    gives up steps out of habit, InvalidInputError when the data cannot be read.
    """
    accepted = []
    if acceptance.data:
        accepted.append(_accept_data(run, reason))
    if acceptance.from_scratch:
        accepted.append(_accept_fresh_start(run, reason))
    return accepted


def _accept_fresh_start(run: RunFiles, reason: str) -> str:
    events, root = run.ledger.events(), run.layout.checkpoints
    if not root.is_dir():
        if root.is_symlink():
            message = f"{root} leads to {root.readlink()}, which is not there"
            raise UsageError(message, hint="mount its file system; nothing is given up meanwhile")
        root.mkdir(mode=0o700)
    given_up = pending_rejections(events)
    good = [one.step for one in checkpoints(root) if one.good and one.step not in given_up]
    ends = [event for event in events if event.event is EventKind.LAUNCH_ENDED]
    if good and not (ends and ends[-1].cause in _OF_CHECKPOINTS):
        raise UsageError(
            f"run `{run.run_id}` has a good checkpoint of step {good[0]:,}",
            hint=f"`{run.command('resume')}` continues from it; a new run starts at step 0",
        )
    known = known_steps(run.layout, events)
    lost = max(known.saved_step, known.trained)
    if not lost and not good:
        raise UsageError(
            f"run `{run.run_id}` has not trained a step: there is nothing to give up",
            hint=f"`{run.command('resume')}`",
        )
    run.ledger.append(
        EventKind.FRESH_START_ACCEPTED,
        epoch=current_epoch(run.layout.epochs),
        user=user_name(),
        reason=printable_reason(reason) or None,
        last_step=lost or None,
        checkpoint_step=known.saved_step or None,
    )
    return f"it starts at step 0: {lost:,} steps are given up, their remaining files are kept"


def _accept_data(run: RunFiles, reason: str) -> str:
    try:
        identity = read_identity(run.layout.data_identity)
    except HpctrainError as error:
        changed: tuple[str, ...] = (str(error),)
    else:
        if identity is None:  # a run of an older version
            changed = ("nothing was recorded about the data before",)
        else:
            changed = compare(identity).changed
    if not changed:
        raise UsageError(
            f"the data of run `{run.run_id}` are as they were recorded",
            hint=f"`{run.command('resume')}`",
        )
    run.ledger.append(
        EventKind.DATA_ACCEPTED,
        epoch=current_epoch(run.layout.epochs),
        user=user_name(),
        reason=printable_reason(reason) or None,
        evidence=changed,
    )
    record_data(run.layout)
    # The engine would use indexes of the old data for the new data.
    shutil.rmtree(run.layout.data_cache, ignore_errors=True)
    return f"it continues with changed data ({changed[0]})"
