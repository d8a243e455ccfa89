"""Find the checkpoints that evaluation jobs still need, so that retention leaves them.

Belongs here: the question, for every trainer. Does not belong here: deleting checkpoints
(`hpctrain.checkpoints.publish`), submitting evaluations (the supervisor).
"""

from __future__ import annotations

from hpctrain.base.formats import NewerFormatError
from hpctrain.checkpoints.discover import saving_epochs
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.evaluations import needed_steps
from hpctrain.records.layout import RunLayout


def steps_to_evaluate(run: RunLayout) -> set[int]:
    """List the steps whose evaluations have no result yet; all where that cannot be read.

    Raises OSError where not even the checkpoints can be listed.
    """
    try:
        run.evaluation_config.stat()  # `exists` would take any error for an absence
    except FileNotFoundError:
        return set()
    except OSError:
        return set(published_steps(run.checkpoints))
    try:
        epochs = saving_epochs(run.checkpoints)
        unread = {step for step, epoch in epochs.items() if epoch is None}
        return needed_steps(run, epochs) | unread
    except (OSError, NewerFormatError):
        return set(published_steps(run.checkpoints))
