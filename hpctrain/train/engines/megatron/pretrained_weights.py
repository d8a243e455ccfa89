"""megatron-core's weights of `model.pretrained`, for a run that begins.

Belongs here: loading them into every layout, and the rows by which the vocabulary is padded. Does
not belong here: making the directory (see `hpctrain.convert`), resuming (see `snapshot`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.train.engines.megatron.model import Model

_POSITIONS = "embedding.position_embeddings.weight"


def start_from_weights(config: MegatronConfig, model: Model, *, loads: bool) -> None:
    """Load them, and leave padding out of the loss; `loads` False: a checkpoint is loaded anyway.

    All ranks must call this. Raises InvalidInputError when a weight is missing.
    """
    if config.pretrained is None:
        return
    for chunk in model.bare:
        hide_padding(config, chunk)
    if loads:
        load_weights(config.pretrained, model.bare)


def load_weights(directory: str, chunks: list[Any]) -> None:
    """Every rank reads its part; what a shorter run or a larger padding makes of it is cut off, or
    is zero."""
    metadata = {"singleton_local_shards": False}
    state = {
        f"model{number}": chunk.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    for part in state.values():
        if _POSITIONS in part:
            part[_POSITIONS].allow_shape_mismatch = True  # texts may be shorter than it can read
    # what a checkpoint holds besides (the second value) does not matter; the third was not in it
    loaded, _, unknown = dist_checkpointing.load(state, directory, strict=StrictHandling.RETURN_ALL)
    if lost := sorted(name for name in unknown if not name.endswith("_extra_state")):
        words = f"has no weights {', '.join(lost[:3])}: it is of another model"
        raise InvalidInputError([Problem(words, directory)])
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded.get(f"model{number}", {}), strict=True)


def hide_padding(config: MegatronConfig, chunk: Any) -> None:
    """Logits of padded rows become so small that no probability is left for them.

    They are not in the model that was trained, whose logits may all be far below zero: GPT-2's
    are, so that rows of zeros would take nearly all probability.
    """
    layer = getattr(chunk, "output_layer", None)
    if layer is None:
        return
    rows = config.padded_vocab_size // config.tensor_model_parallel_size
    first = rows * parallel_state.get_tensor_model_parallel_rank()
    known = max(0, config.vocab_size - first)
    if known >= rows:
        return

    def hide(module: Any, given: Any, output: Any) -> Any:
        logits, bias = output
        logits[..., known:] = torch.finfo(logits.dtype).min / 2
        return logits, bias

    layer.register_forward_hook(hide)
