"""The documents of a forecast: its input and its results.

Belongs here: fields and their units. Does not belong here: how a number is found.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_serializer

from hpctrain.base.units import Duration
from hpctrain.plan.documents import BatchSplit
from hpctrain.spec.document import Document

Tariff = Literal["on demand", "spot"]
AssumptionKind = Literal[
    "node failures",
    "restart",
    "preemptions",
    "save",
    "queue",
    "price",
    "repair",
    "causes",
    "continuation",
]


class TrainerSaves(Document):
    """How a trainer of its own saves, as far as it is known; `seconds`, `every_steps` None: not."""

    resumes: bool = Field(description="Its checkpoints are found, so that a launch continues")
    on_signal: bool = Field(description="It saves when it has to stop")
    seconds: float | None = Field(None, ge=0, description="Training stands still for a save")
    every_steps: int | None = Field(None, ge=1, description="Steps between its saves")
    measured: bool = Field(False, description="`seconds` was measured, and is no upper limit")


class RunFacts(Document):
    """The input of the forecast: facts of one plan. None: not known of a trainer of its own."""

    step_seconds: float = Field(gt=0, allow_inf_nan=False, description="One optimizer step")
    step_deviation: float = Field(
        0.0, ge=0, description="Of the logarithm of the step time: how sure the prediction is"
    )
    gpus: int = Field(ge=1, description="GPUs that compute")
    nodes: int = Field(ge=1, description="Nodes that they are on; all must work")
    parameters: int | None = Field(
        None, ge=1, description="That learn, each counted once: a checkpoint's"
    )
    tokens_per_step: int | None = Field(None, ge=1, description="Global batch x sequence length")
    train_steps: int = Field(ge=1, description="Optimizer steps of the whole run")
    batch: BatchSplit | None = Field(None, description="Of a plan: its first steps may be smaller")
    checkpoint_bytes_per_parameter: float | None = Field(
        None, gt=0, description="Default: by engine and precision"
    )
    walltime: Duration | None = Field(None, gt=0, description="Of one attempt; absent: no limit")
    spot: bool | None = Field(None, description="Default: whether the partition is preemptible")
    filesystem: str | None = Field(None, description="Of the checkpoints; default: the first")
    queue_seconds: float = Field(0.0, ge=0, description="Mean wait before each attempt starts")
    preemption_wait_seconds: float | None = Field(
        None, ge=0, description="Mean further wait after a preemption; default: published or 0"
    )
    saves: TrainerSaves | None = Field(None, description="Of a trainer of its own")
    start_seconds: float | None = Field(
        None, ge=0, description="From a launch to its first step, as measured"
    )

    @property
    def training_seconds(self) -> float:
        """The time of all steps."""
        if self.batch is not None:
            return self.batch.seconds(self.step_seconds)
        return self.step_seconds * self.train_steps

    @property
    def tokens(self) -> int | None:
        """Of the whole run; None: not known."""
        if self.tokens_per_step is None or self.batch is None:
            return self.tokens_per_step and self.train_steps * self.tokens_per_step
        return self.batch.train_samples * self.tokens_per_step // self.batch.global_batch

    @property
    def saves_when_stopped(self) -> bool:
        """Whether a time limit or a preemption leaves a last checkpoint, if there is time."""
        return self.saves is None or self.saves.on_signal


class CheckpointCost(Document):
    """One checkpoint: its size, how long it takes to be durable, how long training stands still.

    `total_bytes`: None where the trainer is not known.
    """

    total_bytes: int | None
    write_seconds: float
    stall_seconds: float
    last_save_seconds: float
    write_limit: str
    asynchronous: bool


class CheckpointInterval(Document):
    """The interval between two saves: `young` and `daly` by formula, `steps` as used."""

    steps: int
    seconds: float
    young_seconds: float
    daly_seconds: float
    best_steps: int
    best_saves_seconds: float


class Assumption(Document):
    """One figure that neither spec nor profile gives. Written as text: `kind: text`."""

    kind: AssumptionKind
    text: str

    @model_serializer
    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class Interruptions(Document):
    """Mean seconds between interruptions of this job, and which of them are assumed."""

    failure_mtbf_seconds: float
    preemption_mtbf_seconds: float | None
    restart_seconds: float
    warned: bool
    assumptions: tuple[Assumption, ...]


class TimeShares(Document):
    """Where the expected time goes, in seconds; the sum is the wall-clock time.

    `detecting_seconds` pass until a failure is seen, `waiting_seconds` without nodes, of which
    `repair_seconds` because too few nodes of the cluster work.
    """

    training_seconds: float
    evaluation_seconds: float
    saving_seconds: float
    redone_seconds: float
    starting_seconds: float
    detecting_seconds: float = 0.0
    waiting_seconds: float
    repair_seconds: float = 0.0

    @property
    def occupied_seconds(self) -> float:
        """Time in which GPUs are allocated, and paid for."""
        return self.total_seconds - self.waiting_seconds

    @property
    def total_seconds(self) -> float:
        names = [name for name in type(self).model_fields if name != "repair_seconds"]  # waited
        return float(sum(getattr(self, name) for name in names))


class Spread(Document):
    """What 90 of 100 runs keep within: failures, preemptions, and how sure the step time is.

    From `trials` played runs (`hpctrain.simulate`) drawn from `seed`; `stopped` is the share that
    the supervisor gives up, for `stop_reason` most often. Each run has drawn a step time whose
    logarithm deviates by `step_deviation`; 0: as predicted.
    """

    trials: int
    seed: int
    least_seconds: float = Field(description="5 % of the runs are shorter; wall-clock time")
    most_seconds: float = Field(description="5 % of the runs are longer")
    least_gpu_hours: float
    most_gpu_hours: float
    stopped: float
    stop_reason: str | None
    step_deviation: float = 0.0


class Cost(Document):
    """Money for the whole run; `least_amount` and `most_amount` are those of its `spread`."""

    tariff: Tariff
    currency: str
    per_gpu_hour: float
    amount: float
    least_amount: float | None = Field(None, description="5 % of the runs cost less")
    most_amount: float | None = Field(None, description="5 % of the runs cost more")


class Forecast(Document):
    """Expected values for one plan. Times in seconds; `ettr` is training over allocated time.

    Means of played runs where there is a `spread`, else of the closed forms of `predict`.
    `tokens`: None where the trainer is not known.
    """

    gpus: int
    nodes: int
    tariff: Tariff
    steps: int
    tokens: int | None
    step_seconds: float
    checkpoint: CheckpointCost
    interval: CheckpointInterval
    interruptions: Interruptions
    times: TimeShares
    slices: int
    failures: float
    preemptions: float
    starts: float
    ettr: float
    ettr_with_queue: float
    gpu_hours: float
    cost: Cost | None
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...]
    spread: Spread | None = None

    @property
    def most_seconds(self) -> float:
        """Wall-clock seconds that 95 of 100 runs keep within; the mean where none were played."""
        return self.spread.most_seconds if self.spread else self.times.total_seconds

    @property
    def most_cost(self) -> float | None:
        """Money that suffices in 95 of 100 runs; None without prices."""
        if self.cost is None or self.cost.most_amount is None:
            return self.cost.amount if self.cost else None
        return self.cost.most_amount

    @property
    def days(self) -> float:
        """Wall-clock days, waiting included."""
        return self.times.total_seconds / 86400


class SpotComparison(Document):
    """The same plan on nodes that are taken away and on nodes that are not."""

    on_demand: Forecast
    spot: Forecast | None = Field(description="None: preemptions leave no progress")
    recommended: Tariff
    reason: str
    break_even_preemption_seconds: float | None = Field(
        description="Preemptions more frequent than this make spot dearer; None: always dearer"
    )


class Budget(Document):
    """What may be spent; either part may be absent."""

    money: float | None = Field(None, gt=0, allow_inf_nan=False)
    currency: str | None = None
    deadline: Duration | None = Field(None, gt=0)


class BudgetDecision(Document):
    """The option to take, or what is missing. Numbers are positions in the given options."""

    chosen: int | None
    nearest: int
    meets: tuple[int, ...]
    lines: tuple[str, ...]
