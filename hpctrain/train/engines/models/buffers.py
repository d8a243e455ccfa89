"""Give every rank the buffers of rank 0, which are neither sharded nor in a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist


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
