"""The plan as a document: layout, batch split, stages, memory, reasons and warnings.

Belongs here: the contents of a plan. Does not belong here: the search (see `planner`) or the input
of an engine (see `hpctrain.engines`).
"""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field

from hpctrain.plan.layout_words import DEFAULT_ORDER, Axis, Offload, Order
from hpctrain.spec.document import Document
from hpctrain.spec.engines.abilities import Precision, RecomputeModule
from hpctrain.spec.engines.abilities import Recompute as Recompute
from hpctrain.spec.engines.megatron import Fp8Recipe
from hpctrain.spec.engines.registry import EngineName

RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
Goal = Literal["time", "gpu-hours", "memory"]
Span = Literal[
    "one GPU", "inside a node", "inside an NVLink domain", "across nodes", "across islands"
]
# Below this probability that the chosen one is faster, two layouts cannot be told apart: as often
# as one in five the other one would be the better choice.
TOLD_APART = 0.8


class Layout(Document):
    """Sizes of the mesh axes, and which of them is nearest: `order`, as Megatron writes it."""

    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    sequence_parallel: bool
    ep: int = 1  # expert parallel size, taken out of dp x cp (x tp)
    etp: int | None = None  # ranks that split one expert; None: 1 with ep > 1, else tp
    order: Order = DEFAULT_ORDER

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        axes = [
            ("tp", self.tp),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("etp", self.etp or 1),
            ("dp", self.dp),
        ]
        shown = [f"{name} {size}" for name, size in axes if size > 1 or name in ("tp", "pp", "dp")]
        return " · ".join(shown)


class RampStage(Document):
    """Steps of a smaller batch, before those of the whole one; their time, if it is predicted."""

    global_batch: int
    steps: int
    step_seconds: float | None = None


class BatchSplit(Document):
    """global = micro x accumulation x dp, in sequences per optimizer step.

    `ramp` has the steps of `train_steps` whose batch is smaller; it has as many microbatches fewer.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    train_steps: int
    tokens_per_step: int
    ramp: tuple[RampStage, ...] = Field((), exclude_if=lambda stages: not stages)

    @property
    def ramp_steps(self) -> int:
        """Steps before the first one of a whole batch."""
        return sum(one.steps for one in self.ramp)

    def shares(self, step_seconds: float | None) -> tuple[tuple[int, float], ...]:
        """List (number of steps, share of a whole step) of the ramp: by time, or by samples."""
        return tuple(
            (one.steps, one.step_seconds / step_seconds)
            if step_seconds and one.step_seconds
            else (one.steps, one.global_batch / self.global_batch)
            for one in self.ramp
        )

    @property
    def train_samples(self) -> int:
        """Sequences of the whole run."""
        of_ramp = sum(one.steps * one.global_batch for one in self.ramp)
        return of_ramp + (self.train_steps - self.ramp_steps) * self.global_batch

    def seconds(self, step_seconds: float) -> float:
        """Sum the steps of the whole run, of which a whole batch takes `step_seconds`."""
        of_ramp = sum(one.steps * (one.step_seconds or 0.0) for one in self.ramp)
        return of_ramp + step_seconds * (self.train_steps - self.ramp_steps)


class Stage(Document):
    """One pipeline stage: the layers of each of its vpp chunks, and what else it has."""

    index: int
    chunk_layers: tuple[int, ...]
    embedding: bool
    loss: bool
    parameters_per_gpu: int


class MemoryBreakdown(Document):
    """Bytes on one GPU of one pipeline stage.

    `buffers_bytes`: messages between GPUs, and gradients that exist for a moment only;
    `reserved_bytes`: memory of driver and libraries, from the profile.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    buffers_bytes: int
    reserved_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)


class AxisPlacement(Document):
    """Where the ranks of one axis group are relative to each other."""

    axis: Axis
    size: int
    stride: int
    span: Span


class NodeRequest(Document):
    """How the GPUs are spread over nodes, and these over the islands of the profile.

    `segment`: so many nodes share a block, as the script requests; None: it requests nothing.
    `domain`: consecutive ranks in one NVLink domain; None in plans of older versions.
    """

    nodes: int
    gpus_per_node: int
    island_nodes: tuple[int, ...] = ()  # of each island, in the profile's order; empty: no islands
    segment: int | None = None
    domain: int | None = None

    def __str__(self) -> str:
        """Format as `1 node x 8 GPUs`."""
        nodes = "node" if self.nodes == 1 else "nodes"
        gpus = "GPU" if self.gpus_per_node == 1 else "GPUs"
        return f"{self.nodes} {nodes} x {self.gpus_per_node} {gpus}"


class StepParts(Document):
    """Where the seconds of one step go, on the slowest stage; they add up to the step."""

    compute_seconds: float
    recompute_seconds: float
    tensor_messages_seconds: float
    context_messages_seconds: float
    expert_messages_seconds: float
    pipeline_messages_seconds: float
    bubble_seconds: float
    data_messages_seconds: float
    optimizer_seconds: float
    overhead_seconds: float
    straggling_seconds: float
    activation_messages_seconds: float = 0.0  # copies to and from the host
    islands_seconds: float = 0.0  # traffic between islands, beyond what the other parts have

    @property
    def total_seconds(self) -> float:
        return float(sum(getattr(self, name) for name in type(self).model_fields))

    @property
    def message_seconds(self) -> dict[Axis, float]:
        """Seconds of messages along each axis that computation does not hide."""
        return {
            "tp": self.tensor_messages_seconds,
            "cp": self.context_messages_seconds,
            "ep": self.expert_messages_seconds,
            "dp": self.data_messages_seconds,
            "pp": self.pipeline_messages_seconds,
        }


class Prediction(Document):
    """The expected speed of a plan.

    `mfu`: model FLOPs (attention counted without the causal half, recomputation not counted: see
    `flops.model_flops_per_step`) over what all GPUs could do at `peak_flops_per_gpu`, the dense
    peak of the plan's precision. `hfu` counts recomputation too. `days` and `gpu_hours` are of
    training alone: no queue, saves, failures (see `hpctrain.plan.forecast`).
    """

    parts: StepParts
    mfu: float
    hfu: float
    peak_flops_per_gpu: float
    tokens_per_second_per_gpu: float
    days: float
    gpu_hours: float


class DoubtPart(Document):
    """Which share of the variance of the step's logarithm a multiplier, or the rest, is behind."""

    name: str
    share: float


class Certainty(Document):
    """How sure a plan's figures are: where 80 of 100 sites would measure, and the odds of fitting.

    Without own runs, of sites that nobody has measured; with them, of this one. `step_deviation`:
    of the logarithm of the step time; `layout_deviation`: of that of two layouts of one model over
    each other. `fit_probability`: that the fullest GPU has enough memory.
    `calibrated`: which own runs the figures lean on. `measured`: multipliers whose rates are those
    of the site, one by one, in place of packaged ones. `doubt`: what the doubt about the step is
    made of, the largest part first; `alike`: of what configurations that are alike err by,
    `noise`: of each one alone.
    """

    low_step_seconds: float | None = None
    high_step_seconds: float | None = None
    step_deviation: float | None = None
    layout_deviation: float | None = None
    low_peak_bytes: int
    high_peak_bytes: int
    fit_probability: float
    calibrated: str | None = None
    measured: tuple[str, ...] = ()
    doubt: tuple[DoubtPart, ...] = ()


class SearchCounts(Document):
    """Candidates of a search. `enumerated` = `infeasible` + `too_large` + `fitting`.

    `infeasible`: a rule forbids them (model, batch, engine); `too_large`: more memory than a GPU
    has, or too likely so; `tight`: those of `fitting` that are less sure to fit than 90 %.
    """

    enumerated: int
    infeasible: int
    too_large: int
    fitting: int
    tight: int


class RunPlan(Document):
    """What is decided for any run, whoever wrote its trainer."""

    schema_version: Literal[1] = 1
    run_name: str
    profile_name: str
    accelerator: Literal["cuda", "cpu"] = "cuda"
    nodes: NodeRequest
    gpu_memory_bytes: int
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class Plan(RunPlan):
    """Everything that was decided for one spec on one profile.

    `implementation`: megatron-core's layers, None for engines that have one kind only.
    `recompute_modules`: those of `selective`, None in plans of older versions; `recompute_layers`:
    so many of each chunk that `full` covers, None for all; `activation_offload_layers`: those whose
    activations wait on the host.
    `parameters`: of the whole model, each once, with LoRA's adapters; `learned_parameters`: how
    many of them are trainable (and in checkpoints), where that is not all.
    `scattered_step_seconds`: of the same layout with no two nodes in one NVLink domain or under one
    leaf; None where the site's Slurm does not know them.
    """

    engine: EngineName
    implementation: Literal["local", "transformer_engine"] | None = None
    layout: Layout
    layout_origin: Literal["spec", "auto"]
    batch: BatchSplit
    recompute: Recompute
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    recompute_layers: int | None = None
    activation_offload_layers: int = 0
    precision: Precision
    fp8_recipe: Fp8Recipe | None = None
    zero: int = 1
    shard_gpus: int | None = None
    offload: Offload = "none"
    padded_vocab: int
    parameters: int
    learned_parameters: int | None = None
    stages: tuple[Stage, ...]
    memory: tuple[MemoryBreakdown, ...]
    placements: tuple[AxisPlacement, ...]
    step_seconds: float | None = None
    scattered_step_seconds: float | None = None
    prediction: Prediction | None = None
    certainty: Certainty | None = None
    unit: Literal["tokens", "images"] = "tokens"
    search: SearchCounts | None = None
    model_flops_per_step: float

    @property
    def training_seconds(self) -> float | None:
        """The time of all steps, smaller ones of a ramp-up included; None: not predicted."""
        return None if self.step_seconds is None else self.batch.seconds(self.step_seconds)

    @property
    def learned(self) -> int:
        """Trainable parameters, which checkpoints hold."""
        return self.parameters if self.learned_parameters is None else self.learned_parameters

    @property
    def peak_stage(self) -> int:
        """Index of the stage that needs the most memory."""
        return max(range(len(self.memory)), key=lambda index: self.memory[index].total_bytes)


class Change(Document):
    """Extra time of one part of the step against the winner, as a share of the winner's step."""

    part: str
    share: float


class Shortage(Document):
    """The memory that a layout lacks, in which stage, and the largest component there."""

    missing_bytes: int
    stage: int
    component: str


class RunnerUp(Document):
    """A layout that was not chosen, compared with the one that was.

    `slower` is its step over the winner's, less one; it is the sum of `changes`. Both are absent
    where time is not predicted. `shortage` is set where it does not fit, `tight` where it is less
    sure to fit than 90 %. `winner_faster`: the probability that the winner has the shorter step;
    absent where nothing is known of errors.
    """

    description: str
    differs: str
    layout: Layout
    micro_batch: int
    recompute: Recompute
    step_seconds: float | None
    peak_bytes: int
    slower: float | None
    changes: tuple[Change, ...]
    shortage: Shortage | None
    tight: bool
    winner_faster: float | None = None


class FrontPoint(Document):
    """A layout that no other one beats in both step time and memory."""

    description: str
    gpus: int
    step_seconds: float
    peak_bytes: int


class Explanation(Document):
    """Comparison of the winner with other layouts.

    `others` have another mesh, `variants` the winner's, each with one field changed. `given` is the
    layout of the spec, if it has one: then the winner is the choice of `parallel: auto`. `groups`
    is the number of different meshes of the search, `search_seconds` its duration, if measured.
    """

    goal: Goal
    counts: SearchCounts
    groups: int
    winner: RunnerUp
    given: RunnerUp | None = None
    others: tuple[RunnerUp, ...]
    variants: tuple[RunnerUp, ...]
    front: tuple[FrontPoint, ...]
    search_seconds: float | None = None
