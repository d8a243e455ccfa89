"""Count parameters and operations of the model that a spec trains, with LoRA's adapters.

Exact for peft 0.21 (an engine test counts). Belongs here: counting for a whole spec, once. Does
not belong here: formulas of the model alone (`parameters`, `flops`), bytes (`plan_memory`), which
layers LoRA can adapt (`representable_hugging_face`).

Letters: h hidden, a heads, k kv heads, d head size, f ffn, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.plan.model import vision
from hpctrain.plan.model.flops import linear_parameters, model_flops_per_step
from hpctrain.plan.model.parameters import VOCAB_MULTIPLE, total_parameters
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec

# (last name, inputs, outputs) of a linear layer in the blocks
Layer = tuple[str, int, int]

# Four layers of attention, two of the MLP.
_ENCODERS = {
    "bert": ("query", "key", "value", "dense", "dense", "dense"),
    "distilbert": ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"),
    "vit": ("q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2"),
}


@dataclass(frozen=True)
class ModelCounts:
    """Parameters and operations of one spec.

    `parameters`: each once, adapters included. `trainable`: those with a gradient and optimizer
    state. `adapters_per_layer`: parameters of the adapters of one layer, 0 without LoRA.
    `vocab_multiple`: rows of an embedding table on each rank are a multiple of it.
    """

    parameters: int
    trainable: int
    adapters_per_layer: int
    flops_per_step: float
    vocab_multiple: int

    @property
    def trainable_share(self) -> float:
        """Trainable parameters over all parameters."""
        return self.trainable / self.parameters


def count_model(spec: RunSpec) -> ModelCounts:
    """Count the parameters and operations of a spec.

    LoRA puts two matrices, inputs x r and r x outputs, beside each linear layer that it adapts.
    With it a step has no weight gradients of frozen layers, one of three products; adapters have
    all three. A new classifier is trained in full: the output layer, and of DistilBERT the layer
    before it; BERT's pooler belongs to its body.
    """
    model, lora = spec.model, spec.lora
    total = total_parameters(model)
    flops = model_flops_per_step(model, spec.batch.global_)
    padded = spec.engine.abilities.pads_vocab or model.reads_images
    multiple = VOCAB_MULTIPLE if padded else 1
    if lora is None:
        return ModelCounts(total, total, 0, flops, multiple)
    widths = [
        inputs + outputs
        for name, inputs, outputs in _linear_layers(model)
        if lora.targets == "all" or name in lora.targets
    ]
    adapters = lora.rank * sum(widths)
    trainable = model.layers * adapters
    if spec.learned_task == "classification":
        classes = model.vocab if model.reads_images else model.classes or 0
        before = model.hidden * model.hidden + model.hidden if model.family == "distilbert" else 0
        trainable += before + classes * (model.hidden + 1)
    ends = vision.end_multiplications(model) if model.family == "vit" else 0
    frozen = 2 * (linear_parameters(model) * model.seq + ends)
    added = 6 * model.layers * adapters * model.seq
    flops += float((added - frozen) * spec.batch.global_)
    return ModelCounts(total + model.layers * adapters, trainable, adapters, flops, multiple)


def _linear_layers(model: ModelSpec) -> tuple[Layer, ...]:
    """List the linear layers of one block by transformers' names; a ResNet has none."""
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
