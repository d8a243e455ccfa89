"""One launch of Megatron-LM on one rank: from the command line to how it ended.

The program runs in this process, as `python pretrain_gpt.py ...` would run it, so that signals,
stacks and exit codes need no second process. Belongs here: the order of things, and what an end
means. Does not belong here: records and exit codes (see `hpctrain.train.entry`).
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from hpctrain.checkpoints.manifest import step_of
from hpctrain.checkpoints.publish import TRACKER_NAME, point_tracker_to, published_steps
from hpctrain.engines.megatron_lm import MegatronLmConfig, Places, arguments
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.run_records import Outcome
from hpctrain.train.engines.megatron_lm.hearing import hearing
from hpctrain.train.engines.megatron_lm.on_import import changed_on_import
from hpctrain.train.engines.megatron_lm.refused import refusals_named
from hpctrain.train.engines.megatron_lm.relay import Relay
from hpctrain.train.engines.megatron_lm.saves import Saves
from hpctrain.train.engines.megatron_lm.stopping import Stopping
from hpctrain.train.engines.megatron_lm.telling import Teller, write_progress
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.saving.digest_check import DigestCheck
from hpctrain.train.storage import outlast

# What arguments.py of core_v0.16 asserts with --deterministic-mode.
DETERMINISTIC_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}


class Keeper(Protocol):
    """Who keeps what the record of how the rank ended needs: the last finished step, the step of
    the checkpoint while it is being loaded, and whether the start is over. `asked` tells of stops
    that only the program has received."""

    step: Callable[[], int]
    loading_step: int | None
    asked: Callable[[], bool]

    def begin(self) -> None:
        """The program trains, or looks for stops itself."""


def run(job: Job, keeper: Keeper, digests: DigestCheck | None = None) -> tuple[Outcome, int]:
    """Train until Megatron-LM ends; how that was, and the step of its last checkpoint.

    Raises InvalidInputError for what is wrong with the checkout or its arguments,
    BadCheckpointError where `digests` finds this rank's share of the checkpoint changed; anything
    that Megatron-LM raises comes through, SystemExit 16 and 17 among it.
    """
    config = job.config
    assert isinstance(config, MegatronLmConfig)
    resume_step = step_of(job.launch.resume) or 0
    if resume_step >= config.train_steps:
        return "done", resume_step
    program = _program(config)
    if job.launch.leads:
        _lead_in(job, resume_step)
    _enter(config, job.launch)
    saves = Saves(job)
    words = arguments(config, _places(job, saves, resume_step), on_cpu=_without_gpu(config))
    if digests is not None:
        # Before the program's own process groups: no rank can make a step without this one.
        digests.wait()
    saves.start()
    try:
        _execute(job, keeper, saves, program, words, resume_step)
    except SystemExit:
        saves.finish()  # all ranks leave together, and what was saved last is to be resumed
        raise
    except BaseException:
        saves.abandon()
        if saves.problem is not None:
            raise saves.problem from None
        raise
    return _outcome(job, saves, resume_step)


def _program(config: MegatronLmConfig) -> Path:
    program = Path(config.checkout, config.entry)
    if not program.is_file():
        hint = "set `engine.checkout` to a directory that every node, and the container, sees"
        missing = Problem("no such program", str(program), hint=hint, node_dependent=True)
        raise InvalidInputError([missing])
    return program


def _lead_in(job: Job, resume_step: int) -> None:
    """The tracker names what is resumed: Megatron-LM's own tools trust it."""
    if resume_step:
        point_tracker_to(job.run.checkpoints, resume_step)
    else:
        (job.run.checkpoints / TRACKER_NAME).unlink(missing_ok=True)
    write_progress(job, "loading" if resume_step else "starting", resume_step)


def _enter(config: MegatronLmConfig, launch: Launch) -> None:
    """What Megatron-LM expects of a launcher, and its modules before all others."""
    os.environ["RANK"] = str(launch.rank)
    os.environ["WORLD_SIZE"] = str(launch.world_size)
    os.environ["LOCAL_RANK"] = str(_visible_rank(launch))
    if config.deterministic_mode:
        for name, value in DETERMINISTIC_VARIABLES.items():
            os.environ.setdefault(name, value)
    sys.path.insert(0, config.checkout)


def _visible_rank(launch: Launch) -> int:
    """With `--gpus-per-task` Slurm shows each task one GPU only, which is then number 0."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return 0 if len(shown) == 1 and shown[0] else launch.local_rank


def _without_gpu(config: MegatronLmConfig) -> bool:
    """True on a machine without GPUs, where stand-ins for CUDA make a trial possible."""
    from hpctrain.train.device import on_cpu  # torch comes in here

    if not on_cpu():
        return False
    if config.async_save:
        # its writer is a process that is handed live tensors, where these are on the CPU
        message = "Megatron-LM saves asynchronously from GPUs only"
        hint = "set `checkpoint.asynchronous: false`"
        raise InvalidInputError([Problem(message, hint=hint)])
    from hpctrain.train.engines.megatron_lm import trial

    trial.install()
    return True


def _places(job: Job, saves: Saves, resume_step: int) -> Places:
    resumes = resume_step > 0
    return Places(
        save=str(saves.directory),
        data_cache=str(job.data_cache),
        load=str(job.run.checkpoints) if resumes else None,
        load_step=resume_step if resumes else None,
    )


def _execute(
    job: Job,
    keeper: Keeper,
    saves: Saves,
    program: Path,
    words: tuple[str, ...],
    resume_step: int,
) -> None:
    """Run the program in this process, until it ends or is ended."""
    launch = job.launch
    speaks = launch.rank == launch.world_size - 1  # utils.py, print_rank_last
    assert isinstance(job.config, MegatronLmConfig)
    teller = Teller(job, job.config, resume_step) if speaks else None
    if teller is not None:
        keeper.step = lambda: teller.step

    def hear(line: str) -> bool:
        if launch.leads:
            saves.hear(line)
        return teller is None or teller.hear(line)

    sys.argv = [str(program), *words]
    gc.enable()  # `hpctrain.train.__main__` has switched it off for the start
    from hpctrain.train.datasets.index_cache import complete_files  # brings in NumPy
    from hpctrain.train.engines.megatron_lm.measuring import measuring  # brings in torch

    loading = changed_on_import(
        {"megatron.training.checkpointing": _noting_loads(keeper, resume_step)}
    )
    stopping = Stopping(lambda: relay.wished, keeper.begin)
    keeper.asked = stopping.has_received

    def understood() -> None:
        """From here on the program saves and leaves after its next step, unless a stop that comes
        before its first one can be told apart."""
        if not stopping.follows_steps:
            keeper.begin()

    relay = Relay(job, understood)
    with (
        hearing(hear),
        relay,
        refusals_named(),
        complete_files(),
        stopping.following(),
        measuring(job),
        loading,
    ):
        try:
            runpy.run_path(str(program), run_name="__main__")
        except SystemExit as error:
            if error.code not in (0, None):
                raise
        finally:
            if teller is not None:
                teller.close()
            _end_children()


def _noting_loads(keeper: Keeper, resume_step: int) -> Callable[[ModuleType], None]:
    """Have `keeper` know when the program is loading the checkpoint; a fork without this function
    loads as ever."""

    def change(module: ModuleType) -> None:
        load = getattr(module, "load_checkpoint", None)
        if load is None or not resume_step:
            return

        @functools.wraps(load)
        def load_noted(*arguments: Any, **keywords: Any) -> Any:
            keeper.loading_step = resume_step  # stays so if this raises
            loaded = load(*arguments, **keywords)
            keeper.loading_step = None
            return loaded

        # The loop has a name of its own for it, if it was imported before.
        for user in (module, sys.modules.get("megatron.training.training")):
            if getattr(user, "load_checkpoint", None) is load:
                vars(user).update(load_checkpoint=load_noted)

    return change


def _end_children() -> None:
    """The saver's queue and the data loader's workers are processes that would outlive a rank which
    leaves without Python's own clearing up (`hpctrain.train.entry.leave`)."""
    for child in multiprocessing.active_children():
        child.kill()


def _outcome(job: Job, saves: Saves, resume_step: int) -> tuple[Outcome, int]:
    """Megatron-LM leaves with 0 when it has finished and when it was asked to leave: what it has
    saved tells which."""
    if job.launch.leads:
        write_progress(job, "leaving", saves.newest_step or resume_step)
    saves.finish()
    outlast(job.run, job.run.require)
    steps = published_steps(job.run.checkpoints)
    newest = steps[-1] if steps else 0
    if newest >= job.config.train_steps:
        return "done", newest
    if newest == resume_step:
        message = "Megatron-LM ended by itself without an error and without a checkpoint"
        hint = "its log says why; it prints some refusals and leaves with code 0"
        raise InvalidInputError([Problem(message, hint=hint)])
    return "yielded", newest
