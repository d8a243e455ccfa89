"""Arrays of one shard and the counts taken while it was built.

Belongs here: what every sample format returns, and the integer type of token ids. Does not belong
here: any format, or the choice of one (see `stages`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from pydantic import BaseModel, ConfigDict

# megatron/core/datasets/indexed_dataset.py
_UINT16_VOCABULARY = 65500


class DocumentCounts(BaseModel):
    """Counts over the documents of a shard or dataset; the fields are those of `SamplesSidecar`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int = 0
    tokens: int = 0
    learned: int = 0
    shortened: int = 0
    dropped: int = 0

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        mine, theirs = self.model_dump(), other.model_dump()
        return DocumentCounts(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class ShardContents:
    """The arrays of a shard by name."""

    columns: Mapping[str, np.ndarray]
    counts: DocumentCounts = field(default_factory=DocumentCounts)


def token_type(vocab_size: int) -> type[np.generic]:
    """Return the smallest type for token ids, as megatron-core does (DType.optimal_dtype)."""
    return np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32
