"""Give the weights of a module that was built on the meta device their memory and first values.

Belongs here: weights that are whole on this rank, or slices of whole meta tensors, and buffers.
Does not belong here: weights that a library divides (see the engines), what is drawn (see
`hpctrain.train.initial_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.train.initial_weights import initial_weight


def allocate(module: nn.Module, device: torch.device, *, draw: bool) -> None:
    """Replace the meta parameters of `module` by real ones on `device`, and move its buffers there.

    `draw`: they get their initial values, else they stay unset. A slice of a whole weight gets the
    values of its place.
    """

    def memory_of(old: nn.Parameter) -> torch.Tensor:
        memory = torch.empty(old.shape, dtype=old.dtype, device=device)
        if draw:
            weight = initial_weight(old)
            weight.draw(memory, offsets=slice_offsets(old.storage_offset(), weight.shape))
        return memory

    replace_meta_parameters(module, memory_of)
    set_buffers(module, dict(module.named_buffers()), device)


def replace_meta_parameters(
    module: nn.Module, memory_of: Callable[[nn.Parameter], torch.Tensor]
) -> None:
    """Replace each meta parameter by one with the memory that `memory_of` returns for it.

    Attributes are kept, and parameters that two layers share stay shared.
    """
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for owner in module.modules():
        for name, old in owner._parameters.items():
            if old is None or old.device.type != "meta":
                continue
            if old not in fresh:
                fresh[old] = nn.Parameter(memory_of(old), requires_grad=old.requires_grad)
                fresh[old].__dict__.update(old.__dict__)
            owner._parameters[name] = fresh[old]


def set_buffers(module: nn.Module, values: Mapping[str, Any], device: torch.device) -> None:
    """Set the buffers of `module` to `values`, by name, on `device`."""
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        module.get_submodule(owner)._buffers[last] = value.to(device)


def slice_offsets(storage_offset: int, shape: Sequence[int]) -> list[int]:
    """Return the first index along each axis of a slice of a contiguous tensor of that shape."""
    offsets = []
    for size in reversed(shape):
        storage_offset, offset = divmod(storage_offset, size)
        offsets.append(offset)
    return offsets[::-1]


# -- Give every rank the buffers of rank 0, which are neither sharded nor in a state dict --------


def broadcast_buffers(
    module: Any, values: Mapping[str, Any], *, rank: int, group: Any, device: torch.device
) -> None:
    """Set all buffers of `module`, such as the angles of rotary positions, to rank 0's `values`.

    `values` by name are needed on rank 0 only. `group`: a gloo group of all ranks, which must all
    call this. The buffers end on `device`.
    """
    for name, buffer in module.named_buffers():
        value = values[name].cpu() if rank == 0 else torch.empty_like(buffer, device="cpu")
        dist.broadcast(value, src=0, group=group)
        owner, _, last = name.rpartition(".")
        setattr(module.get_submodule(owner), last, value.to(device))
