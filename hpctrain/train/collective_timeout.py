"""Change how long collective operations may take, once the start is over.

Before the first step one rank may build an index, or load weights, for all others; afterwards a
rank that is silent for minutes hangs. Does not belong here: process groups (see the engines'
`mesh`).
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def limit_collectives(seconds: float) -> None:
    """Set the timeout of all process groups of this rank, which gloo and NCCL read at each call."""
    if not dist.is_initialized():
        return
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
