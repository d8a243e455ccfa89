"""What every way of writing a layout shares: sizes of axes, and what a step does besides.

Belongs here: fields that the cost formulas, the candidates of a search and its axes have in common,
whatever they hold for each: one number, an array over layouts, or all values to try. Does not
belong here: what only one of them has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

import numpy as np

Value = TypeVar("Value")
# defaults that are numbers of any kind
_ONE: Any = 1
_ZERO: Any = 0


@dataclass(frozen=True, kw_only=True)
class Axes(Generic[Value]):
    """Sizes of the axes; dp follows from the GPUs."""

    tp: Value = _ONE
    pp: Value = _ONE
    vpp: Value = _ONE
    cp: Value = _ONE
    ep: Value = _ONE


@dataclass(frozen=True, kw_only=True)
class LayoutSettings(Axes[Value]):
    """The axes, and what is split, sharded and computed again. Flags are 0 or 1."""

    etp: Value = _ZERO  # ranks that split one expert; 0: 1 with expert parallelism, else tp
    sequence_parallel: Value = _ZERO
    micro_batch: Value = _ONE
    recompute: Value = _ZERO  # a position in RECOMPUTES
    zero: Value = _ZERO  # 0-3; 1 is Megatron's distributed optimizer
    shard_gpus: Value = _ZERO  # ZeRO shards over so many GPUs; 0: over all data parallel ranks
    offload: Value = _ZERO  # 0: the optimizer's state stays on the GPU

    @cached_property
    def expert_tp(self) -> Value:
        """Tensor parallelism inside experts: 1 with expert parallelism, as recipes set it."""
        tp: Any = self.tp
        etp: Any = self.etp
        default: Any = np.where(np.asarray(self.ep) > 1, 1, tp)
        return cast(Value, np.where(np.asarray(etp) > 0, etp, default))
