"""The run spec: one frozen document per YAML file that describes a training run.

Belongs here: fields, their limits, and checks that need only the document itself. Does not belong
here: the shape of the model (see `model`), facts about a cluster (see `profile`), the layout over
GPUs (see `hpctrain.plan`), files, the clock, the environment.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from hpctrain.base.units import ByteSize, Duration, TokenCount
from hpctrain.spec.architecture import MlaSpec as MlaSpec
from hpctrain.spec.architecture import MoeSpec as MoeSpec
from hpctrain.spec.batch import BatchSpec
from hpctrain.spec.data import DataSource as DataSource
from hpctrain.spec.data import DataSpec as DataSpec
from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.engine import EngineSpec as EngineSpec
from hpctrain.spec.engines.abilities import (
    Choices,
    EngineAbilities,
    Precision,
    RecomputeModule,
)
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.job_text import HINT, JobText, expanded_here, secret_reason
from hpctrain.spec.model import LoraSpec as LoraSpec
from hpctrain.spec.model import ModelSpec as ModelSpec
from hpctrain.spec.model import Task as Task
from hpctrain.spec.notify import ChannelSpec as ChannelSpec
from hpctrain.spec.notify import NotifySpec as NotifySpec
from hpctrain.spec.profiling import ProfileSpec as ProfileSpec
from hpctrain.spec.profiling import profile_contradictions
from hpctrain.spec.supervision import BudgetName as BudgetName
from hpctrain.spec.supervision import RollbackSpec as RollbackSpec
from hpctrain.spec.supervision import SuperviseSpec as SuperviseSpec

# ----------------------------------------------------------------------------------------------
# The evaluation section of a run spec: loss on held-out data, and jobs for each kept checkpoint.


PLACEHOLDERS = ("checkpoint", "step", "run", "output")
_BRACES = re.compile(r"\{([A-Za-z_]+)\}")
JobName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]


class EvaluationJobSpec(Document):
    """A Slurm job for each kept checkpoint, whose command writes numbers into a JSON file."""

    name: JobName = Field(description="Of its results, its jobs and its logs")
    command: tuple[str, ...] = Field(
        min_length=1,
        description="Program and arguments, run once on the node; `{checkpoint}`, `{step}`, "
        "`{run}` and `{output}` become the checkpoint's directory, its step, the run's directory "
        'and the file to write, as {"metric": value}; nothing else is replaced, and `$` is the '
        "command's own",
    )
    every_steps: int | None = Field(
        None,
        ge=1,
        description="Only checkpoints of these steps, and the last; default: "
        "`checkpoint.keep_every_steps`, or each checkpoint without that",
    )
    gpus: int = Field(1, ge=0, description="GPUs on one node")
    cpus: int | None = Field(None, ge=1, description="Default: the share of its GPUs, at least 1")
    memory_per_node: ByteSize | None = Field(
        None, description="Default: as the profile's `slurm.memory`"
    )
    walltime: Duration = Field(Duration(3600), gt=0, description="Time limit of one job")
    partition: str | None = Field(None, description="Default: that of the run")
    account: str | None = Field(None, description="Default: that of the run")
    qos: str | None = Field(None, description="Default: that of the run, or of the partition")

    @field_validator("command")
    @classmethod
    def _known_placeholders(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for word in command for name in _BRACES.findall(word)]
        if "output" not in names:
            raise ValueError("no word contains `{output}`, the file from which results are read")
        for name in names:
            near = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.7)
            if name not in PLACEHOLDERS and near:
                raise ValueError(f"`{{{name}}}` is not replaced: did you mean `{{{near[0]}}}`?")
        if any("\0" in word for word in command):
            raise ValueError("a word contains a NUL character")
        return command


class EvaluationSpec(Document):
    """Loss on validation data (off when `every_steps` is absent), and jobs on checkpoints."""

    every_steps: int | None = Field(None, ge=1, description="Evaluate after every so many steps")
    batches: int = Field(8, ge=1, description="Global batches per evaluation")
    jobs: tuple[EvaluationJobSpec, ...] = Field(
        (), description="Slurm jobs that run beside the training, on each kept checkpoint"
    )

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [job.name for job in self.jobs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two evaluation jobs are named `{twice[0]}`")
        return self


# ----------------------------------------------------------------------------------------------


# -- The tracking section of a run spec: TensorBoard, and Weights & Biases ----------------------


# W&B refuses these in names of projects.
_Project = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:\x00-\x1f]+$")]
_Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]
_Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f]+$")]
_SECRET_HINT = "remove it: a key belongs to `wandb login`, on the machine that uploads"


class WandbSpec(Document):
    """The W&B run, one for all attempts. Its key never stands in a spec."""

    project: _Project = Field(description="Project of W&B, such as `llama-pretraining`")
    entity: _Project | None = Field(
        None, description="Team or user of W&B; default: that of whoever uploads"
    )
    name: _Label | None = Field(None, description="Name of the run; default: the run id")
    group: _Label | None = Field(None, description="Group of runs that belong together")
    tags: tuple[_Tag, ...] = Field((), description="Tags, such as `[baseline, h100]`")
    mode: Literal["offline", "online"] = Field(
        "offline",
        description="offline: files in the run directory, for `wandb sync` on a login node; "
        "online: to the server at once, where compute nodes reach it",
    )

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        texts = [("tags", tag) for tag in self.tags]
        texts += [
            (name, getattr(self, name) or "") for name in ("project", "entity", "name", "group")
        ]
        for field, text in texts:
            if reason := secret_reason(field, text):
                raise Contradiction(("tracking", "wandb", field), reason, _SECRET_HINT)
        return self


class TrackingSpec(Document):
    """What shows curves of the run elsewhere. A process beside training writes it."""

    tensorboard: bool | str = Field(
        False,
        description="Event files in the run directory; or a directory, below which each run has "
        "its own; `$NAME` is put in where you submit",
    )
    wandb: WandbSpec | None = Field(None, description="Weights & Biases; absent: nothing for it")

    @field_validator("tensorboard")
    @classmethod
    def _names_a_directory(cls, tensorboard: bool | str, info: ValidationInfo) -> bool | str:
        if isinstance(tensorboard, str):
            tensorboard = expanded_here(tensorboard, info)
        # a word such as `yes` would become the name of a directory
        if isinstance(tensorboard, str) and ("/" not in tensorboard or "\0" in tensorboard):
            raise ValueError("expected `true`, or the path of a directory with a `/`")
        return tensorboard

    @property
    def wanted(self) -> bool:
        """True if anything is to be written."""
        return bool(self.tensorboard) or self.wandb is not None

    @property
    def packages(self) -> tuple[str, ...]:
        """The Python packages that write it, which are also the extras of hpctrain."""
        wanted = {"tensorboard": bool(self.tensorboard), "wandb": self.wandb is not None}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


# ----------------------------------------------------------------------------------------------


# Far above any machine, and low enough that the divisors of every number in reach are soon tried.
MOST_GPUS = 10_000_000
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Launcher = Literal["srun", "torchrun"]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def _some_variables(pattern: str) -> str:
    if not pattern.strip("*?"):
        raise ValueError(f"`{pattern}` is every variable: that is `slurm.export: all` of a profile")
    return pattern


# The name of a variable, or a pattern of names as the shell has them: `*_proxy`, `KRB5*`.
VariablePattern = Annotated[
    str, Field(pattern=r"^[A-Za-z_*?][A-Za-z0-9_*?]*$"), AfterValidator(_some_variables)
]


class BudgetSpec(Document):
    """How long to train, either steps or tokens; and what that may take."""

    steps: int | None = Field(None, ge=1, description="Optimizer steps")
    tokens: TokenCount | None = Field(
        None,
        gt=0,
        description="Tokens to train on, for example 300B",
    )
    gpu_hours: float | None = Field(
        None,
        gt=0,
        description="GPU-hours that the run may take, failures included. Metrics, alerts and "
        "reports compare with it; nothing is stopped",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("give exactly one of `steps` and `tokens`")
        return self


class OptimizerSpec(Document):
    """AdamW, as Megatron's OptimizerConfig takes it, or Muon."""

    kind: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: matrices of layers by Muon, all other weights by AdamW"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="muon: share of earlier gradients")
    lr: float = Field(gt=0, description="Peak learning rate")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay")
    beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment")
    beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment")
    epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay")
    clip_grad: float = Field(1.0, ge=0, description="Gradient norm limit; 0 switches it off")
    zero: Literal[0, 1, 2, 3] | None = Field(
        None, description="ZeRO stage; 0: each GPU has the whole state; default: 1; fsdp: 3"
    )
    shard_gpus: int | None = Field(
        None, ge=1, description="fsdp: shard over so many GPUs, copies beyond (HSDP); default: all"
    )
    offload: Literal["none", "cpu", "nvme"] = Field(
        "none", description="Home of the optimizer state; `parallel: auto` may keep it on the GPU"
    )
    overlap_grad_reduce: bool = Field(True, description="Hide the gradient reduction (DP > 1)")
    overlap_param_gather: bool = Field(True, description="Hide the parameter gather (DP > 1)")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if self.kind != "muon" and self.momentum != 0.95:
            raise ValueError(f"momentum is for `kind: muon`, not for {self.kind}")
        return self


class ScheduleSpec(Document):
    """Learning rate over steps."""

    style: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine",
        description="Shape of the decay after the warm-up; wsd: constant, then `wsd_decay_steps`",
    )
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up from 0")
    decay_steps: int | None = Field(None, ge=1, description="Default: the whole budget")
    wsd_decay_steps: int | None = Field(
        None, ge=1, description="wsd: the last of these steps, in which the rate decays"
    )
    wsd_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        "linear", description="wsd: the shape of that decay"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.style == "wsd") != (self.wsd_decay_steps is not None):
            raise ValueError("`style: wsd` and `wsd_decay_steps` go together")
        if self.style != "wsd" and self.wsd_style != "linear":
            raise ValueError(f"wsd_style is for `style: wsd`, not for {self.style}")
        return self


class ParallelSpec(Document):
    """An explicit layout; dp follows from the number of GPUs."""

    tp: int = Field(1, ge=1, description="Tensor model parallel size")
    pp: int = Field(1, ge=1, description="Pipeline model parallel size")
    vpp: int = Field(1, ge=1, description="Model chunks per pipeline stage (interleaved schedule)")
    cp: int = Field(1, ge=1, description="Context parallel size")
    ep: int = Field(1, ge=1, description="Expert parallel size, taken out of dp x cp")
    etp: int | None = Field(
        None, ge=1, description="Expert tensor parallel size; default: 1 with ep > 1, else tp"
    )
    order: Literal["auto", "tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = Field(
        "auto", description="Axes from the nearest ranks to the farthest (Megatron's order)"
    )
    sequence_parallel: bool | None = Field(
        None, description="Default: on when tp > 1, but for DeepSpeed, which has none"
    )
    stages: tuple[int, ...] | None = Field(
        None, description="Transformer layers of each stage (pp x vpp numbers) for uneven splits"
    )
    count_embedding: bool = Field(False, description="Count the embedding as a layer of stage 0")
    count_loss: bool = Field(False, description="Count the loss as a layer of the last stage")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.vpp > 1 and self.pp == 1:
            raise ValueError("vpp needs pp of at least 2")
        if self.stages is not None and len(self.stages) != self.pp * self.vpp:
            raise ValueError(f"stages needs pp x vpp = {self.pp * self.vpp} numbers")
        if self.stages is not None and (self.count_embedding or self.count_loss):
            raise ValueError("stages already says where every layer is: drop count_embedding/_loss")
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp of at least 2")
        return self


class CheckpointSpec(Document):
    """When to save, how many to keep."""

    every_steps: int | None = Field(None, ge=1, description="Save after every so many steps")
    every: Duration | Literal["auto"] | None = Field(
        None,
        description="Save when so much time has passed; auto: Young/Daly from measured saves and "
        "failures",
    )
    keep: int = Field(2, ge=1, description="Newest verified checkpoints to keep")
    keep_every_steps: int | None = Field(None, ge=1, description="Keep these steps for good")
    asynchronous: bool = Field(True, description="Write in the background while training goes on")
    verify: Literal["auto", "size", "sha256"] = Field(
        "auto",
        description="Read before the ranks start, which compare all digests as they load; size: "
        "names and sizes, sha256: everything, auto: everything up to 1GiB",
    )

    @model_validator(mode="after")
    def _some_interval(self) -> Self:
        if self.every_steps is None and self.every is None:
            raise ValueError("give `every_steps` or `every` (or both)")
        if isinstance(self.every, Duration) and self.every <= 0:
            raise ValueError("every must be greater than 0")
        return self


class QueueSpec(Document):
    """Which queue a job waits in, and for which nodes."""

    walltime: Duration | None = Field(
        # above 0, because sbatch(1) takes `--time=0` for no limit at all
        None,
        gt=0,
        description="Time limit of one job; default: the partition's limit",
    )
    partition: str | None = Field(None, description="Default: the profile's default partition")
    account: str | None = Field(None, description="Default: the profile's account")
    qos: str | None = Field(None, description="Default: the profile's QOS")
    reservation: str | None = Field(None, description="Slurm reservation to run in")
    constraint: str | None = Field(None, description="Features besides the profile's, by `&`")
    exclude: str | None = Field(None, description="Nodes never to run on, as n[1-3]")


class GpusSpec(Document):
    """How many GPUs a job has; references name them before the queue."""

    gpus: int = Field(ge=1, le=MOST_GPUS, description="Number of GPUs in all")


class ResourcesSpec(QueueSpec, GpusSpec):
    """What to ask Slurm for."""

    walltime: Duration | None = Field(
        None, gt=0, description="Time limit of one attempt; default: the partition's limit"
    )
    nodelist: str | None = Field(None, description="Nodes that must be among those of the job")
    licenses: str | None = Field(None, description="Licenses besides the profile's, as matlab:1")
    gpu_bind: str | None = Field(None, description="`--gpu-bind` of srun; default: the profile's")
    cpus_per_gpu: int | None = Field(
        None, ge=1, description="CPUs for each GPU; default: its share of the node's"
    )
    memory_per_node: ByteSize | None = Field(
        None, description="Default: as the profile's `slurm.memory` says"
    )
    spare_nodes: int = Field(
        0, ge=0, description="Nodes held idle in the job to take the place of failed ones"
    )
    min_nodes: int | None = Field(
        None, ge=1, description="Go on with as few nodes when others are missing; absent: never"
    )
    segment: int | None = Field(
        None,
        ge=1,
        description="Nodes that share a block or rack (`--segment`, Slurm 24.05); default: chosen",
    )


class EnvironmentSpec(Document):
    """Variables for the training processes. Secrets by name only."""

    variables: dict[VariableName, JobText] = Field(
        {}, description="Set in the job; the job puts in `$NAME`, `$$` is a dollar sign"
    )
    inherit: tuple[VariablePattern, ...] = Field(
        (),
        description="Names passed on from the submitting shell, or patterns such as `*_proxy`; the "
        "values stay out of files",
    )

    @field_validator("variables")
    @classmethod
    def _no_secrets(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            if reason := secret_reason(name, value):
                path = ("environment", "variables", name)
                raise Contradiction(path, f"{reason}, which every reader of the script sees", HINT)
        return variables


class ContainerSpec(Document):
    """The image of this run, where the site starts containers."""

    image: JobText | None = Field(
        None,
        min_length=1,
        description="Instead of the profile's `software.container.image`; the job puts in `$NAME`",
    )
    mounts: tuple[JobText, ...] = Field(
        (),
        description="SOURCE:TARGET[:OPTIONS], besides those of the profile; the job puts in "
        "`$NAME`",
    )
    python: JobText | None = Field(
        None, description="Interpreter inside this image; the job puts in `$NAME`"
    )


class LoggingSpec(Document):
    """What ranks write, into how many files, and for how long these are kept."""

    every_steps: int = Field(1, ge=1, description="One line in the log per so many steps")
    messages_every_steps: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        "auto",
        description="Measure the messages between ranks in one step of so many; null: never; "
        "auto: 200 on CPUs and never on GPUs, where it has not been run yet",
    )
    files: Literal["auto", "rank", "node"] = Field(
        "auto",
        description="rank: one log per rank and launch; node: one per node, with the rank before "
        "each line; auto: rank up to 64 ranks, else node",
    )
    keep_launches: int = Field(
        10,
        ge=1,
        description="Logs and exit records of so many launches stay as they are; those of older "
        "ones are packed, many into one file",
    )


class MetricsSpec(Document):
    """How the job of a run gives metrics to Prometheus. `hpctrain exporter` needs none of it."""

    textfile: bool = Field(
        True,
        description="Write them for the node_exporter of the first node, where the profile names "
        "its directory (`metrics.textfile`)",
    )
    endpoint: bool = Field(
        False,
        description="Serve them over HTTP from the first node, without a password; its address is "
        "in the run directory and in RUNS/.file_sd",
    )


class RunSpec(Document):
    """A training run: model, data, budget, layout and policies."""

    name: Name = Field(description="First part of the run id")
    model: ModelSpec
    task: Task | None = Field(
        None, description="What is learned; default: by family, bert: masked words, t5: spans"
    )
    lora: LoraSpec | None = Field(None, description="Train thin matrices only; absent: everything")
    data: DataSpec = DataSpec()
    batch: BatchSpec
    budget: BudgetSpec
    precision: Precision = Field(
        "bf16", description="Number format of weights and activations in computation"
    )
    optimizer: OptimizerSpec
    schedule: ScheduleSpec = ScheduleSpec()
    parallel: ParallelSpec | Literal["auto"] = Field(
        "auto", description="An explicit layout, or `auto` to let the planner choose"
    )
    recompute: Literal["auto", "none", "selective", "full"] = Field(
        "auto",
        description="Activation recomputation (Korthikanti et al. 2022); auto: the planner chooses",
    )
    recompute_modules: tuple[RecomputeModule, ...] = Field(
        ("core_attn",), description="What `selective` computes again (Megatron's names)"
    )
    recompute_layers: int | None = Field(
        None, ge=1, description="With `full`: the first layers of each model chunk; default: all"
    )
    fit_probability: float = Field(
        0.5,
        ge=0.01,
        le=0.99,
        description="Least probability of fitting into GPU memory with which a layout is planned; "
        "below 0.9 with a warning",
    )
    activation_offload_layers: Annotated[int, Field(ge=0)] | Literal["auto"] = Field(
        0,
        description="Layers whose activations wait in the host's memory (pp 1); auto: the planner "
        "chooses, none or some",
    )
    checkpoint: CheckpointSpec
    evaluation: EvaluationSpec = EvaluationSpec()
    engine: EngineSpec = EngineSpec()
    launcher: Launcher = Field(
        "srun",
        description="What starts the ranks: srun itself, or below it agents, one on "
        "each node, as torchrun starts them",
    )
    resources: ResourcesSpec
    environment: EnvironmentSpec = EnvironmentSpec()
    container: ContainerSpec | None = Field(
        None, description="Absent: the container of the profile, if there is one"
    )
    logging: LoggingSpec = LoggingSpec()
    profile: ProfileSpec | None = Field(
        None, description="Traces of chosen steps and ranks; absent: none"
    )
    tracking: TrackingSpec = TrackingSpec()
    metrics: MetricsSpec = MetricsSpec()
    supervise: SuperviseSpec = SuperviseSpec()
    notify: NotifySpec | None = Field(
        None,
        description="Whom the run tells about its events; absent: as the profile says. What is set "
        "here replaces the same field of the profile (docs/notifications.md)",
    )
    after: str | None = Field(
        None,
        min_length=1,
        description="Id of another run, or the start of one: Slurm starts this run when that one "
        "is done, and never if it fails; `submit --after` wins",
    )
    seed: int = Field(
        1234, ge=0, lt=2**31, description="Seed of initial weights, data order and dropout"
    )

    @property
    def offloaded_layers(self) -> int:
        """Layers whose activations are offloaded in any case; 0 where the planner chooses."""
        given = self.activation_offload_layers
        return 0 if given == "auto" else given

    @field_validator("engine")
    @classmethod
    def _engine_can_do_it(cls, engine: EngineSpec, info: ValidationInfo) -> EngineSpec:
        """Refuse contradictions with other sections, unless these are invalid themselves."""
        given = info.data
        if not given.keys() >= {"optimizer", "precision", "parallel"}:
            return engine
        parallel = given["parallel"]
        others = ("recompute", "recompute_modules", "recompute_layers", "model", "data")
        choices = Choices(
            optimizer=given["optimizer"],
            precision=given["precision"],
            parallel=ParallelSpec() if parallel == "auto" else parallel,
            layout_given=parallel != "auto",
            activation_offload_layers=given.get("activation_offload_layers", 0),
            **{name: given[name] for name in others if name in given},
        )
        for wrong in unread_choices(engine.abilities, choices):
            raise wrong
        for wrong in engine.abilities.contradictions(engine, choices):
            raise wrong
        return engine

    @field_validator("profile")
    @classmethod
    def _profile_can_be_had(
        cls, profile: ProfileSpec | None, info: ValidationInfo
    ) -> ProfileSpec | None:
        given = info.data
        if profile is None or not given.keys() >= {"engine", "resources", "budget", "batch"}:
            return profile
        for wrong in profile_contradictions(
            profile,
            engine=given["engine"].name,
            gpus=given["resources"].gpus,
            steps=_steps(given["budget"], given["batch"], given.get("model")),
        ):
            raise wrong
        return profile

    @model_validator(mode="after")
    def _warm_up_ends(self) -> Self:
        decay_steps = self.schedule.decay_steps or self.train_steps
        if self.schedule.warmup_steps >= decay_steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} must be below "
                f"the {decay_steps} steps over which the learning rate decays"
            )
        last = self.schedule.wsd_decay_steps or 0
        if self.schedule.warmup_steps + last > decay_steps:
            raise ValueError(
                f"schedule.wsd_decay_steps {last} and the warm-up are more than the {decay_steps} "
                "steps of the schedule"
            )
        return self

    @model_validator(mode="after")
    def _evaluates_on_some(self) -> Self:
        data = self.data
        share = float(data.split.split(",")[1])
        if self.evaluation.every_steps and data.sources and not data.validation and share == 0:
            message = f"{data.split} leaves nothing for the evaluation of every "
            message += f"{self.evaluation.every_steps} steps (`evaluation.every_steps`)"
            hint = "the second share is that of validation; or remove `evaluation.every_steps`"
            raise Contradiction(("data", "split"), message, hint)
        return self

    @model_validator(mode="after")
    def _images_are_no_text(self) -> Self:
        family = self.model.family
        if self.model.reads_images and self.budget.tokens is not None:
            raise ValueError(f"budget.tokens counts tokens of text: give `steps` for a {family}")
        if self.model.reads_images and not self.engine.abilities.reads_images:
            engine = self.engine.name
            raise ValueError(f"engine {engine} trains no {family}: set `engine.name` to `ddp`")
        return self

    @property
    def learned_task(self) -> Task:
        """`task`, or the default of the model's family."""
        if self.task is not None:
            return self.task
        if self.model.reads_images or self.model.classes is not None:
            return "classification"
        if self.model.encoder_layers:
            return "span_corruption"
        return "language_modeling" if self.model.causal else "masked_language_modeling"

    @property
    def train_steps(self) -> int:
        """Optimizer steps of the whole budget; a token budget is rounded up to whole steps."""
        return _steps(self.budget, self.batch, self.model)


def _steps(budget: BudgetSpec, batch: BatchSpec, model: ModelSpec | None) -> int:
    if budget.steps is not None:
        return budget.steps
    assert budget.tokens is not None
    return batch.sizes.steps_for(-(-round(budget.tokens) // (model.seq if model else 1)))


# -- Choices of a spec, outside of `engine`, that its engine would not read ---------------------


def unread_choices(engine: EngineAbilities, choices: Choices) -> Iterator[Contradiction]:
    """Find layer counts, expert tensor parallelism and precisions that the engine lacks."""
    if choices.precision not in engine.precisions:
        yield _unread(
            ("precision",),
            f"{engine.title} has no {choices.precision}",
            lambda other: choices.precision in other.precisions,
        )
    if choices.recompute_layers is not None and not engine.recomputes_some:
        message = f"{engine.title} computes all layers again, or none"
        yield _unread(("recompute_layers",), message, lambda other: other.recomputes_some)
    if choices.activation_offload_layers and not engine.offloads_activations:
        message = f"{engine.title} keeps activations on the GPU"
        yield _unread(
            ("activation_offload_layers",),
            message,
            lambda other: other.offloads_activations,
        )
    yield from _unread_parts(engine, choices)
    if choices.parallel.etp is None:
        return
    path = ("parallel", "etp")
    if not engine.splits_experts:
        message = f"{engine.title} reads no `parallel.etp`"
        yield _unread(path, message, lambda other: other.splits_experts)
    elif choices.model is not None and choices.model.moe is None:
        # megatron-core 0.16.1 builds groups of experts that no layer would use
        message = "etp splits experts, and the model has none"
        yield Contradiction(path, message, "remove it, or give `model.moe`")


def _unread_parts(engine: EngineAbilities, choices: Choices) -> Iterator[Contradiction]:
    """Find fields of data and model that the engine lacks."""
    model, data = choices.model, choices.data
    if data is not None and data.documents not in engine.documents:
        message = f"{engine.title} knows documents as {' or '.join(engine.documents)}"
        able = lambda other: data.documents in other.documents  # noqa: E731
        yield _unread(("data", "documents"), message, able)
    if data is not None and data.mask_document_ends and not engine.masks_document_ends:
        message = f"{engine.title} knows no ends of documents"
        able = lambda other: other.masks_document_ends  # noqa: E731
        yield _unread(("data", "mask_document_ends"), message, able)
    if model is None:
        return
    if model.vocab_multiple is not None and not engine.pads_vocab:
        message = f"{engine.title} pads no vocabulary"
        yield _unread(("model", "vocab_multiple"), message, lambda other: other.pads_vocab)
    moe = model.moe
    if moe is not None and (moe.balance != "aux_loss" or moe.z_loss is not None):
        field = "balance" if moe.balance != "aux_loss" else "z_loss"
        if not engine.chooses_router_losses:
            message = f"{engine.title} has no such loss of the router"
            able = lambda other: other.chooses_router_losses  # noqa: E731
            yield _unread(("model", "moe", field), message, able)


def _unread(
    path: tuple[str, ...],
    message: str,
    able: Callable[[EngineAbilities], bool],
) -> Contradiction:
    names = " or ".join(f"`{other.name}`" for other in ENGINES.values() if able(other))
    return Contradiction(path, message, f"remove it, or set `engine.name` to {names}")
