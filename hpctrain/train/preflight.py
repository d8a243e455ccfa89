"""What a user may have got wrong, found before torch is imported and before any rank waits.

Every rank runs these checks on the same files, so all of them leave with the same message.
Belongs here: checks of the configuration, the data files and the run directory. Does not belong
here: whether a checkpoint's content is good (see `hpctrain.checkpoints`), plans and their memory.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from hpctrain.checkpoints.manifest import checkpoint_name, read_manifest, step_of
from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.megatron import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.datasets import DatasetSidecar, bin_path, idx_path, sidecar_path
from hpctrain.store.epochs import current_epoch
from hpctrain.train.job import Job
from hpctrain.train.skips import parse_skips, read_skips

# multi_latent_attention.py gives core attention two head sizes, which dot_product_attention.py
# does not take
LATENT_NEEDS_ENGINE = Problem(
    "multi-head latent attention needs TransformerEngine: megatron-core's own layers cannot",
    hint="leave `engine.implementation` at auto, and install TransformerEngine",
)


def check(job: Job) -> None:
    """Raise InvalidInputError with everything that is wrong."""
    config = job.config
    problems = [
        *_layout_problems(config, job.launch.world_size),
        *_split_problems(config),
        *_schedule_problems(config),
        *_implementation_problems(config),
        *_expert_problems(config),
        *_prediction_problems(config),
        *_data_problems(config),
        *_resume_problems(job),
        *_skip_problems(job.run.skips),
    ]
    if problems:
        raise InvalidInputError(problems)


def microbatches(config: TrainConfig) -> int:
    """Microbatches per step on each data-parallel rank."""
    return config.global_batch_size // (config.micro_batch_size * config.data_parallel_size)


def _layout_problems(config: TrainConfig, world_size: int) -> Iterator[Problem]:
    sizes = {
        "tp": config.tensor_model_parallel_size,
        "pp": config.pipeline_model_parallel_size,
        "cp": config.context_parallel_size,
        "dp": config.data_parallel_size,
    }
    if math.prod(sizes.values()) != world_size:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        yield Problem(
            f"the layout {product} needs {math.prod(sizes.values())} processes, "
            f"but {world_size} were started"
        )
    per_microbatch = config.micro_batch_size * config.data_parallel_size
    if config.global_batch_size % per_microbatch:
        yield Problem(
            f"global_batch_size {config.global_batch_size} is not divisible by micro_batch_size "
            f"{config.micro_batch_size} x data_parallel_size {config.data_parallel_size}"
        )
    tp = config.tensor_model_parallel_size
    for name in ("num_attention_heads", "ffn_hidden_size", "padded_vocab_size"):
        if getattr(config, name) % tp:
            yield Problem(f"{name} {getattr(config, name)} is not divisible by tp {tp}")
    groups = config.num_query_groups
    if groups % tp and tp % groups:  # transformer_config.py, __post_init__: either may divide
        yield Problem(f"num_query_groups {groups} and tp {tp} do not divide each other")
    if config.sequence_parallel and (tp == 1 or config.seq_length % tp):
        yield Problem(f"sequence_parallel needs tp > 1 that divides seq_length, got tp {tp}")
    if config.padded_vocab_size < config.vocab_size:
        yield Problem(f"padded_vocab_size is below vocab_size {config.vocab_size}")


def _split_problems(config: TrainConfig) -> Iterator[Problem]:
    """The layers of each stage and, for the interleaved schedule, the number of microbatches."""
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    split = config.pipeline_layer_split
    if len(split) != pp or any(len(stage) != (vpp or 1) for stage in split):
        yield Problem(f"pipeline_layer_split must have {pp} stages of {vpp or 1} chunks: {split}")
    if sum(map(sum, split)) != config.num_layers:
        yield Problem(f"pipeline_layer_split {split} does not add up to {config.num_layers} layers")
    if vpp is not None and pp < 2:
        yield Problem("virtual_pipeline_model_parallel_size needs a pipeline of at least 2 stages")
    if vpp is not None and microbatches(config) % pp:
        # schedules.py: the interleaved schedule works on groups of pp microbatches
        yield Problem(
            f"the interleaved schedule needs microbatches divisible by pp {pp}, "
            f"got {microbatches(config)}"
        )


def _schedule_problems(config: TrainConfig) -> Iterator[Problem]:
    if config.lr_warmup_steps >= config.lr_decay_steps:
        yield Problem(
            f"lr_warmup_steps {config.lr_warmup_steps} must be below "
            f"lr_decay_steps {config.lr_decay_steps}"
        )
    if config.min_lr > config.lr:
        yield Problem(f"min_lr {config.min_lr:g} is above lr {config.lr:g}")


def _implementation_problems(config: TrainConfig) -> Iterator[Problem]:
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if config.transformer_impl == "transformer_engine" and not has_te:
        yield Problem(
            "transformer_impl is transformer_engine, but that is not installed",
            hint="use `auto` or install TransformerEngine",
        )
    if config.multi_latent_attention and (not has_te or config.transformer_impl == "local"):
        yield LATENT_NEEDS_ENGINE
    if config.context_parallel_size > 1 and (not has_te or config.transformer_impl == "local"):
        # dot_product_attention.py asserts context_parallel_size == 1
        yield Problem(
            "context_parallel_size above 1 needs TransformerEngine: megatron-core's "
            "local attention does not support it"
        )


def _prediction_problems(config: TrainConfig) -> Iterator[Problem]:
    learned = config.position_embedding_type == "learned_absolute"
    if config.mtp_num_layers and learned and config.pipeline_model_parallel_size > 1:
        # their copy is not in the group that sums gradients (parallel_state.py,
        # default_position_embedding_ranks: the first stage alone)
        yield Problem("prediction layers behind a pipeline need rotary positions")


def _expert_problems(config: TrainConfig) -> Iterator[Problem]:
    ep, experts = config.expert_model_parallel_size, config.num_moe_experts
    ranks = config.tensor_model_parallel_size * config.context_parallel_size
    ranks *= config.data_parallel_size
    if ranks % ep:
        yield Problem(f"expert_model_parallel_size {ep} does not divide tp x cp x dp = {ranks}")
    if experts is None:
        if ep > 1:
            yield Problem("expert_model_parallel_size above 1 needs num_moe_experts")
        return
    if experts % ep:
        yield Problem(f"num_moe_experts {experts} is not divisible by ep {ep}")
    if config.add_bias_linear and config.expert_tensor_parallel_size > 1:
        # transformer_config.py: "Bias in Moe is only supported when ETP==1"
        yield Problem("experts with biases cannot be split over tp: use ep, or no biases")
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        # moe_layer.py refuses tensor without sequence parallelism while training
        yield Problem("experts with tp need sequence_parallel")


def _data_problems(config: TrainConfig) -> Iterator[Problem]:
    for _, prefix in config.data_blend:
        for path in (bin_path(Path(prefix)), idx_path(Path(prefix))):
            if not path.is_file():
                yield Problem("data file not found", str(path))
        vocab = _vocabulary_of(Path(prefix))
        if vocab is not None and vocab > config.vocab_size:
            yield Problem(
                f"the data was made with a vocabulary of {vocab} tokens, "
                f"the model has vocab_size {config.vocab_size}",
                str(sidecar_path(Path(prefix))),
            )


def _vocabulary_of(prefix: Path) -> int | None:
    """The vocabulary size that the dataset's sidecar names; None for data from elsewhere."""
    try:
        return DatasetSidecar.model_validate_json(sidecar_path(prefix).read_bytes()).vocab_size
    except (OSError, ValidationError):
        return None


def _skip_problems(path: Path) -> tuple[Problem, ...]:
    try:
        parse_skips(read_skips(path), path)
    except InvalidInputError as error:
        return error.problems
    return ()


def _resume_problems(job: Job) -> Iterator[Problem]:
    """Never start at step 0 beside checkpoints, never resume from what is not one."""
    published = published_steps(job.run.checkpoints)
    if job.launch.epoch == 0 and current_epoch(job.run.epochs) != 0:
        yield Problem("HPCTRAIN_EPOCH is not set, but the run has launches with epochs")
    if not job.launch.resume:
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
        yield Problem("the checkpoint to resume from does not exist", str(directory))
    elif read_manifest(directory) is None:
        yield Problem("the checkpoint to resume from has no readable manifest", str(directory))
