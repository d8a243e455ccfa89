"""How long a collective may take: long while ranks start, short once they train."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from bench.free_ports import free_port
from hpctrain.train.startup import limit_collectives


def _rank(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=600))
    other = dist.new_group(timeout=timedelta(seconds=600))
    dist.barrier(other)
    limit_collectives(2.0)
    if rank == 1:
        time.sleep(600)  # killed by the test
    for group in (None, other):
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.zeros(1), group=group)
    os._exit(7)


def test_the_limit_holds_for_all_groups_that_exist() -> None:
    context, port = get_context("fork"), free_port()
    ranks = [context.Process(target=_rank, args=(rank, port), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join(300)
    ranks[1].kill()
    assert ranks[0].exitcode == 7


def test_without_groups_nothing_happens() -> None:
    """A process that is alone trains without any group, and gets none."""
    limit_collectives(2.0)
    assert not dist.is_initialized()
