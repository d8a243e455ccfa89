"""Compute checkpoint intervals: Young's and Daly's formulas, and the spec's choice in steps.

Belongs here: seconds and steps between checkpoints. Does not belong here: what a save costs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpctrain.base.units import Duration

if TYPE_CHECKING:
    from hpctrain.spec.run import CheckpointSpec


def young_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return sqrt(2 delta M): Young 1974, "A first order approximation to the optimum checkpoint
    interval", CACM 17(9), 530-531."""
    return math.sqrt(2 * stall_seconds * mtbf_seconds)


def daly_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return the work between saves by Daly 2006 (FGCS 22, 303-312, the higher-order solution).

    For the cost delta of one save:

    sqrt(2 delta M) (1 + (1/3) sqrt(delta / 2M) + (1/9) (delta / 2M)) - delta for delta < 2M, M
    beyond.
    """
    ratio = stall_seconds / (2 * mtbf_seconds)
    if ratio >= 1:
        return mtbf_seconds
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_seconds(stall_seconds, mtbf_seconds) * series - stall_seconds


def configured_steps(checkpoint: CheckpointSpec, seconds_per_step: float, best: int) -> int:
    """Return the steps between saves of the trainer.

    After `every_steps`, or at the first end of a step after `every` (auto: after `best` steps);
    whichever comes first.
    """
    choices = [best] if checkpoint.every == "auto" else []
    if checkpoint.every_steps is not None:
        choices.append(checkpoint.every_steps)
    if isinstance(checkpoint.every, Duration):
        choices.append(max(1, math.ceil(float(checkpoint.every) / seconds_per_step)))
    return min(choices)


def best_steps(stall_seconds: float, mtbf_seconds: float, floor: float, step: float) -> int:
    """Return Daly's interval in whole steps of `step` seconds, at least `floor` seconds.

    A save cannot begin before the previous one is written.
    """
    wanted = max(daly_seconds(stall_seconds, mtbf_seconds), floor)
    return max(1, round(wanted / step), math.ceil(floor / step))
