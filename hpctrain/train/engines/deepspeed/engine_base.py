"""The parts and methods that both of DeepSpeed's engines share, with or without a pipeline.

Does not belong here: a step (see `engine` and `pipeline`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.train.data import Data
from hpctrain.train.engines.deepspeed.mesh import DeepSpeedMesh
from hpctrain.train.engines.deepspeed.optimizer import set_rate
from hpctrain.train.numerics import are_finite
from hpctrain.train.schedule import learning_rate
from hpctrain.train.times import StepClock


@dataclass(kw_only=True)
class DeepSpeedEngineBase:
    """All parts on one rank. `inner` is an engine of DeepSpeed's.

    `finished_steps` determines the learning rate; set it after loading a checkpoint.
    """

    config: DeepSpeedConfig
    mesh: DeepSpeedMesh
    inner: Any
    data: Data
    clock: StepClock
    finished_steps: int = 0
    # gradients are divided among ranks while they are summed: the norm shows bad ones, for all
    rejection: str | None = field(default=None, init=False)

    def set_next_rate(self) -> float:
        """Set the learning rate of the next step, and return it."""
        rate = learning_rate(self.config, self.finished_steps)
        set_rate(self.inner, rate)
        return rate

    def weights_are_finite(self) -> bool:
        """Check the parts of the weights that this rank stores, except those on NVMe."""
        stored = [getattr(p, "ds_tensor", p).detach() for p in self.inner.module.parameters()]
        return are_finite([part for part in stored if part.numel()])
