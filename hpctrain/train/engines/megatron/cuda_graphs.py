"""Capture CUDA graphs of the layers with TransformerEngine, after some steps without them.

megatron-core's own graphs (`local`) are captured by its schedules (schedules.py,
create_cudagraphs). Those of TransformerEngine are captured by the training loop, as in Megatron-LM
(training/training.py, train). Belongs here: when that happens, and what it needs. Does not belong
here: which layers are captured (see `option_settings`).
"""

from __future__ import annotations

import os
from typing import Any

from megatron.core import num_microbatches_calculator

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.engines.megatron.model import ModelChunks
from hpctrain.train.engines.megatron.option_settings import CUDA_GRAPH_WARMUP_STEPS

# cuda_graphs.py asserts this beside `expandable_segments`: NCCL's registration of buffers in a
# graph reads memory that such segments have moved.
_ENVIRONMENT = {"NCCL_GRAPH_REGISTER": "0"}


def prepare_environment(config: MegatronConfig) -> None:
    """Set what graphs need of NCCL, before it is initialised."""
    if config.cuda_graph_impl != "none":
        os.environ.update(_ENVIRONMENT)


class LayerGraphs:
    """Captures graphs with TransformerEngine before one step of the launch, on all ranks alike."""

    def __init__(self, config: MegatronConfig, model: ModelChunks, optimizer: Any) -> None:
        self._gathers_in_hooks = config.overlap_param_gather
        self._model = model
        self._steps = 0
        self._capturer: Any = None
        if config.cuda_graph_impl != "transformer_engine":
            return
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        _count_microbatches(config)
        self._capturer = TECudaGraphHelper(
            model.wrapped, model.settings, config.seq_length, config.micro_batch_size, [optimizer]
        )

    def before_step(self) -> None:
        """Capture once, when enough steps have been made; call before each training step."""
        if self._capturer is None:
            return
        if self._steps == CUDA_GRAPH_WARMUP_STEPS:
            self._capture()
        self._steps += 1

    def _capture(self) -> None:
        """Capture without the hooks that gather weights; graphs call these themselves later."""
        if self._gathers_in_hooks:
            for chunk in self._model.wrapped:
                chunk.disable_forward_pre_hook(param_sync=False)
        self._capturer.create_cudagraphs()
        if self._gathers_in_hooks:
            for chunk in self._model.wrapped:
                chunk.enable_forward_pre_hook()
            self._capturer.cuda_graph_set_manual_hooks()


def _count_microbatches(config: MegatronConfig) -> None:
    """Set megatron-core's own count of micro-batches, which the capture reads."""
    num_microbatches_calculator.unset_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank=0,
        rampup_batch_size=None,
        global_batch_size=config.global_batch_size,
        micro_batch_size=config.micro_batch_size,
        data_parallel_size=config.data_parallel_size,
        decrease_batch_size_if_needed=False,
    )
