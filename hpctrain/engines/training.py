"""The trainer configuration that all engines share: batch, schedule, data, checkpoints, logging.

`TrainConfig` is the base of the engines' own documents, with Megatron's names; its file is the
run's `train.json`. Belongs here: those fields, the pure functions that fill them, the settings of
the check of GPUs and links before training, and the record of what a setting needs of libraries and
GPUs. Does not belong here: fields of one engine (see `megatron`, `native`), measuring and comparing
(see `hpctrain.train.speed_check`, `hpctrain.train.software_agreement`), torch, reading files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field

from hpctrain.base.units import Duration
from hpctrain.plan.layout_words import Axis
from hpctrain.spec.batch import BatchSizes, batch_sizes
from hpctrain.spec.data import Documents
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.spec.profiling import ProfileSpec
from hpctrain.spec.supervision import SoftwareMode

if TYPE_CHECKING:
    from hpctrain.plan.cost.prediction import ExpectedSpeed
    from hpctrain.plan.job import TrainingJob

MESSAGES_INTERVAL_STEPS = 200
_TIMES_INTERVAL_STEPS = 20
_FIRST_SAVE_SECONDS = 600.0  # until `auto` has measured saves


# Fields of `hpctrain.records.software.SoftwareFacts` with a library.
LibraryName = Literal["transformer_engine", "apex_wgrad", "deep_ep", "hybrid_ep"]


@dataclass(frozen=True, kw_only=True)
class SoftwareNeed:
    """`setting`, as people write it, needs a library, or GPUs of some compute capability.

    Versions and capabilities are (major, minor). A `version` None means any; a GPU's capability is
    at least `capability` and below `capability_below`; `cuda` is the least CUDA of torch's build.
    """

    setting: str
    library: LibraryName | None = None
    version: tuple[int, int] | None = None
    capability: tuple[int, int] | None = None
    capability_below: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    # the setting without it
    instead: str


class CheckedAxis(Document):
    """The message that is sent along an axis, and the bandwidth that the plan assumes there."""

    axis: Axis
    message_bytes: int
    expected_bytes_per_second: float | None = None


class SpeedCheckConfig(Document):
    """What the check compares: thresholds as shares, the fabric, and the plan's assumptions."""

    slow_gpu: float
    slow_link: float
    fabric: Literal["infiniband", "roce", "efa", "slingshot", "ethernet"]
    expected_flops_per_second: float | None = None
    axes: tuple[CheckedAxis, ...] = ()


class TrainConfig(Document):
    """The configuration of `python -m hpctrain.train RUN_DIRECTORY/train.json`."""

    schema_version: Literal[1] = 1
    engine: str
    run_name: str
    # bounds of the data: token ids below `vocab_size`, samples of `seq_length`
    vocab_size: int
    seq_length: int
    # ranks that read different samples
    data_parallel_size: int
    # batch and budget
    micro_batch_size: int
    global_batch_size: int
    # the first batch, the increment, and the samples over which it grows; None: it does not
    rampup_batch_size: tuple[int, int, int] | None = Field(
        None, exclude_if=lambda ramp: ramp is None
    )
    train_steps: int
    # the device of all ranks; None in the files of the first versions: a GPU where there is one
    accelerator: Literal["cuda", "cpu"] | None = None
    # numerics
    precision: Literal["bf16", "fp32"]
    deterministic_mode: bool
    seed: int
    # optimizer and schedule
    lr: float
    min_lr: float
    lr_decay_style: Literal["cosine", "linear", "constant", "wsd"]
    lr_warmup_steps: int
    lr_decay_steps: int
    # wsd: constant, then so many last steps of this shape
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    clip_grad: float
    # data: (weight, path prefix) pairs; empty means Megatron's mock data
    data_blend: tuple[tuple[float, str], ...]
    data_split: str
    data_cache: str | None
    # the token that ends a document; what begins anew behind it, and whether it has no loss
    document_end: int | None = None
    documents: Documents = "joined"
    eod_mask_loss: bool = False
    tokenizer: str | None
    # copy the files to the node's own disk, below TMPDIR, and read them there
    stage_data: bool = False
    # evaluation, checkpoints, logging
    eval_interval_steps: int | None
    eval_batches: int
    save_interval_steps: int | None
    save_interval_seconds: float | None
    # True: Young/Daly's interval from measured saves takes the place of `save_interval_seconds`
    save_interval_auto: bool = False
    async_save: bool
    keep_checkpoints: int
    keep_every_steps: int | None
    log_interval_steps: int
    distributed_timeout_seconds: float
    # for collective operations before the first step, when one rank may build for all
    startup_timeout_seconds: float = 1800.0
    # end the launch when a loss is so many median absolute deviations above the median; None: never
    loss_spike: float | None = None
    # steps between two reports of the compute time of each rank
    rank_times_interval_steps: int = _TIMES_INTERVAL_STEPS
    # steps between two measurements of the messages between ranks; None: never
    messages_interval_steps: int | None = None
    # what is done when the software is not that of the first launch
    software: SoftwareMode = "warn"
    # what is measured before the first step; None: nothing
    speed_check: SpeedCheckConfig | None = None
    # which steps of which ranks are traced
    profile: ProfileSpec | None = None
    # for reporting: model FLOPs of one step and the GPU's dense peak in FLOP/s (None: unknown)
    model_flops_per_step: float
    peak_flops_per_gpu: float | None

    @property
    def world_size(self) -> int:
        """Processes of one launch."""
        return self.data_parallel_size

    def pipeline_stage(self, rank: int) -> int:
        """Find the pipeline stage of a rank; 0 without a pipeline."""
        return 0

    @property
    def layout_words(self) -> str:
        """The layout in a manifest, for people: `tp 2 · pp 1 · dp 4`."""
        return f"dp {self.data_parallel_size}"

    @property
    def needed_paths(self) -> tuple[str, ...]:
        """Files and directories that every launch reads on every node, apart from data."""
        return ()

    @property
    def text_length(self) -> int:
        """Tokens of a text from which a sample is made."""
        return self.seq_length

    @property
    def checkout_directory(self) -> str | None:
        """The checkout whose code trains; None for an engine that is installed."""
        return None

    @property
    def computes_on_host(self) -> bool:
        """Whether the optimizer computes on the CPUs of the node."""
        return False

    @property
    def compiles_kernels(self) -> bool:
        """Whether torch compiles kernels for GPUs when the run starts."""
        return False

    @property
    def needs_transformer_engine(self) -> str | None:
        """The setting that needs TransformerEngine, or None."""
        return None

    @property
    def software_needs(self) -> tuple[SoftwareNeed, ...]:
        """What the settings need of libraries and GPUs, beside the engine itself."""
        return ()

    @property
    def library_config(self) -> dict[str, Any] | None:
        """The configuration of the engine's own library, to be kept beside `train.json`."""
        return None

    @property
    def replays_graphs(self) -> bool:
        """Whether CUDA graphs replay parts of a step, with messages that nobody calls for."""
        return False

    @property
    def measured_messages_steps(self) -> int | None:
        """Steps between two measurements of messages; None where they cannot be seen."""
        return None if self.replays_graphs else self.messages_interval_steps

    @property
    def wsd_decay_count(self) -> int | None:
        """How far the schedule goes in the decay of `wsd`; None without one."""
        if self.wsd_decay_steps is None:
            return None
        begin = self.schedule_count(self.lr_decay_steps - self.wsd_decay_steps)
        return self.schedule_count(self.lr_decay_steps) - begin

    @property
    def batch_sizes(self) -> BatchSizes:
        """How many samples each step has."""
        return batch_sizes(self.global_batch_size, self.rampup_batch_size)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step of the whole batch on each data-parallel rank."""
        return self.microbatches_of(self.global_batch_size)

    def microbatches_of(self, samples: int) -> int:
        """Count the microbatches of a step of so many samples on each data-parallel rank."""
        return samples // (self.micro_batch_size * self.data_parallel_size)

    def schedule_count(self, steps: int) -> int:
        """Return how far the learning-rate schedule is after `steps` steps.

        It counts steps, and samples where batches grow, as Megatron-LM does (training.py,
        get_optimizer_param_scheduler).
        """
        return steps if self.rampup_batch_size is None else self.batch_sizes.samples_after(steps)


def messages_interval_steps(job: TrainingJob) -> int | None:
    """Choose the steps between two measurements of messages; None: never.

    `auto` measures on CPUs only: reading NCCL's flight recorder has not been run on a GPU yet.
    """
    every = job.spec.logging.messages_every_steps
    if every == "auto":
        return MESSAGES_INTERVAL_STEPS if job.plan.accelerator == "cpu" else None
    return every


def shared_config(job: TrainingJob) -> TrainConfig:
    """Fill the shared fields, from the spec where the plan has no value.

    An engine's own document takes these fields: `OwnConfig(**dict(shared), own_field=...)`.
    """
    spec, plan = job.spec, job.plan
    optimizer, schedule, data = spec.optimizer, spec.schedule, spec.data
    checkpoint, evaluation = spec.checkpoint, spec.evaluation
    save_interval = float(checkpoint.every) if isinstance(checkpoint.every, Duration) else None
    return TrainConfig(
        engine=plan.engine,
        run_name=spec.name,
        vocab_size=spec.model.vocab,
        seq_length=spec.model.seq,
        data_parallel_size=plan.layout.dp,
        micro_batch_size=plan.batch.micro_batch,
        global_batch_size=plan.batch.global_batch,
        rampup_batch_size=spec.batch.megatron_ramp_up,
        train_steps=plan.batch.train_steps,
        accelerator=plan.accelerator,
        # fp8 and fp4 are formats of matrix products among bf16 ones; pydantic refuses fp16
        precision=cast(
            Literal["bf16", "fp32"],
            "bf16" if plan.precision in ("fp8", "fp4") else plan.precision,
        ),
        deterministic_mode=spec.engine.deterministic,
        seed=spec.seed,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_decay_style=schedule.style,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps or plan.batch.train_steps,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.wsd_style,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        clip_grad=optimizer.clip_grad,
        data_blend=tuple((source.weight, source.path) for source in data.sources),
        data_split=data.split,
        data_cache=data.cache,
        document_end=data.document_end,
        documents=data.documents,
        eod_mask_loss=data.mask_document_ends,
        stage_data=data.stage,
        tokenizer=data.tokenizer,
        eval_interval_steps=evaluation.every_steps,
        eval_batches=evaluation.batches,
        save_interval_steps=checkpoint.every_steps,
        save_interval_seconds=_FIRST_SAVE_SECONDS if checkpoint.every == "auto" else save_interval,
        save_interval_auto=checkpoint.every == "auto",
        async_save=checkpoint.asynchronous,
        keep_checkpoints=checkpoint.keep,
        keep_every_steps=checkpoint.keep_every_steps,
        log_interval_steps=spec.logging.every_steps,
        distributed_timeout_seconds=float(spec.engine.collective_timeout),
        startup_timeout_seconds=float(spec.engine.startup_timeout),
        loss_spike=spec.supervise.rollback.spike,
        # the window begins after the first step and is reported one step after its last: short
        # runs report times and nodes of their ranks, too
        rank_times_interval_steps=max(1, min(_TIMES_INTERVAL_STEPS, plan.batch.train_steps - 2)),
        messages_interval_steps=messages_interval_steps(job),
        software=spec.supervise.software,
        profile=spec.profile,
        model_flops_per_step=plan.model_flops_per_step,
        peak_flops_per_gpu=job.peak_flops_per_gpu,
    )


# -- The check of GPUs and links before training -----------------------------------------------

_MIB = 2**20
# The least and the most bytes of a message. An all-reduce over NVLink or InfiniBand reaches its
# bandwidth from some tens of MiB on (nccl-tests), above the upper bound it only takes longer; gloo
# on CPUs copies through main memory.
_MESSAGE_BYTES = {"cuda": (64 * _MIB, 256 * _MIB), "cpu": (_MIB, 4 * _MIB)}


def speed_check_mode(job: TrainingJob) -> Literal["off", "report", "exclude"]:
    """Choose the mode of the check: the spec's, or the profile's for `auto`.

    An external program opens process groups of its own, which the check cannot use.
    """
    mode = job.spec.supervise.speed_check.mode
    chosen = job.profile.usual_speed_check if mode == "auto" else mode
    return "off" if abilities_of(job.spec.engine.name).program is not None else chosen


def speed_check_config(job: TrainingJob, expected: ExpectedSpeed | None) -> SpeedCheckConfig | None:
    """Fill the settings of the check; None where it is off."""
    if speed_check_mode(job) == "off":
        return None
    plan, given = job.plan, job.spec.supervise.speed_check
    known = expected.bytes_per_second if expected is not None else {}
    least, most = _MESSAGE_BYTES[plan.accelerator]
    # the plan's messages: gradients on dp, the activations of a microbatch elsewhere
    gradients = 4 * max((stage.parameters_per_gpu for stage in plan.stages), default=0)
    tokens = plan.batch.micro_batch * job.spec.model.seq // plan.layout.cp
    activations = 2 * tokens * job.spec.model.hidden
    flops = expected.product_flops_per_second if expected is not None else None
    return SpeedCheckConfig(
        slow_gpu=given.slow_gpu,
        slow_link=given.slow_link,
        fabric=job.profile.network.fabric,
        expected_flops_per_second=None if plan.precision == "fp32" else flops,
        axes=tuple(
            CheckedAxis(
                axis=place.axis,
                message_bytes=max(
                    least, min(gradients if place.axis == "dp" else activations, most)
                ),
                expected_bytes_per_second=known.get(place.axis),
            )
            for place in plan.placements
            if place.size > 1
        ),
    )
