"""Number formats that a spec chooses: their bytes, and the sizes that their products take.

Each with its source. Does not belong here: counts of parameters (`parameters`), which GPUs have
them (`limits`), rates (the GPU catalogue and the calibration), settings that exclude each other
(`hpctrain.spec.engines`).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.spec.engines.abilities import MEGATRON_CORE
from hpctrain.spec.run import ModelSpec, RunSpec

# Weights that are no 8-bit copy: with fp8 and fp4 they stay in bf16 (megatron-core: `fp8`, `fp4` of
# TransformerConfig are formats of matrix products, params_dtype is that of weights).
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 2, "fp4": 2}
# Two fp32 moments of Adam; 16-bit weights have an fp32 main copy besides
# (megatron/core/optimizer/optimizer.py, Float16OptimizerWithFloat16Params and FP32Optimizer).
OPTIMIZER_BYTES = {"fp32": 8, "fp16": 12, "bf16": 12, "fp8": 12, "fp4": 12}
MOMENT_BYTES = 8
FP32_BYTES = 4

# Bytes that one 8-bit or 4-bit layout of a weight takes, with its scales: one fp32 number for a
# whole tensor (nothing per weight) or for each 128 x 128 block, one byte for each 32 (MXFP8) or 16
# (NVFP4) numbers in a row (TransformerEngine: constants.py, MXFP8_BLOCK_SCALING_SIZE,
# NVFP4_BLOCK_SCALING_SIZE; tensor/float8_blockwise_tensor.py, block_len 128).
LAYOUT_BYTES = {
    "delayed": 1.0,
    "tensorwise": 1.0,
    "blockwise": 1.0 + 4 / 128**2,
    "mxfp8": 1.0 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
# 8-bit products take both operands with the summed index innermost, so backward needs a second,
# transposed layout. Scales of blocks along a row belong to one layout in any case. Products of
# Blackwell take any order of a tensor with one scale (TransformerEngine: utils.py,
# is_non_tn_fp8_gemm_supported), for which one layout is enough.
ONE_LAYOUT_ON_BLACKWELL = ("delayed", "tensorwise")


def gradient_bytes(spec: RunSpec) -> int:
    """Return the bytes of one gradient in the buffer that is summed over data parallel ranks.

    megatron-core: DistributedDataParallelConfig.grad_reduce_in_fp32; without it a gradient has the
    type of its weight. Engines without that choice have fp32 buffers.
    """
    return FP32_BYTES if spec.engine.megatron.grad_reduce_in_fp32 else 2


_STATE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def keeps_main_weights(spec: RunSpec) -> bool:
    """Tell whether the precision-aware Adam of TransformerEngine itself has the main weights.

    megatron-core has them with the other recipes of 8 bits (optimizer_config.py,
    use_precision_aware_optimizer_no_fp8_or_ds_fp8). `spec` is that of a `PlanRequest`.
    """
    own, recipe = spec.engine.megatron, recipe_of(spec)
    by_core = own.main_params_dtype == "fp32" and recipe not in (None, "nvfp4", "delayed")
    return own.use_precision_aware_optimizer and not by_core


def saved_state_bytes(spec: RunSpec) -> int:
    """Return by how much the state of one weight is smaller than in fp32.

    Of a main weight the precision-aware Adam keeps the 16 bits that a bf16 weight has not
    (optimizer_config.py, store_param_remainders), or all of it in fp16.
    """
    own = spec.engine.megatron
    if not own.use_precision_aware_optimizer:
        return 0
    moments = MOMENT_BYTES - _STATE_BYTES[own.exp_avg_dtype] - _STATE_BYTES[own.exp_avg_sq_dtype]
    narrow = own.main_params_dtype == "fp16" or spec.precision not in ("fp32", "fp16")
    return moments + (2 if narrow and keeps_main_weights(spec) else 0)


def sent_weight_bytes(spec: RunSpec) -> int:
    """Return the bytes of one weight that the distributed optimizer sends out after an update.

    With `fp8_param_gather` 8 bits, but MXFP8 needs both layouts and sends bf16 through the buffer
    of the gradients (megatron-core 0.16.1: distributed/param_and_grad_buffer.py,
    reuse_grad_buf_for_mxfp8_param_ag).
    """
    own = spec.engine.megatron
    if own.fp8_param_gather and own.fp8_recipe != "mxfp8":
        return 1
    return ELEMENT_BYTES[spec.precision]


def kept_input_bytes(spec: RunSpec) -> float:
    """Return the bytes that wait for backward of one input element of a linear layer.

    TransformerEngine keeps one layout of the quantized input (module/linear.py, `saved_inputmat`).
    0 where it keeps what came in: with 16 and 32 bits, and for Hugging Face's classes.
    """
    if spec.engine.abilities.model_classes != MEGATRON_CORE:
        return 0.0
    recipe = recipe_of(spec)
    return LAYOUT_BYTES.get(recipe, 1.0) if recipe else 0.0


def projected_bytes(spec: RunSpec) -> float:
    """Return the bytes that attention's projection keeps of one element, besides attention.

    megatron-core lets both keep one tensor but with delayed scaling (transformer/attention.py,
    set_save_original_input), whose state needs the quantized one.
    """
    return kept_input_bytes(spec) if recipe_of(spec) == "delayed" else 0.0


def low_weight_bytes(spec: RunSpec, generation: str | None) -> float:
    """Return the bytes of the 8-bit or 4-bit forms of one weight of a linear layer.

    They are made once a step and kept for all microbatches (megatron-core:
    extensions/transformer_engine.py, is_first_microbatch). `generation` of the GPU, None if it is
    not known. `spec` has its recipe chosen (`PlanRequest`). 0 with 16 and 32 bits.
    """
    recipe = recipe_of(spec)
    if recipe is None:
        return 0.0
    one = generation == "blackwell" and recipe in ONE_LAYOUT_ON_BLACKWELL
    return LAYOUT_BYTES.get(recipe, 1.0) * (1 if one else 2)


# -- 8-bit and 4-bit products ---------------------------------------------------------------------


Ranks = TypeVar("Ranks", int, NDArray[np.int64])

LOW_PRECISIONS = ("fp8", "fp4")
# Operands of 8-bit products lie in steps of 16 bytes, MXFP8 scales blocks of 32 numbers in rows
# and in columns, and 32 numbers of 4 bits are 16 bytes (TransformerEngine: utils.py,
# assert_dim_for_fp8_exec; tensor/mxfp8_tensor.py, MXFP8Quantizer.is_quantizable; cuBLAS, Narrow
# Precision Data Types Usage: dimensions of a product are multiples of 16 bytes).
ALIGNMENTS = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 32}


def recipe_of(spec: RunSpec) -> str | None:
    """Return how the spec scales numbers into 8 or 4 bits; None with 16 and 32 bits.

    `spec` is that of a `PlanRequest`, where `auto` is resolved.
    """
    if spec.precision == "fp4":
        return "nvfp4"
    return spec.engine.megatron.fp8_recipe if spec.precision == "fp8" else None


def low_alignment(spec: RunSpec) -> int:
    """Return the number of which sizes of a product have to be multiples; 1 with 16 bits."""
    recipe = recipe_of(spec)
    return 1 if recipe is None else ALIGNMENTS.get(recipe, 16)


def low_row_alignment(spec: RunSpec) -> int:
    """Return the number of which the rows that one rank scales have to be a multiple.

    With sequence parallelism a rank scales its own part before all are gathered.
    """
    step = low_alignment(spec)
    return 8 if step == 16 else step


def linear_widths(
    model: ModelSpec, tp: Ranks, expert_tp: Ranks
) -> dict[str, tuple[int, Ranks | int]]:
    """List inputs and outputs of the linear layers that compute in low precision.

    Values are (width, ranks that split it), by the names of a spec where it has one. Embedding,
    output layer and router stay in 16 bits (megatron-core: gpt_model.py, output_layer is a plain
    ColumnParallelLinear; moe/router.py).
    """
    widths: dict[str, tuple[int, Ranks | int]] = {"hidden": (model.hidden, 1)}
    if model.mla is not None:
        mla = model.mla
        if mla.q_rank is not None:
            widths["mla.q_rank"] = (mla.q_rank, 1)
        widths["mla.kv_rank"] = (mla.kv_rank, 1)
        widths["kv_rank + rope_dim"] = (mla.kv_rank + mla.rope_dim, 1)
        widths["queries"] = (model.heads * model.query_key_size, tp)
        widths["keys and values"] = (model.heads * (mla.nope_dim + mla.value_dim), tp)
    else:
        widths["QKV width"] = ((model.heads + 2 * model.key_value_heads) * model.head_size, tp)
    widths["heads x value size"] = (model.heads * model.value_size, tp)
    if model.moe is None or model.moe.dense_layers:
        widths["ffn"] = (model.ffn_size, tp)
    if model.moe is not None:
        widths["moe.ffn"] = (model.moe.ffn, expert_tp)
        if model.moe.shared_ffn:
            widths["moe.shared_ffn"] = (model.moe.shared_ffn, tp)
    return widths
