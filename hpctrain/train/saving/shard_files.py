"""Write files of torch.distributed.checkpoint's format from items that are already planned.

The engines plan with their own libraries; the bytes are the same: each item by torch.save, one
behind the other (torch/distributed/checkpoint/filesystem.py, _write_item). Belongs here: that
format. Does not belong here: plans and metadata (see the engines' rooms).
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)

from hpctrain.train.saving.host_buffers import HostBuffers


@dataclass(frozen=True)
class ShardFile:
    """One file: its path, its name in the metadata, and pairs (WriteItem, tensor or BytesIO)."""

    path: Path
    name: str
    items: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True)
class WriteShards:
    """Writes files; can be sent to another process.

    Called, it returns their names and torch's WriteResults, a list for each file by its number.
    """

    files: tuple[ShardFile, ...]

    def __call__(self) -> tuple[list[str], dict[int, list[Any]]]:
        results = {number: _write(file) for number, file in enumerate(self.files)}
        return [file.path.name for file in self.files], results


def copied(files: tuple[ShardFile, ...], buffers: HostBuffers | None) -> tuple[ShardFile, ...]:
    """Return the same files with all tensors copied into `buffers`; None: as they are."""
    if buffers is None:
        return files
    tensors = [data for file in files for _, data in file.items if isinstance(data, torch.Tensor)]
    copies = iter(buffers.copy(tensors))
    return tuple(
        replace(
            file,
            items=tuple(
                (item, next(copies) if isinstance(data, torch.Tensor) else data)
                for item, data in file.items
            ),
        )
        for file in files
    )


def _write(file: ShardFile) -> list[Any]:
    """Write one file durably, bytes before tensors."""
    ordered = sorted(file.items, key=lambda item: not isinstance(item[1], io.BytesIO))
    transforms = _StorageWriterTransforms()
    with file.path.open("wb") as stream:
        results = [
            _write_item(
                transforms,
                stream,
                _alone(data),
                item,
                file.name,
                SerializationFormat.TORCH_SAVE,
            )
            for item, data in ordered
        ]
        stream.flush()
        os.fsync(stream.fileno())
    return results


def _alone(data: Any) -> Any:
    """Copy a tensor that is part of a larger storage, all of which torch.save would write."""
    if not isinstance(data, torch.Tensor):
        return data
    data = data.detach()
    whole = data.untyped_storage().size() == data.numel() * data.element_size()
    return data if whole else data.clone()
