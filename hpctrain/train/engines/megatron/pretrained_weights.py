"""Load megatron-core's weights of `model.pretrained` at the start of a run.

Belongs here: loading them into every layout, and the rows by which the vocabulary is padded. Does
not belong here: making the directory (see `hpctrain.convert`), resuming (see `snapshot`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.engines.megatron.core_versions.supported import current
from hpctrain.train.engines.megatron.model import ModelChunks

_POSITIONS = "embedding.position_embeddings.weight"


def start_from_weights(config: MegatronConfig, model: ModelChunks, *, loads: bool) -> None:
    """Load the weights and leave padded rows out of the loss.

    `loads` False: do not load, because a checkpoint will be loaded. All ranks must call this.
    Raises InvalidInputError if a weight is missing.
    """
    if config.pretrained is None:
        return
    for chunk in model.bare:
        hide_padding(config, chunk)
    if loads:
        load_weights(config.pretrained, model.bare)


def load_weights(directory: str, chunks: list[Any]) -> None:
    """Load every rank's part; rows beyond a shorter sequence or vocabulary are cut off, and padded
    rows are zero. Raises InvalidInputError if a weight is missing."""
    metadata = {"singleton_local_shards": False}
    state = {
        f"model{number}": chunk.sharded_state_dict(metadata=metadata)
        for number, chunk in enumerate(chunks)
    }
    for part in state.values():
        if _POSITIONS in part:
            part[_POSITIONS].allow_shape_mismatch = True  # sequences may be shorter
    # the second value (what else the checkpoint holds) does not matter; the third is missing there
    loaded, _, unknown = dist_checkpointing.load(
        state,
        directory,
        strict=StrictHandling.RETURN_ALL,
        **current().load_options(Path(directory)),
    )
    if missing := sorted(name for name in unknown if not name.endswith("_extra_state")):
        message = f"has no weights {', '.join(missing[:3])}: it is of another model"
        raise InvalidInputError([Problem(message, directory)])
    for number, chunk in enumerate(chunks):
        # converted weights have no states of 8 bit scales; TransformerEngine's layers expect some
        different = chunk.load_state_dict(loaded.get(f"model{number}", {}), strict=False)
        keys = (*different.missing_keys, *different.unexpected_keys)
        assert all(key.endswith("_extra_state") for key in keys), different


def hide_padding(config: MegatronConfig, chunk: Any) -> None:
    """Make the logits of padded rows so small that their probability is zero.

    The pretrained model has no such rows, and its logits may all be far below zero. GPT-2's are,
    so rows of zeros would get nearly all probability.
    """
    layer = getattr(chunk, "output_layer", None)
    if layer is None:
        return
    rows = config.padded_vocab_size // config.tensor_model_parallel_size
    first = rows * parallel_state.get_tensor_model_parallel_rank()
    known = max(0, config.vocab_size - first)
    if known >= rows:
        return

    def hide(module: Any, inputs: Any, output: Any) -> Any:
        logits, bias = output
        logits[..., known:] = torch.finfo(logits.dtype).min / 2
        return logits, bias

    layer.register_forward_hook(hide)
