"""What a shard holds, by format.

Belongs here: dispatch, and the record of what was counted. Does not belong here: any format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, ConfigDict

from hpctrain.prepare.corpus import Source
from hpctrain.prepare.plan import Recipe


class Counts(BaseModel):
    """What was made of the documents; as in `SamplesSidecar`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int = 0
    tokens: int = 0
    learned: int = 0
    shortened: int = 0
    dropped: int = 0

    def __add__(self, other: Counts) -> Counts:
        mine, theirs = self.model_dump(), other.model_dump()
        return Counts(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class Contents:
    """The arrays of a shard."""

    columns: Mapping[str, np.ndarray]
    counts: Counts = field(default_factory=Counts)


def contents_of(recipe: Recipe, sources: Sequence[Source]) -> Contents:
    """Make a shard. Raises InvalidInputError with what is wrong in its sources."""
    if recipe.format == "images":
        from hpctrain.prepare.pictures import check_pictures

        return check_pictures(sources)
    if recipe.format == "tokens":
        from hpctrain.prepare.texts import tokenize_texts

        return tokenize_texts(recipe, sources)
    if recipe.format == "examples":
        from hpctrain.prepare.labelled import tokenize_examples

        return tokenize_examples(recipe, sources)
    from hpctrain.prepare.conversations import tokenize_conversations

    return tokenize_conversations(recipe, sources)


def token_type(vocab_size: int) -> type[np.generic]:
    """The smallest type for ids, as megatron-core chooses it (DType.optimal_dtype)."""
    return np.uint16 if vocab_size < _SHORT_VOCABULARY else np.int32


# megatron/core/datasets/indexed_dataset.py
_SHORT_VOCABULARY = 65500
