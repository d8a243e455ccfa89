"""What DeepSpeed's engines have in common on one rank, whole or in a pipeline.

Belongs here: their parts, and what both do alike. Does not belong here: a step (see `engine` and
`pipeline`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.train.data import Data
from hpctrain.train.engines.deepspeed.mesh import Mesh
from hpctrain.train.engines.deepspeed.optimizer import set_rate
from hpctrain.train.numerics import are_finite
from hpctrain.train.schedule import learning_rate
from hpctrain.train.times import StepClock


@dataclass(kw_only=True)
class Built:
    """All parts on one rank. `inner` is an engine of DeepSpeed's.

    `finished_steps` decides the learning rate; whoever loads a checkpoint sets it.
    """

    config: DeepSpeedConfig
    mesh: Mesh
    inner: Any
    data: Data
    clock: StepClock
    finished_steps: int = 0
    # gradients are divided among ranks while they are summed: the norm tells, for all
    rejection: str | None = field(default=None, init=False)

    def next_rate(self) -> float:
        """The learning rate of the coming step, which DeepSpeed is told."""
        rate = learning_rate(self.config, self.finished_steps)
        set_rate(self.inner, rate)
        return rate

    def weights_are_finite(self) -> bool:
        """Of the parts of the weights that this rank keeps, but for those on NVMe."""
        kept = [getattr(p, "ds_tensor", p).detach() for p in self.inner.module.parameters()]
        return are_finite([one for one in kept if one.numel()])
