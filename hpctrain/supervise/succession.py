"""Which job goes on after this one, where Slurm does not requeue.

Belongs here: making and ending the successors of a job. Does not belong here: deciding to go on.
"""

from __future__ import annotations

from hpctrain.supervise.context import AttemptContext


def must_leave(context: AttemptContext) -> str | None:
    """Why this attempt must leave at once, None if it need not."""
    return None


def ensure_successor(context: AttemptContext) -> None:
    """Have a job in the queue that goes on after this one."""


def end_succession(context: AttemptContext) -> None:
    """No other job of this run is to start."""
