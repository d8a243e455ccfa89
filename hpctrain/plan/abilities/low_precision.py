"""Check 8-bit and 4-bit products against the GPU, its software and the model.

Belongs here: which GPUs have which format and scaling, and the sizes that the products take, each
with its source. Does not belong here: bytes (`hpctrain.plan.model.number_formats`), rates (the GPU
catalogue and the calibration), settings that exclude each other (`hpctrain.spec.engines`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpctrain.base.errors import Refusal
from hpctrain.spec.run import ModelSpec, RunSpec

if TYPE_CHECKING:
    from hpctrain.plan.request import PlanRequest

Ranks = TypeVar("Ranks", int, NDArray[np.int64])

LOW_PRECISIONS = ("fp8", "fp4")
# Generations whose GPUs have each kind of scaling (TransformerEngine, quantization.py:
# check_fp8_support from compute capability 8.9, check_fp8_block_scaling_support from 9.0,
# check_mxfp8_support and check_nvfp4_support from 10.0). `other` is a GPU that only its profile
# describes: nothing is known about it but its peak rates.
RECIPE_GENERATIONS = {
    "delayed": ("ada", "hopper", "blackwell", "cdna3", "other"),
    "tensorwise": ("ada", "hopper", "blackwell", "cdna3", "other"),
    "blockwise": ("hopper", "blackwell", "other"),
    "mxfp8": ("blackwell", "other"),
    "nvfp4": ("blackwell", "other"),
}
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


def low_precision_problems(request: PlanRequest) -> list[Refusal]:
    """List why this cluster cannot compute in the low precision of the spec.

    Without a known GPU nothing is checked but the software; the plan then has a warning.
    """
    spec, profile = request.spec, request.profile
    recipe, gpu = recipe_of(spec), request.knowledge.gpu if request.knowledge else None
    if recipe is None:
        return []
    if profile.gpu.emulated:
        message = f"precision {spec.precision} needs GPUs, and profile {profile.name} has none"
        return [Refusal(message, "precision")]
    problems = []
    if spec.engine.implementation == "local":
        problems.append(
            Refusal(
                f"precision {spec.precision} needs TransformerEngine, which profile {profile.name} "
                "says is missing: set `precision: bf16`",
                "precision",
            )
        )
    if gpu is None:
        return problems
    if spec.precision not in gpu.peak:
        known = [name for name in ("fp4", "fp8", "bf16", "fp16", "fp32") if name in gpu.peak]
        problems.append(
            Refusal(
                f"{gpu.name} has no {spec.precision} products (it has {', '.join(known)}): set "
                f"`precision: {next(name for name in known if name != 'fp4')}`",
                "precision",
            )
        )
    elif gpu.generation not in RECIPE_GENERATIONS.get(recipe, (gpu.generation,)):
        able = [
            name
            for name, generations in RECIPE_GENERATIONS.items()
            if gpu.generation in generations and name != "nvfp4"
        ]
        hint = f"set `engine.megatron.fp8_recipe` to {' or '.join(able)}" if able else ""
        if spec.precision == "fp4":
            hint = "set `precision: fp8`"
        problems.append(
            Refusal(
                f"{recipe} scaling needs another generation of GPUs than {gpu.name} "
                f"({gpu.generation}): {hint or 'set `precision: bf16`'}",
                "precision",
            )
        )
    return problems
