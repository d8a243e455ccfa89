"""The documents of a comparison: the request, written once, and the results.

Belongs here: fields and their units. Does not belong here: computing them.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.plan.documents import StepParts
from hpctrain.spec.document import Document

Kind = Literal["engines", "sizes"]
Unit = Literal["tokens", "images"]
Price = tuple[float, str]


class Predicted(Document):
    """The planner's figures of one variant; `step_seconds` is absent if it predicts none.

    `low_step_seconds`, `high_step_seconds`: where 80 of 100 sites would measure; `step_deviation`:
    of the logarithm, `layout_deviation`: of that of two layouts over each other.
    """

    layout: str
    zero: int
    offload: str
    recompute: str
    micro_batch: int
    peak_bytes: int
    step_seconds: float | None
    parts: StepParts | None
    low_step_seconds: float | None = None
    high_step_seconds: float | None = None
    step_deviation: float | None = None
    layout_deviation: float | None = None
    fit_probability: float | None = None


class TrialRecord(Document):
    """One variant. `run_id` is absent if there is nothing to run; `refusal` is the reason.

    `training` is a digest of everything that decides the computed numbers: two trials with the same
    digest must have the same losses apart from rounding.
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
    absent if the profile has no prices.
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


class StepSpread(Document):
    """Seconds of the counted steps: median, mean, and 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    mean: float


class StepShares(Document):
    """Seconds of each part of a step, the mean over ranks; the first four add up to the step.

    `data`: waiting for samples; `compute`: forward and backward passes with their communication;
    `update`: the optimizer and its sums over ranks; `other`: the rest. `imbalance`: compute time of
    the slowest rank beyond the mean, for which the others wait within the other parts. None: not
    reported.
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
    """Figures of the steps of a trial, without the first ones of each launch.

    `peak_bytes`: the largest over ranks if all ranks reported it, else that of rank 0.
    """

    steps: int
    step_seconds: StepSpread
    samples_per_second: float
    peak_bytes: int
    peak_of_all_ranks: bool
    shares: StepShares | None
    eval_loss: float | None
    eval_accuracy: float | None


class Stability(Document):
    """Launches and interruptions of a trial. `failures`: causes of the failed launches."""

    launches: int
    failures: tuple[str, ...]
    preemptions: int
    steps_again: int


class LossAgreement(Document):
    """Difference of a trial's losses from those of the `reference`.

    `largest` is the largest relative difference over their common `steps`; `bound` is the effect of
    rounding at the coarser of both precisions. Beyond it, `verdict` is `other run` if the trainings
    differ (model, batch, seed, or initial weights), `other start` if the first step already differs
    (dropout, other samples), else `drifts`.
    """

    reference: str
    steps: int
    largest: float
    bound: float
    verdict: Literal["same", "other run", "other start", "drifts"]


class TrialResult(Document):
    """One variant with its current results.

    `losses` are (step, loss) of the counted steps. `gpu_hours` and `cost` are for the whole budget
    at this pace, without queueing, saves and failures.
    """

    record: TrialRecord
    state: str
    reason: str = ""
    over: bool
    measured: Measured | None = None
    stability: Stability | None = None
    agreement: LossAgreement | None = None
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
        """Peak memory of one GPU: measured, else predicted."""
        if self.measured is not None:
            return self.measured.peak_bytes
        return self.record.predicted.peak_bytes if self.record.predicted else None


class Recommendation(Document):
    """The recommended variant, if any, and the reasons as sentences."""

    choice: str | None
    sentences: tuple[str, ...]


class LostTime(Document):
    """Seconds of a step beyond its share of the work of the smallest size.

    `messages`: communication and the inefficiency of smaller kernels: all but `data` and
    `imbalance`.
    """

    total: float
    data: float
    imbalance: float
    messages: float


class ScalePoint(Document):
    """One number of GPUs compared with the `baseline`, the smallest that worked.

    `speedup` is the ratio of samples per second; `efficiency` divides it by the ratio of GPUs.
    `predicted_efficiency` uses the planner's step times.
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
    trials: tuple[TrialResult, ...]
    recommendation: Recommendation
    points: tuple[ScalePoint, ...] = ()

    @property
    def over(self) -> bool:
        return all(trial.over for trial in self.trials)

    @property
    def measured(self) -> bool:
        """False for a prediction."""
        return self.record.comparison_id is not None
