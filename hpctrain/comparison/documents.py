"""A comparison as documents: what is tried (written down once), and what came of it.

Belongs here: fields and their units. Does not belong here: how a number is found.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.plan.documents import StepParts
from hpctrain.spec.document import Document

Kind = Literal["engines", "sizes"]
Unit = Literal["tokens", "images"]
Price = tuple[float, str]


class Predicted(Document):
    """The planner's figures of one variant; `step_seconds` is absent where it predicts none."""

    layout: str
    zero: int
    offload: str
    recompute: str
    micro_batch: int
    peak_bytes: int
    step_seconds: float | None
    parts: StepParts | None


class TrialRecord(Document):
    """One variant. `run_id` is absent where there is nothing to run; `refusal` is the reason.

    `training` is a digest of everything that decides which numbers are computed: two trials with
    the same one must have the same losses but for rounding.
    """

    name: str
    overrides: tuple[str, ...]
    gpus: int
    global_batch: int
    sample_length: int  # tokens of a sample, 1 for images
    train_steps: int  # of the whole run, to which costs are extrapolated
    precision: str
    training: str
    run_id: str | None = None
    refusal: str | None = None
    predicted: Predicted | None = None


class ComparisonRecord(Document):
    """The request; written once, before anything is submitted.

    `comparison_id` is absent for a prediction, which leaves no directory. `price_per_gpu_hour` is
    absent where the profile has no prices.
    """

    schema_version: Literal[1] = 1
    kind: Kind
    comparison_id: str | None
    run_name: str
    profile_name: str
    steps: int
    weak: bool = False
    unit: Unit
    gpu_memory_bytes: int
    price_per_gpu_hour: Price | None = None
    trials: tuple[TrialRecord, ...]


class Spread(Document):
    """Seconds of the steps that count: median, and the two between which 8 of 10 lie."""

    median: float
    p10: float
    p90: float
    mean: float


class TimeShares(Document):
    """Where a step goes, in seconds, the mean over ranks; the first four add up to the step.

    `data`: waiting for samples; `compute`: forward and backward passes, with what is sent and
    waited for inside of them; `update`: the optimizer and the sums over ranks that belong to it;
    `other`: the rest. `imbalance`: how much longer the slowest rank computes than the mean one;
    the others wait for it inside of the other parts. None: not told.
    """

    data: float | None
    compute: float
    update: float | None
    other: float
    imbalance: float

    @property
    def step(self) -> float:
        return (self.data or 0.0) + self.compute + (self.update or 0.0) + self.other


class Measured(Document):
    """Figures of the steps that a trial has made, the first ones of a launch left out.

    `peak_bytes`: the largest over ranks where each rank told, else that of rank 0.
    """

    steps: int
    step_seconds: Spread
    samples_per_second: float
    peak_bytes: int
    peak_of_all_ranks: bool
    shares: TimeShares | None
    eval_loss: float | None
    eval_accuracy: float | None


class Stability(Document):
    """What happened to a trial. `failures`: causes of the launches that failed."""

    launches: int
    failures: tuple[str, ...]
    preemptions: int
    steps_again: int


class Agreement(Document):
    """How near the losses are to those of the `reference`.

    `largest` is the largest relative difference over the `steps` that both have; `bound` is what
    rounding explains at the coarser precision of the two. Beyond it, `verdict` is
    `other run` where something else is trained (another model, batch, seed, or first weights of
    another kind of engine), `other start` where the first step already differs (dropout, other
    samples), else `drifts`.
    """

    reference: str
    steps: int
    largest: float
    bound: float
    verdict: Literal["same", "other run", "other start", "drifts"]


class Trial(Document):
    """One variant with everything that is known about it now.

    `losses` are (step, loss), of the steps that count. `gpu_hours` and `cost` are of training the
    whole budget at this pace: no queue, saves, failures.
    """

    record: TrialRecord
    state: str
    reason: str = ""
    over: bool
    measured: Measured | None = None
    stability: Stability | None = None
    agreement: Agreement | None = None
    losses: tuple[tuple[int, float], ...] = ()
    step_times: tuple[tuple[int, float], ...] = ()
    gpu_hours: float | None = None
    cost: Price | None = None

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def succeeded(self) -> bool:
        return self.measured is not None and self.state == "DONE"

    @property
    def step_seconds(self) -> float | None:
        """Mean of a step: measured, else predicted."""
        if self.measured is not None:
            return self.measured.step_seconds.mean
        return self.record.predicted.step_seconds if self.record.predicted else None

    @property
    def samples_per_second(self) -> float | None:
        seconds = self.step_seconds
        return self.record.global_batch / seconds if seconds else None

    @property
    def peak_bytes(self) -> int | None:
        """Of one GPU: measured, else predicted."""
        if self.measured is not None:
            return self.measured.peak_bytes
        return self.record.predicted.peak_bytes if self.record.predicted else None


class Recommendation(Document):
    """The variant to take, if any, and the sentences that say why."""

    choice: str | None
    sentences: tuple[str, ...]


class LostTime(Document):
    """Seconds of a step beyond what the smallest size promises for this share of its work.

    `messages`: sent and waited for, with what smaller pieces of work cost; what is not `data` or
    `imbalance`.
    """

    total: float
    data: float
    imbalance: float
    messages: float


class ScalePoint(Document):
    """One number of GPUs against the `baseline`, the smallest that has worked.

    `speedup` is of samples per second; `efficiency` is that over the growth of the GPUs.
    `predicted_efficiency` is the same from the planner's step times.
    """

    gpus: int
    baseline: int
    speedup: float | None
    efficiency: float | None
    predicted_efficiency: float | None
    lost: LostTime | None
    eval_loss_difference: float | None
    eval_accuracy_difference: float | None


class Comparison(Document):
    """The result of `compare` and `scale`."""

    record: ComparisonRecord
    trials: tuple[Trial, ...]
    recommendation: Recommendation
    points: tuple[ScalePoint, ...] = ()

    @property
    def over(self) -> bool:
        return all(trial.over for trial in self.trials)

    @property
    def measured(self) -> bool:
        """False for a prediction."""
        return self.record.comparison_id is not None
