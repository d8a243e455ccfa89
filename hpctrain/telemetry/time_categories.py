"""Categories of wall time, and a segment of one category. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Category(StrEnum):
    """How wall time was spent."""

    PRODUCTIVE = "productive"  # steps that are in the final weights
    REDONE = "redone"  # steps that were lost and are trained again
    SAVING = "saving"  # training waits for a checkpoint
    BETWEEN = "between"  # otherwise between steps: evaluation, and the step in progress
    STARTING = "starting"  # from the start of an attempt or launch to its first step
    QUEUEING = "queueing"  # submitted or requeued, waiting for nodes
    DETECTING = "detecting"  # from the last observed progress to the verdict
    RESTARTING = "restarting"  # from the verdict to the next launch, or to the end of the attempt
    DOWN = "down"  # an attempt that was lost without a record
    HELD = "held"  # stopped or held on request


class Segment(NamedTuple):
    """From `start` to `end` (microseconds since the epoch).

    `cause`: the interruption that caused it; None for training and for the first start.
    """

    start: int
    end: int
    category: Category
    cause: str | None
