"""Check configuration, data files, weights and run directory before torch is imported.

Every rank runs these checks on the same files, so all of them exit with the same message. A
`Problem` that may occur on some nodes only is marked as `node_dependent`. Does not belong here: the
content of a checkpoint (see `hpctrain.checkpoints`), plans and their memory, the same checks at
submission (see `hpctrain.job.input_checks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.publish import published_steps
from hpctrain.checkpoints.staged import Staged, open_staged, require_kind
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.records.datasets import (
    DatasetSidecar,
    Expected,
    bin_path,
    idx_path,
    problems_of,
    sidecar_path,
)
from hpctrain.records.epochs import current_epoch
from hpctrain.records.manifest import checkpoint_name, read_manifest, step_of
from hpctrain.spec.engines.registry import abilities_of, resolve
from hpctrain.spec.families.settings import classes_of, disagreements
from hpctrain.train.datasets.skipped_samples import parse_skips, read_skips
from hpctrain.train.job import Job

# -- Check the data files of a run before torch is imported --------------------------------------


def data_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield all problems of the data files; mock data has none."""
    if isinstance(config, ModuleConfig) and config.data_format != "tokens":
        expected = Expected(
            format=config.data_format,
            seq_length=config.seq_length,
            vocab_size=config.vocab_size,
            classes=classes_of(config.model),
            side=config.model.image,
        )
        paths = [path for _, path in config.data_blend]
        if config.data_validation is not None:
            paths.append(config.data_validation)
        for source in paths:
            yield from problems_of(Path(source), expected)
        return
    for _, name in config.data_blend:
        prefix = Path(name)
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                yield Problem("data file not found", str(path), node_dependent=True)
        try:
            sidecar = DatasetSidecar.model_validate_json(sidecar_path(prefix).read_bytes())
        except (OSError, ValidationError):
            continue  # data from elsewhere has no sidecar
        if sidecar.vocab_size > config.vocab_size:
            yield Problem(
                f"the data was made with a vocabulary of {sidecar.vocab_size} tokens, "
                f"the model has vocab_size {config.vocab_size}",
                str(sidecar_path(prefix)),
            )


# -- Check the pretrained weights of a run before torch is imported ------------------------------


def starting_problems(config: TrainConfig, *, resumes: bool) -> tuple[Problem, ...]:
    """List all problems of the weights; empty for a run that starts from random weights.

    megatron-core reads them in the first launch only; a module is built from its config.json in
    every launch.
    """
    if resumes and abilities_of(config.engine).weights == "megatron_core":
        return ()
    try:
        open_weights(config)
    except InvalidInputError as error:
        return error.problems
    return ()


def open_weights(config: TrainConfig) -> Staged | None:
    """Open the directory of `model.pretrained`; None without one. Raises InvalidInputError."""
    if not isinstance(config, MegatronConfig | ModuleConfig) or not config.pretrained:
        return None
    staged = open_staged(Path(config.pretrained))
    require_kind(staged, abilities_of(config.engine).weights)
    if reasons := disagreements(config.model, staged.config):
        raise InvalidInputError([Problem(reason, config.pretrained) for reason in reasons])
    return staged


def check(job: Job) -> None:
    """Raise InvalidInputError with all problems."""
    config = job.config
    problems = [
        *_settings_problems(config, job.launch.world_size),
        *_problems_of_the_engine(job),
        *data_problems(config),
        *starting_problems(config, resumes=bool(job.launch.resume)),
        *_resume_problems(job),
    ]
    try:
        parse_skips(read_skips(job.run.skips), job.run.skips)
    except InvalidInputError as error:
        problems += error.problems
    if problems:
        raise InvalidInputError(problems)


def _settings_problems(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    """Check processes, batch sizes and the learning-rate schedule."""
    if config.world_size != world_size:
        yield Problem(
            f"the layout {config.layout_words} needs {config.world_size} processes, "
            f"but {world_size} were started"
        )
    per_microbatch = config.micro_batch_size * config.data_parallel_size
    for size in [size for size in config.batch_sizes.all if size % per_microbatch][:1]:
        name = (
            "global_batch_size" if size == config.global_batch_size else "a batch of the ramp-up:"
        )
        yield Problem(
            f"{name} {size} is not divisible by micro_batch_size "
            f"{config.micro_batch_size} x data_parallel_size {config.data_parallel_size}"
        )
    if config.lr_warmup_steps >= config.lr_decay_steps:
        yield Problem(
            f"lr_warmup_steps {config.lr_warmup_steps} must be below "
            f"lr_decay_steps {config.lr_decay_steps}"
        )
    if config.min_lr > config.lr:
        yield Problem(f"min_lr {config.min_lr:g} is above lr {config.lr:g}")


def _problems_of_the_engine(job: Job) -> Iterable[Problem]:
    module = abilities_of(job.config.engine).preflight
    if module is None:
        return ()
    return cast(Iterable[Problem], resolve(module).engine_problems(job.config, job.run))


def _resume_problems(job: Job) -> Iterator[Problem]:
    """Check that a fresh start has no checkpoints, and that a resume has a valid one.

    Only rank 0 parses the manifest, which names the files of all ranks.
    """
    if job.launch.epoch == 0 and job.run.epochs.is_dir() and current_epoch(job.run.epochs) != 0:
        yield Problem("HPCTRAIN_EPOCH is not set, but the run has launches with epochs")
    if not job.launch.resume:
        published = published_steps(job.run.checkpoints)
        if published:
            yield Problem(
                f"asked to start from step 0, but {checkpoint_name(published[-1])} exists",
                str(job.run.checkpoints),
                hint="set HPCTRAIN_RESUME to the checkpoint's name, or submit a new run",
            )
        return
    directory = job.run.checkpoints / job.launch.resume
    step = step_of(job.launch.resume)
    if step is None:
        yield Problem(f"HPCTRAIN_RESUME is not a checkpoint's name: {job.launch.resume!r}")
    elif not directory.is_dir():
        message = "the checkpoint to resume from does not exist"
        yield Problem(message, str(directory), node_dependent=True)
    elif job.launch.leads and read_manifest(directory) is None:
        message = "the checkpoint to resume from has no readable manifest"
        yield Problem(message, str(directory), node_dependent=True)
