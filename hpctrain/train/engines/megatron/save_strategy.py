"""megatron-core's way of saving, kept between saves so that it need not plan each of them anew.

The structure of the state never changes within a launch, so who writes what (the fully parallel
wrapper), the plans of all ranks and the metadata are made once. Belongs here: that memory. Does
not belong here: what is saved (see `snapshot`), the sequence of a save (see `saver`).
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from hpctrain.train.step_agreement import Control


class Strategy:
    """One per launch. All ranks must call its methods together."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._base: Any = None
        self._whole: Any = None
        self._settled = False
        self.first = True

    def of_this_save(self, group: Any) -> Any:
        """What `dist_checkpointing.save` takes; `group` are the ranks that share the writing."""
        if self._whole is None:
            self._base = get_default_save_sharded_strategy("torch_dist", 1)
            self._base.thread_count = 1
            self._base.use_cached_ckpt_structure = True
            self._whole = self._base
            if group.size() > 1:
                self._whole = FullyParallelSaveStrategyWrapper(self._base, group, True)
        return self._whole

    def planned(self) -> None:
        """After planning: reuse the plans from now on if they came out the same on all ranks.

        megatron-core decides that on each rank by itself (strategies/torch.py, async_save:
        validated_cache_reuse); a rank that came to another result would plan alone, and the save
        would hang.
        """
        self.first = False
        if not self._settled:
            self._settled = self._control.all_agree(self._base.validated_cache_reuse)
            self._base.validated_cache_reuse = self._settled
