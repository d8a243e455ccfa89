"""How much of a model learns: everything, or with LoRA thin matrices beside linear layers.

Exact for peft 0.21 (an engine test counts). Belongs here: counting. Does not belong here: bytes
(see `memory`), which layers there are to choose from (`representable`).

Letters: h hidden, a heads, k kv heads, d head size, f ffn, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.plan.parameters import total_parameters
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
    thin = sum(
        spec.lora.rank * (inputs + outputs) for _, inputs, outputs in _adapted(model, spec.lora)
    )
    head = _head(model) if spec.learned_task == "classification" else 0
    return model.layers * thin + head


def learned_share(spec: RunSpec) -> float:
    """Of all parameters; with LoRA thin matrices count as a part of the model."""
    if spec.lora is None:
        return 1.0
    return learned_parameters(spec) / total_parameters(spec.model)


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
