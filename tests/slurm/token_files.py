"""A small dataset of tokens, for runs whose data are files."""

from __future__ import annotations

import random
import struct
from array import array
from pathlib import Path

from hpctrain.store.datasets import bin_path, idx_path

_DOCUMENTS, _TOKENS_EACH = 64, 500
_UINT16 = 8


def write_tokens(prefix: Path) -> None:
    """A .bin/.idx pair as megatron/core/datasets/indexed_dataset.py lays it out."""
    count = _DOCUMENTS * _TOKENS_EACH
    tokens = array("H", random.Random(7).choices(range(250), k=count))
    bin_path(prefix).write_bytes(tokens.tobytes())
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, _UINT16, _DOCUMENTS, _DOCUMENTS + 1)
    lengths = array("i", [_TOKENS_EACH] * _DOCUMENTS)
    offsets = array("q", [2 * _TOKENS_EACH * number for number in range(_DOCUMENTS)])
    bounds = array("q", range(_DOCUMENTS + 1))
    idx_path(prefix).write_bytes(
        head + b"".join(one.tobytes() for one in (lengths, offsets, bounds))
    )
