"""Open TransformerEngine's userbuffers: tensor parallel messages travel while products compute.

As Megatron-LM does before it builds the model (training/initialize.py,
_initialize_tp_communicators, of megatron-core 0.19.2). Belongs here: opening them, and what a
build of TransformerEngine excludes. Does not belong here: options that exclude each other (see
`option_problems`).
"""

from __future__ import annotations

import os
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train import software
from hpctrain.train.engines.megatron.option_settings import message_settings

# From this version on buffers are made for each format of numbers (same function of Megatron-LM).
_FORMATS_SINCE = (2, 7)


def open_userbuffers(config: MegatronConfig) -> None:
    """Make the buffers of the tensor parallel groups; a collective call, before the model is built.

    A buffer has the shape of a layer's input: [tokens of a micro-batch, hidden]. Raises
    InvalidInputError if this TransformerEngine can start userbuffers by MPI only.
    """
    if not config.tp_comm_overlap:
        return
    import transformer_engine_torch as extension
    from transformer_engine.pytorch.module import base

    if extension.ubuf_built_with_mpi():
        raise InvalidInputError(
            [
                Problem(
                    "this TransformerEngine was built with NVTE_UB_WITH_MPI: `tp_comm_overlap` "
                    "would need ranks that MPI starts",
                    hint="use a build without it, or set `engine.megatron.tp_comm_overlap: false`",
                )
            ]
        )
    if not extension.device_supports_multicast():
        # GPUs before Hopper exchange through CUDA IPC instead (module/base.py, initialize_ub)
        os.environ.setdefault("UB_SKIPMC", "1")
    tokens = config.seq_length * config.micro_batch_size // config.context_parallel_size
    base.initialize_ub(
        shape=[tokens, config.hidden_size],
        tp_size=config.tensor_model_parallel_size,
        ub_cfgs={},  # TransformerEngine's own choice for each product
        bootstrap_backend=message_settings(config)["tp_comm_bootstrap_backend"],
        **_format(config, base),
    )


def _format(config: MegatronConfig, base: Any) -> dict[str, Any]:
    """Return the format of the buffers, as this TransformerEngine takes it."""
    eight_bits = config.fp8 is not None
    if not software.transformer_engine().is_at_least(_FORMATS_SINCE):
        return dict(use_fp8=eight_bits)
    modes = base.UserBufferQuantizationMode
    return dict(quantization_modes=[modes.FP8 if eight_bits else modes.NONE])
