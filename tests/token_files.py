"""Small datasets of tokens, as megatron/core/datasets/indexed_dataset.py lays them out."""

from __future__ import annotations

import random
import struct
from array import array
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from hpctrain.records.datasets import bin_path, idx_path

_UINT16 = 8
_TOKEN_BYTES = {4: 4, _UINT16: 2}
# Below the vocabulary of every model of the tests.
_IDS = 250


def write_tokens(prefix: Path, documents: int = 64, length: int = 500, seed: int = 7) -> None:
    """So many documents of so many tokens, which `seed` chooses."""
    write_pair(prefix, [length] * documents)
    tokens = array("H", random.Random(seed).choices(range(_IDS), k=documents * length))
    bin_path(prefix).write_bytes(tokens.tobytes())


def write_pair(
    prefix: Path,
    lengths: Sequence[int],
    boundaries: Sequence[int] | None = None,
    *,
    dtype: int = _UINT16,
) -> None:
    """Sequences of such lengths, all of token 0; each is a document without `boundaries`."""
    token_bytes = _TOKEN_BYTES[dtype]
    bounds = range(len(lengths) + 1) if boundaries is None else boundaries
    starts = accumulate((length * token_bytes for length in lengths[:-1]), initial=0)
    offsets = list(starts)[: len(lengths)]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, dtype, len(lengths), len(bounds))
    arrays = array("i", lengths), array("q", offsets), array("q", bounds)
    idx_path(prefix).write_bytes(head + b"".join(one.tobytes() for one in arrays))
    bin_path(prefix).write_bytes(bytes(sum(lengths) * token_bytes))
