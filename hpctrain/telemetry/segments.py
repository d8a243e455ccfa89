"""The words of a run's account: what a moment went into, and a stretch of such moments. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Category(StrEnum):
    """What a moment went into."""

    PRODUCTIVE = "productive"  # steps that are in the final weights
    REDONE = "redone"  # steps that were lost, so that they are trained again
    SAVING = "saving"  # training stands still for a checkpoint
    BETWEEN = "between"  # between steps otherwise: evaluation, and the step under way
    STARTING = "starting"  # from the start of an attempt or launch to its first step
    QUEUEING = "queueing"  # submitted or requeued, waiting for nodes
    DETECTING = "detecting"  # from the last sign of life to the verdict
    RESTARTING = "restarting"  # from the verdict to the next launch, or to the end of the attempt
    DOWN = "down"  # an attempt that was lost without a word
    HELD = "held"  # stopped or held: nobody wants it to train


class Segment(NamedTuple):
    """From `start` to `end` (microseconds since the epoch).

    `cause`: the interruption that it is due to; None for training and for the first start.
    """

    start: int
    end: int
    category: Category
    cause: str | None
