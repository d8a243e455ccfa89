"""What differs in megatron-core 0.19.2, which requires Python 3.12.

The files of its wheel also run with Python 3.11, except for the compiled functions of its datasets,
whose source is that of 0.16.1. Belongs here: differences from other versions. Does not belong here:
what all versions have in common (see `names`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.train.engines.megatron.core_versions.record import (
    LIBRARIES_OF_TOKENIZERS,
    CoreName,
    CoreVersion,
)
from hpctrain.train.spared_imports import hidden


def null_tokenizer(token_ids: int) -> Any:
    """Make a tokenizer that only has a size; the id that ends documents is counted in it."""
    from megatron.core.tokenizers import MegatronTokenizer

    with hidden(*LIBRARIES_OF_TOKENIZERS):
        return MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null-text"}, vocab_size=token_ids
        )


def load_options(directory: Path) -> dict[str, Any]:
    """Return nothing: this version recognizes checkpoints of older ones (serialization.py)."""
    return {}


def read_common_state(directory: Path) -> dict[str, Any]:
    """Read the state that is not sharded, in the form of this version or of older ones."""
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    return dict(load_common_state_dict(str(directory)))


CORE_0_19 = CoreVersion(
    number="0.19.2",
    oldest_python=(3, 12),
    imports_triton=True,  # transformer/moe/ops/paged_stash.py
    null_tokenizer=null_tokenizer,
    load_options=load_options,
    read_common_state=read_common_state,
    graphed_modules="cuda_graph_modules",
    # the default `nvrx` needs nvidia-resiliency-ext, and another writer (strategies/torch.py)
    save_options={"async_strategy": "mcore"},
    mended=frozenset({"define_router_product"}),
    # none of these can be followed: 0.16.1 has neither the writer nor the layout nor the new model
    muted={
        "megatron.core.dist_checkpointing.strategies.common": "load_common is deprecated",
        "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
        "megatron.core.distributed.distributed_data_parallel": (
            "DistributedDataParallel: full_param_layout not provided"
        ),
        "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    },
    names=(CoreName("megatron.core.tensor_parallel.random", "_get_share_storage", private=True),),
)
