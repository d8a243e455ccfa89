"""Build the mesh of an explicit layout, and list what tensor parallelism splits.

Does not belong here: what a layout has to keep (`rules`), layers per stage (`stages`).
"""

from __future__ import annotations

from hpctrain.plan.divisors import common_divisors
from hpctrain.plan.documents import Layout
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.spec.engines.abilities import MODEL_AXES
from hpctrain.spec.run import ModelSpec, ParallelSpec, RunSpec


def settled(spec: RunSpec, parallel: ParallelSpec) -> ParallelSpec:
    """Switch sequence parallelism off for an engine without it, such as DeepSpeed."""
    if not spec.engine.abilities.sequence_parallel:
        return parallel.model_copy(update={"sequence_parallel": False})
    return parallel


def layout_of(parallel: ParallelSpec, gpus: int) -> Layout:
    """Build the mesh of an explicit layout; dp takes all GPUs that the other axes leave.

    By default sequence parallelism is on when tp > 1, which saves memory at no cost in traffic.
    """
    split = parallel.sequence_parallel
    return Layout(
        **{axis: getattr(parallel, axis) for axis in MODEL_AXES},
        dp=gpus // (parallel.tp * parallel.pp * parallel.cp),
        sequence_parallel=parallel.tp > 1 if split is None else split,
        etp=parallel.etp,
        order=DEFAULT_ORDER if parallel.order == "auto" else parallel.order,
    )


def split_widths(model: ModelSpec) -> dict[str, int]:
    """Return what tensor parallelism splits in every layer, whatever ep is: heads and MLPs."""
    widths = {"heads": model.heads}
    if model.moe is None or model.moe.dense_layers:
        widths["ffn"] = model.ffn_size
    if model.moe is not None and model.moe.shared_ffn:
        widths["moe.shared_ffn"] = model.moe.shared_ffn
    return widths


def tensor_sizes(model: ModelSpec) -> tuple[int, ...]:
    """List all tp that heads, MLPs and kv_heads allow, ascending."""
    groups = model.key_value_heads
    return tuple(
        tp
        for tp in common_divisors(*split_widths(model).values())
        if (groups % tp == 0 or tp % groups == 0)
        and (model.heads + 2 * groups) * model.head_size % tp == 0
    )
