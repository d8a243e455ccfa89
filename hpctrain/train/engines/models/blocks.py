"""Find the repeated blocks of a module, which are sharded, recomputed and adapted one by one.

Belongs here: finding them. Does not belong here: what is done with them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# Class names of the repeated blocks in transformers.
BLOCKS = frozenset({"GPT2Block", "LlamaDecoderLayer", "BertLayer", "TransformerBlock", "ViTLayer"})


def blocks_of(module: nn.Module) -> list[Any]:
    """Return the blocks in the order of the forward pass."""
    return [child for child in module.modules() if type(child).__name__ in BLOCKS]
