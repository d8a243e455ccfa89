"""How much of a model learns: everything, or with LoRA thin matrices beside linear layers.

Exact for peft 0.21 (an engine test counts). Belongs here: counting, of parameters and operations.
Does not belong here: bytes (see `plan_memory`), which layers there are to choose from
(`representable`).

Letters: h hidden, a heads, k kv heads, d head size, f ffn, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.plan.documents import Layout, Stage
from hpctrain.plan.mesh.stages import Split, build_stages
from hpctrain.plan.model import vision
from hpctrain.plan.model.flops import linear_parameters, model_flops_per_step
from hpctrain.plan.model.parameters import total_parameters, vocab_multiple
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec
from hpctrain.spec.tuning import LoraSpec

# (last name, inputs, outputs) of a linear layer in the blocks
Layer = tuple[str, int, int]


def learned_parameters(spec: RunSpec) -> int:
    """Parameters with a gradient and optimizer state."""
    model = spec.model
    if spec.lora is None:
        return total_parameters(model)
    head = _head(model) if spec.learned_task == "classification" else 0
    return model.layers * thin_parameters(spec) + head


def thin_parameters(spec: RunSpec) -> int:
    """What LoRA adds to each layer: two matrices, inputs x r and r x outputs, beside each linear
    layer that it adapts; 0 where everything is learned."""
    if spec.lora is None:
        return 0
    return spec.lora.rank * sum(
        inputs + outputs for _, inputs, outputs in _adapted(spec.model, spec.lora)
    )


def held_parameters(spec: RunSpec) -> int:
    """The model's, each once, and the thin matrices beside them."""
    return total_parameters(spec.model) + spec.model.layers * thin_parameters(spec)


def learned_share(spec: RunSpec) -> float:
    """Of all parameters, thin matrices included. Asked for each layout that is looked at."""
    if spec.lora is None:
        return 1.0
    return learned_parameters(spec) / held_parameters(spec)


def held_stages(spec: RunSpec, layout: Layout, split: Split) -> tuple[Stage, ...]:
    """The pipeline stages with everything that one GPU holds.

    Thin matrices count whole on every tensor parallel rank: nobody trains them split.
    """
    stages = build_stages(spec.model, layout, split, vocab_multiple(spec))
    return tuple(_with_thin(stage, thin_parameters(spec)) for stage in stages)


def _with_thin(stage: Stage, thin: int) -> Stage:
    held = stage.parameters_per_gpu + thin * sum(stage.chunk_layers)
    return stage.model_copy(update=dict(parameters_per_gpu=held))


def flops_per_step(spec: RunSpec) -> float:
    """As `flops.model_flops_per_step`; with LoRA without what the mathematics does not ask for:
    gradients of frozen weights, one of three products. Thin matrices have all three."""
    model, batch = spec.model, spec.batch.global_
    whole = model_flops_per_step(model, batch)
    if spec.lora is None:
        return whole
    ends = vision.end_multiplications(model) if model.family == "vit" else 0
    frozen = 2 * (linear_parameters(model) * model.seq + ends)
    thin = 6 * model.layers * thin_parameters(spec) * model.seq
    return whole + float((thin - frozen) * batch)


def _adapted(model: ModelSpec, lora: LoraSpec) -> Iterator[Layer]:
    for layer in _linear_layers(model):
        if lora.targets == "all" or layer[0] in lora.targets:
            yield layer


def _linear_layers(model: ModelSpec) -> tuple[Layer, ...]:
    """One block by transformers' names; a resnet has none."""
    h, f = model.hidden, model.ffn_size
    queries, keys = model.heads * model.head_size, model.key_value_heads * model.head_size
    if model.family == "gpt":
        attention: tuple[Layer, ...] = (("c_attn", h, 3 * h), ("c_proj", h, h))
        return (*attention, ("c_fc", h, f), ("c_proj", f, h))
    if model.family == "llama":
        attention = (("q_proj", h, queries), ("k_proj", h, keys), ("v_proj", h, keys))
        attention = (*attention, ("o_proj", queries, h))
        return (*attention, ("gate_proj", h, f), ("up_proj", h, f), ("down_proj", f, h))
    names = _ENCODERS.get(model.family)
    if names is None:
        return ()
    attention = tuple((name, h, h) for name in names[:4])
    return (*attention, (names[4], h, f), (names[5], f, h))


# Four layers of attention, two of the MLP.
_ENCODERS = {
    "bert": ("query", "key", "value", "dense", "dense", "dense"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"),
    "vit": ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"),
}


def _head(model: ModelSpec) -> int:
    """What learns in full, for it is new: the classifier, and of DistilBERT the layer before it.

    BERT's pooler belongs to its body.
    """
    classes = model.vocab if model.reads_images else model.classes or 0
    before = model.hidden * model.hidden + model.hidden if model.family == "distilbert" else 0
    return before + classes * (model.hidden + 1)
