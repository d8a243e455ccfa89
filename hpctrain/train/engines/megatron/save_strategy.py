"""Reuse megatron-core's save plans, so that it does not plan every save of a launch anew.

The structure of the state never changes within a launch. Which rank writes what (the fully
parallel wrapper), the plans of all ranks and the metadata are therefore made once. Belongs here:
that cache. Does not belong here: what is saved (see `snapshot`), the sequence of a save (see
`hpctrain.train.saving.saver`).
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from hpctrain.train.step_agreement import Control


class SaveStrategy:
    """megatron-core's strategy, one per launch. All ranks must call its methods together.

    `first` is True until the first save has been planned.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._base: Any = None
        self._parallel: Any = None
        self._reuse_agreed = False
        self.first = True

    def strategy(self, group: Any) -> Any:
        """Return what `dist_checkpointing.save` takes; the ranks of `group` share the writing."""
        if self._parallel is None:
            self._base = get_default_save_sharded_strategy("torch_dist")
            self._base.thread_count = 1
            self._base.use_cached_ckpt_structure = True
            self._parallel = self._base
            if group.size() > 1:
                self._parallel = FullyParallelSaveStrategyWrapper(self._base, group, True)
        return self._parallel

    def agree_on_reuse(self) -> None:
        """Reuse the plans from now on if all ranks can; call this after planning.

        megatron-core decides that on each rank by itself (strategies/torch.py, async_save:
        validated_cache_reuse). If the ranks' decisions differed, one would plan alone and the save
        would hang.
        """
        self.first = False
        if not self._reuse_agreed:
            self._reuse_agreed = self._control.all_agree(self._base.validated_cache_reuse)
            self._base.validated_cache_reuse = self._reuse_agreed
