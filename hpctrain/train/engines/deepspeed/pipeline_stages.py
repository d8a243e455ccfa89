"""A Hugging Face model as DeepSpeed's pipeline takes it: a list of layers, cut into stages.

What the model does around its blocks (positions, masks, the output layer) is said again here as
layers with one tensor in and one out. Belongs here: that list for GPT-2 and Llama, and its cuts.
Does not belong here: training with it (see `pipeline`).
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
from hpctrain.train.engines.deepspeed.tensor_parallel import entering, joined
from hpctrain.train.engines.models.library import alone

_WORDS = "words"
# runtime/pipe/module.py, _build: where weights are that several layers share
_TIED = f"tied_modules.{_WORDS}"


class Stages(PipelineModule):
    """The layers of this rank's stage; how many blocks each has, the plan says."""

    def __init__(self, config: DeepSpeedConfig, module: Any, loss: Any) -> None:
        layers, before = layers_of(config, module)
        self._cuts = cuts_of(config.pipeline_stages, before, len(layers))
        told = _told_to_converter(config, module)
        super().__init__(layers, topology=topology_of(config), loss_fn=loss)
        # asked for while building only, and they would keep the other stages' weights alive
        self._layer_specs: list[Any] = []
        setattr(self, UNIVERSAL_CHECKPOINT_INFO, told)

    def _partition_layers(self, method: str = "") -> None:
        """In the place of DeepSpeed's own ways to cut."""
        self.parts = self._cuts
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def topology_of(config: DeepSpeedConfig) -> ProcessTopology:
    """Neighbouring ranks differ along the last axis (runtime/pipe/topology.py)."""
    sizes = {"pipe": len(config.pipeline_stages), "data": config.data_parallel_size}
    axes = ["data", "pipe"] if config.pipelines_near else ["pipe", "data"]
    if config.tensor_parallel > 1:
        sizes["model"] = config.tensor_parallel
        axes.append("model")
    return ProcessTopology(axes, [sizes[axis] for axis in axes])


def cuts_of(blocks: tuple[int, ...], before: int, layers: int) -> list[int]:
    """Where each stage begins, and the end: what is before the blocks goes to the first stage,
    what is behind them to the last."""
    cuts = [0]
    for count in blocks[:-1]:
        cuts.append((cuts[-1] or before) + count)
    return [*cuts, layers]


def layers_of(config: DeepSpeedConfig, module: Any) -> tuple[list[Any], int]:
    """All layers, and how many come before the first block."""
    if config.model.family == "gpt":
        inner = module.transformer
        first: list[Any] = [_Positions(inner)]
        blocks = [_Block(module.config, block) for block in inner.h]
        words, norm = inner.wte, inner.ln_f
    else:
        inner, first = module.model, []
        blocks = [_Block(module.config, block, inner.rotary_emb) for block in inner.layers]
        words, norm = inner.embed_tokens, inner.norm
    if module.config.tie_word_embeddings:
        tied = dict(tied_weight_attr="table.weight")
        begin: Any = TiedLayerSpec(_WORDS, _Words, words, **tied)
        end: Any = TiedLayerSpec(_WORDS, _Words, words, forward_fn=_words_again, **tied)
    else:
        begin, end = _Words(words), module.lm_head
    return [begin, *first, *blocks, norm, end], 1 + len(first)


def load_layers(config: DeepSpeedConfig, module: Any, checkpoint: Path) -> None:
    """The weights of `module` from the files of all stages (runtime/pipe/module.py,
    save_state_dict); the layers are its own, so that it is filled with them."""
    for number, _, layer in _whole_layers(config, module):
        # of each rank that splits weights, in their order; else there is one
        kept = sorted(checkpoint.glob(f"layer_{number:02d}-*model_states.pt"))
        parts = [torch.load(one, map_location="cpu", weights_only=True) for one in kept]
        layer.load_state_dict(joined(layer.state_dict(), parts))


def names_in_stages(config: DeepSpeedConfig, module: Any) -> dict[str, str]:
    """How a pipeline calls each weight of `module`; a layer has one number wherever it is cut."""
    own = {weight: name for name, weight in module.named_parameters()}
    return {
        own[weight]: f"{prefix}.{name}"
        for _, prefix, layer in _whole_layers(config, module)
        for name, weight in layer.named_parameters()
    }


def _told_to_converter(config: DeepSpeedConfig, module: Any) -> dict[str, Any]:
    """For checkpoint/ds_to_universal.py, which asks the first stage about the weights of all.

    First and last stage both save what they share, each divided among its ranks in its own way: it
    would mix the parts. And how weights are split over ranks, by their names in the pipeline.
    """
    told: dict[str, Any] = {PIPELINE_REPLICATED_PARAMETER_PATTERNS: [re.escape(_TIED)]}
    if config.tensor_parallel == 1:
        return told
    named = nn.Module()
    for _, prefix, layer in _whole_layers(config, module):
        *outer, last = prefix.split(".")
        for name in outer:
            named.add_module(name, nn.Module())
        named.get_submodule(".".join(outer)).add_module(last, layer)
    return {**collect_autotp_universal_checkpoint_info(named), **told}


def _whole_layers(config: DeepSpeedConfig, module: Any) -> Iterator[tuple[int, str, Any]]:
    """(number, what its weights' names begin with, the layer); shared weights once."""
    layers, _ = layers_of(config, module)
    for number, layer in enumerate(layers):
        if not isinstance(layer, TiedLayerSpec):
            yield number, str(number), layer
        elif layer.forward_fn is None:  # else the second use of a weight, kept with the first one
            yield number, _TIED, layer.build()


class _Words(nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    def forward(self, tokens: Any) -> Any:
        return self.table(tokens)


def _words_again(words: _Words, hidden: Any) -> Any:
    """The output layer that shares its weight with the embedding."""
    if isinstance(words.table, VocabParallelEmbedding):
        hidden = entering(words.table.mp_group, hidden)
    return nn.functional.linear(hidden, words.table.weight)


class _Positions(nn.Module):
    """transformers/models/gpt2/modeling_gpt2.py, GPT2Model.forward: before the blocks."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.wpe, self.drop = inner.wpe, inner.drop

    def forward(self, words: Any) -> Any:
        return self.drop(words + self.wpe(_numbers(words)))


class _Block(nn.Module):
    """A block with what its model gives it: a causal mask, and for Llama the rotary angles."""

    def __init__(self, settings: Any, block: Any, rotary: Any = None) -> None:
        super().__init__()
        self._settings = settings
        self.block, self.rotary = block, rotary

    def forward(self, hidden: Any) -> Any:
        positions = _numbers(hidden)
        given: dict[str, Any] = dict(position_ids=positions, use_cache=False)
        given["attention_mask"] = _masking().create_causal_mask(
            config=self._settings,
            inputs_embeds=hidden,
            attention_mask=None,
            past_key_values=None,
            position_ids=positions,
        )
        if self.rotary is not None:
            given["position_embeddings"] = self.rotary(hidden, position_ids=positions)
        return self.block(hidden, **given)


@cache
def _masking() -> Any:
    with alone():
        return importlib.import_module("transformers.masking_utils")


def _numbers(hidden: Any) -> Any:
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
