"""Ranks that do nothing but agree: the gloo group of `Control` at the size of a large job.

Belongs here: what each of the ranks does and measures. Does not belong here: what is asserted.
"""

from __future__ import annotations

import json
import os
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.train.software import raise_open_files_limit
from hpctrain.train.step_agreement import Control, WriterState

LIMIT_SECONDS = 150
STOPPING_VOTE = 2
VOTES = 4


def agree(directory: str) -> None:
    """Join the group, vote, and write what it took to `directory`/RANK."""
    torch.set_num_threads(1)
    raise_open_files_limit()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before = len(os.listdir("/proc/self/fd"))
    started = time.monotonic()
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_SECONDS)
    )
    connected = time.monotonic()
    control = Control(dist.group.WORLD)
    seconds, stops = [], []
    for vote in range(VOTES):
        begin = time.monotonic()
        asks = vote == STOPPING_VOTE and rank == size - 1
        control.propose(stop=asks, save=False, writer=WriterState.FINISHED)
        stops.append(control.result().stop)
        seconds.append(time.monotonic() - begin)
    written: dict[str, Any] = dict(
        connect_seconds=connected - started,
        vote_seconds=seconds,
        stops=stops,
        files=len(os.listdir("/proc/self/fd")) - before,
        memory_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        odd=list(control.who(rank % 2 == 1))[:3],
    )
    Path(directory, str(rank)).write_text(json.dumps(written))
    control.barrier()
