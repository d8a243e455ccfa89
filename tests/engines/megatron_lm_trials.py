"""Runs of an external Megatron-LM, or of what stands in for it: making them, starting ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trial_runs import GPT, Trial, make_trial, once

from bench import prefork
from bench.free_ports import free_port
from hpctrain.checkpoints.discover import checkpoints
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.job import read_config
from hpctrain.train.stop import StopSignals, leave

HERE = Path(__file__).parent
LM = dict(
    GPT,
    engine="megatron-lm",
    checkout=str(HERE),
    entry="pretrain_stand_in.py",
    data_parallel_size=2,
    save_interval_steps=2,
    eval_interval_steps=3,
)
# Unpacked by `make install`; it has `megatron.training`, and no program.
PACKAGE = Path(sys.prefix, "megatron-lm")
REAL = dict(
    checkout=str(PACKAGE),
    entry=os.path.relpath(HERE / "pretrain_package.py", PACKAGE),
    eval_interval_steps=None,
)
# The same program without what hpctrain measures it by.
ASKED = os.path.relpath(HERE / "pretrain_asked.py", PACKAGE)
UNMEASURED = os.path.relpath(HERE / "pretrain_unmeasured.py", PACKAGE)

# A fresh interpreter that has imported what is slow, and nothing of megatron, forks the ranks.
CLEAN = multiprocessing.get_context("forkserver")
CLEAN.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.tensor",
        "transformers.models.auto.tokenization_auto",
        "torch.utils.tensorboard",
        "wandb",
    ]
)


class LmTrial(Trial):
    """A run whose ranks are forked without an engine of our own."""

    def start(
        self, *, resume: int | None = None, epoch: int = 0, wish: str = "", **_: Any
    ) -> prefork.Ranks:
        environment = {**self._environment(resume, epoch), "STAND_IN": wish}
        logs = self.run.logs / f"launch-{time.monotonic_ns()}"
        return prefork.fork(
            lambda: work(self.run.train_config), self.world_size, logs, environment=environment
        )

    def _environment(self, resume: int | None, epoch: int) -> dict[str, str]:
        return {
            "HPCTRAIN_EPOCH": str(epoch),
            "HPCTRAIN_RESUME": "" if resume is None else checkpoint_name(resume),
        }

    @property
    def good(self) -> list[int]:
        return [one.step for one in checkpoints(self.run.checkpoints, "sha256") if one.good]


class RealTrial(LmTrial):
    """A run of a real Megatron-LM, whose ranks do not get the megatron-core of the tests."""

    def start(
        self,
        *,
        resume: int | None = None,
        epoch: int = 0,
        environment: dict[str, str] | None = None,
        **_: Any,
    ) -> prefork.Ranks:
        """`environment`: more variables of the ranks, which are no children of this process."""
        logs = self.run.logs / f"launch-{time.monotonic_ns()}"
        shared = {
            **self._environment(resume, epoch),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **(environment or {}),
        }
        logs.mkdir(parents=True)
        given = [(self.run.train_config, rank, logs, shared) for rank in range(self.world_size)]
        processes = [CLEAN.Process(target=rank_of_real, args=each) for each in given]
        for process in processes:
            process.start()
        return CleanRanks(logs, [process.pid or 0 for process in processes], processes=processes)


@dataclass
class CleanRanks(prefork.Ranks):
    """Ranks that somebody else has forked."""

    processes: list[Any] = field(default_factory=list)

    def _collect(self) -> None:
        self.codes = {
            rank: process.exitcode
            for rank, process in enumerate(self.processes)
            if process.exitcode is not None
        }


def rank_of_real(config: Path, rank: int, logs: Path, shared: dict[str, str]) -> None:
    """In a process of its own, where multiprocessing is as srun would find it."""
    multiprocessing.set_start_method("fork", force=True)
    own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    prefork.become(rank, logs, shared | own, partial(work, config))


def work(config: Path) -> None:
    from hpctrain.train.entry import main

    stop = StopSignals()
    stop.install()
    leave(main([str(config)], stop))


STEPS = 14
EVERY = 10


def make_real_trial(directory: Path, steps: int = STEPS, **changes: Any) -> RealTrial:
    """A run directory for the package of `make install`."""
    length = dict(train_steps=steps, lr_decay_steps=steps, save_interval_steps=EVERY)
    made = make_trial(directory, {**LM, **REAL, **length}, **changes)
    return RealTrial(made.run, made.config)


def make_lm_trial(directory: Path, **changes: Any) -> LmTrial:
    """A run directory for the stand-in, unless `checkout` and `entry` say otherwise."""
    made = make_trial(directory, LM, **changes)
    return LmTrial(made.run, made.config)


def _whole(made: Any) -> None:
    assert made.train() == [TrainerExit.DONE] * 2


def trained_real() -> RealTrial:
    """The run that nothing happens to, for all tests to read: two data-parallel ranks."""
    measured = dict(rank_times_interval_steps=5)
    place = once("real", lambda directory: _whole(make_real_trial(directory, **measured)))
    return RealTrial(RunLayout(place), read_config(RunLayout(place).train_config))


def trained_lm() -> LmTrial:
    """The same with the stand-in."""
    place = once("stand-in", lambda directory: _whole(make_lm_trial(directory)))
    return LmTrial(RunLayout(place), read_config(RunLayout(place).train_config))
