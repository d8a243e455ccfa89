"""What happens on one rank: the engine is built once, and both loops take turns with it.

Belongs here: that, for engines whose loop is ours, and for Megatron-LM's own. Does not belong
here: which job, what a bare step is.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.overhead.jobs import JOBS
from bench.overhead.turns import BARE, OURS, Turns, write_found
from hpctrain.records.layout import RunLayout
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import quiet_defaults, read_launch
from hpctrain.train.stop import StopSignals

SECONDS_FILE = "seconds.json"
# For the program that Megatron-LM runs: how long it shall measure, and where the result belongs.
SECONDS_VARIABLE, RESULT_VARIABLE = "BENCH_SECONDS", "BENCH_RESULT"


class Keeper:
    step: Callable[[], int]
    loading_step: int | None = None

    def begin(self) -> None:
        """Nobody stops this launch."""


def measure(engine: str, directory: Path, seconds: float) -> None:
    """On each rank; rank 0 leaves the seconds per step of each turn in the run's directory."""
    os.environ.update(quiet_defaults())
    run = RunLayout(directory)
    job = Job(JOBS[engine], read_launch(os.environ), run, StopSignals())
    if engine == "megatron-lm":
        _with_its_own_loop(job, seconds)
    else:
        _with_our_loop(job, seconds)


def _with_our_loop(job: Job, seconds: float) -> None:
    from bench.overhead.bare import bare_step
    from hpctrain.train import startup

    loop = startup.assemble(job, Keeper())
    steps: dict[str, Callable[[], Any]] = {BARE: bare_step(loop), OURS: loop.one_step}
    ranks = job.config.world_size
    turns = Turns(seconds, lambda: meet(loop), lambda own: loop.control.total(own) / ranks)
    for kind in turns:
        steps[kind]()
    if job.launch.leads:
        write_found(job.run.directory / SECONDS_FILE, turns.found)
    loop.control.barrier()


def meet(loop: Any) -> None:
    """All ranks have done what they were given, and so have their GPUs."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    loop.control.barrier()


def _with_its_own_loop(job: Job, seconds: float) -> None:
    """Until the program has measured and ends the process: see `pretrain_in_turns`."""
    from hpctrain.train.engines.megatron_lm.program import run

    os.environ[SECONDS_VARIABLE] = str(seconds)
    os.environ[RESULT_VARIABLE] = str(job.run.directory / SECONDS_FILE)
    run(job, Keeper())
