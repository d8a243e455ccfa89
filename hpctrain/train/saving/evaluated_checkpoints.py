"""Find the checkpoints that evaluation jobs still need, so that retention leaves them.

Belongs here: the question, for every trainer. Does not belong here: deleting checkpoints
(`hpctrain.checkpoints.publish`), submitting evaluations (the supervisor).
"""

from __future__ import annotations

from hpctrain.checkpoints.discover import saving_epochs
from hpctrain.checkpoints.publish import published_steps
from hpctrain.formats import NewerFormatError
from hpctrain.store.evaluations import needed_steps
from hpctrain.store.layout import RunLayout


def steps_to_evaluate(run: RunLayout) -> set[int]:
    """List the steps whose evaluations have no result yet; all where that cannot be read.

    Raises OSError.
    """
    if not run.evaluation_config.exists():
        return set()
    try:
        return needed_steps(run, saving_epochs(run.checkpoints))
    except NewerFormatError:
        return set(published_steps(run.checkpoints))
