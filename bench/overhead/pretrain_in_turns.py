"""Megatron-LM's own loop, in turns with hpctrain reading its words along and without.

hpctrain has no loop around Megatron-LM's. What it adds to a step is that every step is printed,
read, and made a row of metrics, and that the parts of a step are measured on every rank: in the
turns without it lines go straight to the log, one step of ten is printed, as when somebody runs
Megatron-LM alone, and nothing is measured. Two threads that look for files twice a second run all
the time. Belongs here: those turns. Does not belong here: a model, data (see
`tests/engines/pretrain_package.py`).
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import training
from megatron.training.global_vars import get_args

from bench.overhead.jobs import ROOT
from bench.overhead.ranks import RESULT_VARIABLE, SECONDS_VARIABLE
from bench.overhead.turns import OURS, Turns, write_found

PROGRAM = ROOT / "tests" / "engines" / "pretrain_package.py"
PRINTED_ALONE = 10


def agreed(own: float) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mean = torch.tensor([own], dtype=torch.float64, device=device)
    dist.all_reduce(mean)
    return float(mean[0]) / dist.get_world_size()


def in_turns() -> None:
    """Have the kind of each step chosen right before it; the last turn ends the process."""
    turns = Turns(float(os.environ[SECONDS_VARIABLE]), dist.barrier, agreed)
    kinds = iter(turns)
    heard, original = sys.stdout, training.train_step

    def train_step(*given: Any, **keywords: Any) -> Any:
        kind = next(kinds, None)
        if kind is None:
            _leave(turns)
        sys.stdout = heard if kind == OURS else heard._stream  # type: ignore[attr-defined]
        get_args().log_interval = 1 if kind == OURS else PRINTED_ALONE
        step = original if kind == OURS else original.__wrapped__
        return step(*given, **keywords)

    training.train_step = train_step


def _leave(turns: Turns) -> None:
    if dist.get_rank() == 0:
        write_found(Path(os.environ[RESULT_VARIABLE]), turns.found)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    in_turns()
    runpy.run_path(str(PROGRAM), run_name="__main__")
