"""Keep copies of a rank's tensors in host memory that another process can read.

One anonymous file (memfd_create(2)) holds the tensors of a save, one behind the other, and is
reused by all saves of a launch. /dev/shm is not used, which is small in many containers. With CUDA
the memory is pinned, so that copies run at the speed of the link. Belongs here: that memory, and
pickling tensors as places in it. Does not belong here: what is saved, processes.
"""

from __future__ import annotations

import io
import math
import mmap
import os
import pickle
from collections.abc import Iterable
from typing import Any

import torch

_ALIGNMENT_BYTES = 512  # as CUDA's own allocations
_PLACE = "tensor"


class HostBuffers:
    """The memory of one rank. Tensors of the last `copy` stay valid until the next one."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("hpctrain-checkpoint")
        self.size_bytes = 0
        self._memory: mmap.mmap | None = None
        self._base = 0

    def copy(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors of any device, in order; returns their copies, each with its own storage.

        A tensor that appears twice is copied once. Waits for the device.
        """
        sources = [tensor.detach() for tensor in tensors]
        offsets, end = [], 0
        for source in sources:
            offsets.append(end)
            size_bytes = source.numel() * source.element_size()
            end += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._grow(end)
        copies = []
        for source, offset in zip(sources, offsets, strict=True):
            target = _tensor_at(self._memory, offset, source.dtype, tuple(source.shape))
            target.copy_(source, non_blocking=True)
            copies.append(target)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies

    def dumps(self, value: Any) -> bytes:
        """Pickle a value; tensors of the buffers become places, which `loads` finds again."""
        stream = io.BytesIO()
        _Pickler(stream, self._base, self.size_bytes).dump(value)
        return stream.getvalue()

    def _grow(self, size_bytes: int) -> None:
        """Make room; mappings of the smaller size stay valid while tensors refer to them."""
        if size_bytes <= self.size_bytes:
            return
        os.ftruncate(self.descriptor, size_bytes)
        self._memory = mmap.mmap(self.descriptor, size_bytes)
        self.size_bytes = size_bytes
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        if torch.cuda.is_available():
            # without it the copies below would be staged, and wait for the device one by one
            torch.cuda.cudart().cudaHostRegister(self._base, size_bytes, 0)


class BufferReader:
    """The other end: reads what `HostBuffers.dumps` has pickled, in another process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None

    def loads(self, data: bytes, size_bytes: int) -> Any:
        """Unpickle a value; `size_bytes` is the size of the buffers at that time."""
        if size_bytes and (self._memory is None or len(self._memory) < size_bytes):
            self._memory = mmap.mmap(self._descriptor, size_bytes)
        return _Unpickler(io.BytesIO(data), self._memory).load()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, base: int, size_bytes: int) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self._base, self._size_bytes = base, size_bytes

    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        if not isinstance(value, torch.Tensor) or not value.numel() or not value.is_contiguous():
            return None
        offset = value.data_ptr() - self._base
        if value.device.type != "cpu" or not 0 <= offset < self._size_bytes:
            return None
        return _PLACE, offset, value.dtype, tuple(value.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, memory: mmap.mmap | None) -> None:
        super().__init__(stream)
        self._memory = memory

    def persistent_load(self, place: Any) -> torch.Tensor:
        _, offset, dtype, shape = place
        return _tensor_at(self._memory, offset, dtype, shape)


def _tensor_at(
    memory: mmap.mmap | None, offset: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Make a tensor whose storage is exactly its part of the memory, as torch.save wants it."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
