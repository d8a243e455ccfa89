"""Compute how long a stop of this run takes, from what its own steps and saves have taken. Pure.

The script asks Slurm for a warning (USR1) by the plan's figures, and the directive is fixed for the
life of the run. A run that has trained knows better. Belongs here: that sum and its sentence. Does
not belong here: reading records (`hpctrain.supervise.time_limit`), the planned sum
(`hpctrain.job.render.warning_lead`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Fewer measurements say nothing about the slow ones among them.
_LEAST_STEPS, _LEAST_SAVES = 20, 3
_SHARE = 0.95
# The ranks leave, the verdict is written, Slurm takes the requeue: seconds, and a busy controller
# answers within 8 (`hpctrain.supervise.loop`).
_SLURM_SECONDS = 30.0
# One save may have just begun, and the last one follows.
_SAVES = 2


@dataclass(frozen=True)
class StopLead:
    """Seconds that a stop takes, and its parts.

    `step_seconds` and `save_seconds` are not exceeded by 95 % of the last `steps` steps and `saves`
    saves. A batch of an evaluation is a forward pass, a third of a step.
    """

    step_seconds: float
    steps: int
    save_seconds: float
    saves: int

    @property
    def seconds(self) -> float:
        return _SLURM_SECONDS + self.step_seconds + _SAVES * self.save_seconds

    @property
    def sentence(self) -> str:
        """Describe the sum, for the ledger and people."""
        return (
            f"a stop takes {self.seconds:.0f} s as measured: {_SLURM_SECONDS:.0f} s for Slurm, "
            f"{self.step_seconds:.1f} s for a step (of {self.steps}), {_SAVES} saves of "
            f"{self.save_seconds:.1f} s (of {self.saves}), each as 95 % of them"
        )


def stop_lead(step_seconds: Sequence[float], save_seconds: Sequence[float]) -> StopLead | None:
    """Compute the lead from durations of steps and saves; None if there are too few of them."""
    if len(step_seconds) < _LEAST_STEPS or len(save_seconds) < _LEAST_SAVES:
        return None
    return StopLead(
        step_seconds=_percentile(step_seconds),
        steps=len(step_seconds),
        save_seconds=_percentile(save_seconds),
        saves=len(save_seconds),
    )


def _percentile(values: Sequence[float]) -> float:
    """The smallest value that 95 % do not exceed (nearest rank)."""
    return sorted(values)[math.ceil(_SHARE * len(values)) - 1]
