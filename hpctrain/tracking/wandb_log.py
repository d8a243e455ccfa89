"""Read a `.wandb` file as far as needed to know that it is complete.

The package writes it in a process of its own, which may be killed or meet a full disk without a
word. Its format is the log of LevelDB: blocks of 32 KiB with records that may span several of
them; the last record of a run is its exit. Belongs here: that check. Does not belong here: what the
records mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK_BYTES, _MAGIC_BYTES = 32768, 7
_HEAD = struct.Struct("<IHB")  # checksum, length, type
_FULL, _LAST = 1, 4


def log_records(path: Path) -> Iterator[bytes]:
    """Yield the complete records of the file, as encoded protobuf."""
    data, place, record = path.read_bytes(), _MAGIC_BYTES, b""
    while place + _HEAD.size <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEAD.size:
            place += left
            continue
        _, length, kind = _HEAD.unpack_from(data, place)
        place += _HEAD.size
        if place + length > len(data):
            return
        record += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def is_complete(path: Path) -> bool:
    """True if the file ends with the exit of its run."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    last = b""
    for record in log_records(path):
        last = record
    parsed = Record()
    parsed.ParseFromString(last)
    return bool(parsed.HasField("exit"))
