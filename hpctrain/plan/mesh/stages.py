"""Assign transformer layers, embedding and loss to pipeline stages.

A *virtual stage* is one chunk of layers; there are pp x vpp of them, in model order. Virtual
stage n belongs to pipeline stage n mod pp as its chunk n div pp: Megatron's interleaved order
(megatron/core/transformer/transformer_block.py, get_num_layers_to_build).
Belongs here: splitting layers. Does not belong here: bytes.
"""

from __future__ import annotations

from itertools import accumulate

from hpctrain.plan.documents import Layout, Stage
from hpctrain.plan.model.parameters import (
    VOCAB_MULTIPLE,
    expert_parameters,
    mtp_parameters,
    stage_parameters,
    total_parameters,
)
from hpctrain.spec.run import ModelSpec, ParallelSpec

Split = tuple[int, ...]  # transformer layers of each virtual stage, in model order


def split_layers(layers: int, parallel: ParallelSpec) -> Split:
    """Return the layers of each virtual stage. The split must exist (`rules`).

    `stages` of the spec is taken as it stands: pp x vpp numbers in model order (chunk 0 of all
    pipeline stages, then chunk 1, ...). Otherwise the split is even; with `count_embedding` /
    `count_loss` the first / last virtual stage has one layer less, as Megatron's
    account_for_embedding_in_pipeline_split and account_for_loss_in_pipeline_split do.
    """
    if parallel.stages is not None:
        return parallel.stages
    virtual = parallel.pp * parallel.vpp
    counted = layers + int(parallel.count_embedding) + int(parallel.count_loss)
    split = [counted // virtual] * virtual
    split[0] -= int(parallel.count_embedding)
    split[-1] -= int(parallel.count_loss)
    return tuple(split)


def spread_layers(layers: int, pp: int) -> Split:
    """Split layers into stages that differ by one layer at most.

    The first and the last stage are the last to get one more, because they also compute embedding
    and loss.
    """
    each, more = divmod(layers, pp)
    order = [*range(1, pp - 1), 0, pp - 1]
    longer = set(order[:more])
    return tuple(each + (index in longer) for index in range(pp))


def split_messages(layers: int, stages: Split) -> list[str]:
    """Return why a model of so many layers cannot have the stages that a spec lists."""
    problems = []
    if sum(stages) != layers:
        problems.append(f"stages add up to {sum(stages)} layers, the model has {layers}")
    if min(stages) < 0:
        problems.append(f"stages holds a negative number of layers: {min(stages)}")
    if 0 in stages[1:-1]:
        problems.append("only the first and the last of `stages` may be 0 (embedding, loss)")
    return problems


def stage_layers(split: Split, pp: int, index: int) -> tuple[range, ...]:
    """Return the transformer layers (0 is the first) of each chunk of pipeline stage `index`."""
    starts = (0, *accumulate(split))
    return tuple(range(starts[n], starts[n + 1]) for n in range(index, len(split), pp))


def build_stages(
    model: ModelSpec,
    layout: Layout,
    split: Split,
    vocab_multiple: int = VOCAB_MULTIPLE,
    adapters_per_layer: int = 0,
) -> tuple[Stage, ...]:
    """Build the pipeline stages with their chunks and exact parameters per GPU.

    Adapters of LoRA count in full on every tensor parallel rank: no engine trains them split.
    """
    return tuple(
        build_stage(model, layout, split, index, vocab_multiple, adapters_per_layer)
        for index in range(layout.pp)
    )


def build_stage(
    model: ModelSpec,
    layout: Layout,
    split: Split,
    index: int,
    vocab_multiple: int = VOCAB_MULTIPLE,
    adapters_per_layer: int = 0,
) -> Stage:
    """Build pipeline stage `index`: every pp-th virtual stage, starting with its own number.

    `vocab_multiple`, `adapters_per_layer`: see `ModelCounts`. The final norm is with the loss, or
    with token prediction behind the last layer (megatron/core/transformer/transformer_block.py:390,
    has_final_layernorm_in_this_stage).
    """
    layers = _layers_of(split, layout, index)
    first, last = index == 0, index == layout.pp - 1
    norm_stage = layout.pp - 1
    if model.mtp_layers:
        norm_stage = max(number for number, layers in enumerate(split) if layers) % layout.pp
    parameters = stage_parameters(
        *(model, layout, layers),
        first=first,
        last=last,
        final_norm=index == norm_stage,
        multiple=vocab_multiple,
    )
    return Stage(
        index=index,
        chunk_layers=split[index :: layout.pp],
        embedding=first,
        loss=last,
        parameters_per_gpu=parameters + adapters_per_layer * len(layers),
    )


def stage_expert_parameters(model: ModelSpec, layout: Layout, split: Split, index: int) -> int:
    """Count the routed experts in `parameters_per_gpu`, which fewer replicas hold than the rest.

    Multi-token prediction layers, behind the last stage, have experts like the last layer.
    """
    with_experts = sum(map(model.has_experts, _layers_of(split, layout, index)))
    if index == layout.pp - 1:
        with_experts += model.mtp_layers
    return with_experts * expert_parameters(model, layout.tp, layout.ep, layout.etp)


def stage_layer_parameters(model: ModelSpec, layout: Layout, split: Split, index: int) -> int:
    """Count the transformer layers in `parameters_per_gpu`, experts included, without ends.

    Multi-token prediction layers count as layers of the last stage.
    """
    if model.family == "resnet" or model.counted is not None:
        return total_parameters(model)
    layers = _layers_of(split, layout, index)
    own = stage_parameters(model, layout, layers, first=False, last=False, final_norm=False)
    ahead = mtp_parameters(model, layout.tp, layout.ep, layout.etp)
    return own + (ahead if index == layout.pp - 1 else 0)


def _layers_of(split: Split, layout: Layout, index: int) -> tuple[int, ...]:
    """List the layers of all chunks of stage `index`."""
    return tuple(layer for chunk in stage_layers(split, layout.pp, index) for layer in chunk)
