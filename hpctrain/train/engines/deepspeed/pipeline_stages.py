"""Convert a Hugging Face model to DeepSpeed's pipeline: a list of layers, cut into stages.

What the model does around its blocks (positions, masks, the output layer) is repeated here as
layers with one tensor in and one out. Belongs here: that list for GPT-2 and Llama, and its cuts.
Does not belong here: training with it (see `engine`).
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    PIPELINE_REPLICATED_PARAMETER_PATTERNS,
    UNIVERSAL_CHECKPOINT_INFO,
)
from deepspeed.module_inject.layers import (
    VocabParallelEmbedding,
    collect_autotp_universal_checkpoint_info,
)
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import nn

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.train.engines.deepspeed.tensor_parallel import join_parts, sum_input_gradients
from hpctrain.train.engines.models.allocation import allocate
from hpctrain.train.engines.models.transformers_library import hide_optional_packages

# The key of the tied embedding; part of weights' names in checkpoints.
_TIED_KEY = "words"
# runtime/pipe/module.py, _build: where weights are that several layers share
_TIED = f"tied_modules.{_TIED_KEY}"


class StagedModel(PipelineModule):
    """The layers of this rank's stage; the plan sets the number of blocks of each stage.

    `draw`: weights on the meta device get their initial values, else they stay unset.
    """

    def __init__(
        self,
        config: DeepSpeedConfig,
        module: Any,
        loss: Any,
        *,
        device: torch.device,
        draw: bool,
    ) -> None:
        self._device, self._draw = device, draw
        layers, before = layers_of(config, module)
        self._cuts = cuts_of(config.pipeline_stages, before, len(layers))
        info = _converter_info(config, module)
        super().__init__(layers, topology=topology_of(config), loss_fn=loss)
        # used while building only, and they would keep the other stages' weights alive
        self._layer_specs: list[Any] = []
        setattr(self, UNIVERSAL_CHECKPOINT_INFO, info)

    def _partition_layers(self, method: str = "") -> None:
        """Replace DeepSpeed's own methods to cut, and give this stage's layers their weights."""
        self.parts = self._cuts
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
        for layer in self._layer_specs[self._local_start : self._local_stop]:
            shared = isinstance(layer, TiedLayerSpec)
            allocate(layer.module_args[0] if shared else layer, self._device, draw=self._draw)


def topology_of(config: DeepSpeedConfig) -> ProcessTopology:
    """Return the axes of the ranks; adjacent ranks differ along the last one
    (runtime/pipe/topology.py)."""
    sizes = {"pipe": len(config.pipeline_stages), "data": config.data_parallel_size}
    axes = ["data", "pipe"] if config.pipelines_near else ["pipe", "data"]
    if config.tensor_parallel > 1:
        sizes["model"] = config.tensor_parallel
        axes.append("model")
    return ProcessTopology(axes, [sizes[axis] for axis in axes])


def cuts_of(blocks: tuple[int, ...], before: int, layers: int) -> list[int]:
    """Return the index of each stage's first layer, and the end.

    Layers before the blocks are in the first stage, layers behind them in the last one.
    """
    cuts = [0]
    for count in blocks[:-1]:
        cuts.append((cuts[-1] or before) + count)
    return [*cuts, layers]


def layers_of(config: DeepSpeedConfig, module: Any) -> tuple[list[Any], int]:
    """Return all layers, and how many come before the first block."""
    if config.model.family == "gpt":
        inner = module.transformer
        first: list[Any] = [_Positions(inner)]
        blocks = [_Block(module.config, block) for block in inner.h]
        embedding, norm = inner.wte, inner.ln_f
    else:
        inner, first = module.model, []
        blocks = [_Block(module.config, block, inner.rotary_emb) for block in inner.layers]
        embedding, norm = inner.embed_tokens, inner.norm
    if module.config.tie_word_embeddings:
        tied = dict(tied_weight_attr="table.weight")
        begin: Any = TiedLayerSpec(_TIED_KEY, _Embedding, embedding, **tied)
        end: Any = TiedLayerSpec(_TIED_KEY, _Embedding, embedding, forward_fn=_tied_output, **tied)
    else:
        begin, end = _Embedding(embedding), module.lm_head
    return [begin, *first, *blocks, norm, end], 1 + len(first)


def load_layers(config: DeepSpeedConfig, module: Any, checkpoint: Path) -> None:
    """Load the weights of `module` from the files of all stages (runtime/pipe/module.py,
    save_state_dict), through layers that share its weights."""
    for number, _, layer in _whole_layers(config, module):
        # one file per rank that splits weights, in their order
        files = sorted(checkpoint.glob(f"layer_{number:02d}-*model_states.pt"))
        parts = [torch.load(path, map_location="cpu", weights_only=True) for path in files]
        layer.load_state_dict(join_parts(layer.state_dict(), parts))


def names_in_stages(config: DeepSpeedConfig, module: Any) -> dict[str, str]:
    """Map each weight's name in `module` to its name in a pipeline, which no cut changes."""
    own = {weight: name for name, weight in module.named_parameters()}
    return {
        own[weight]: f"{prefix}.{name}"
        for _, prefix, layer in _whole_layers(config, module)
        for name, weight in layer.named_parameters()
    }


def _converter_info(config: DeepSpeedConfig, module: Any) -> dict[str, Any]:
    """Return what checkpoint/ds_to_universal.py reads from the first stage about all weights.

    That is which weights are shared: first and last stage both save them, each divided among its
    ranks in its own way, and the converter would mix the parts. And how weights are split over
    ranks, by their names in the pipeline.
    """
    info: dict[str, Any] = {PIPELINE_REPLICATED_PARAMETER_PATTERNS: [re.escape(_TIED)]}
    if config.tensor_parallel == 1:
        return info
    named = nn.Module()
    for _, prefix, layer in _whole_layers(config, module):
        *outer, last = prefix.split(".")
        for name in outer:
            named.add_module(name, nn.Module())
        named.get_submodule(".".join(outer)).add_module(last, layer)
    return {**collect_autotp_universal_checkpoint_info(named), **info}


def _whole_layers(config: DeepSpeedConfig, module: Any) -> Iterator[tuple[int, str, Any]]:
    """Yield (number, prefix of its weights' names, layer); shared weights once."""
    layers, _ = layers_of(config, module)
    for number, layer in enumerate(layers):
        if not isinstance(layer, TiedLayerSpec):
            yield number, str(number), layer
        elif layer.forward_fn is None:  # else the second use of a weight, saved with the first one
            yield number, _TIED, layer.build()


class _Embedding(nn.Module):
    """The token embedding; `table` is part of its weight's name in checkpoints."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Any) -> Any:
        return self.table(tokens)


def _tied_output(embedding: _Embedding, hidden: Any) -> Any:
    """Apply the output layer that shares its weight with the embedding."""
    if isinstance(embedding.table, VocabParallelEmbedding):
        hidden = sum_input_gradients(embedding.table.mp_group, hidden)
    return nn.functional.linear(hidden, embedding.table.weight)


class _Positions(nn.Module):
    """Learned positions, as in transformers/models/gpt2/modeling_gpt2.py, GPT2Model.forward."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.wpe, self.drop = inner.wpe, inner.drop

    def forward(self, embedded: Any) -> Any:
        return self.drop(embedded + self.wpe(_position_ids(embedded)))


class _Block(nn.Module):
    """A block with the inputs of its model: a causal mask, and for Llama the rotary angles."""

    def __init__(self, settings: Any, block: Any, rotary: Any = None) -> None:
        super().__init__()
        self._settings = settings
        self.block, self.rotary = block, rotary

    def forward(self, hidden: Any) -> Any:
        positions = _position_ids(hidden)
        inputs: dict[str, Any] = dict(position_ids=positions, use_cache=False)
        inputs["attention_mask"] = _masking_utils().create_causal_mask(
            config=self._settings,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        if self.rotary is not None:
            inputs["position_embeddings"] = self.rotary(hidden, position_ids=positions)
        return self.block(hidden, **inputs)


@cache
def _masking_utils() -> Any:
    with hide_optional_packages():
        return importlib.import_module("transformers.masking_utils")


def _position_ids(hidden: Any) -> Any:
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
