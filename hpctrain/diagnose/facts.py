"""The inputs of a diagnosis, any of which may be missing, and the findings that it consists of.

Belongs here: these records and simple sums of them. Does not belong here: judging them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hpctrain.base.frozen import Frozen
from hpctrain.plan.documents import Layout, Plan
from hpctrain.records.run_records import RankTimes
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.telemetry.traces import TraceSummary


@dataclass(frozen=True)
class StepFacts:
    """Step times of the metrics.

    `usual`: (step, seconds) of the newest launch, without its first step and profiled ones.
    `lost_seconds`: time of first steps beyond the median.
    """

    launches: int
    usual: tuple[tuple[int, float], ...]
    lost_seconds: float
    all_seconds: float

    @property
    def median_seconds(self) -> float | None:
        return median(seconds for _, seconds in self.usual) if self.usual else None


@dataclass(frozen=True)
class SaveFacts:
    """Number of saves and the total stall for them, without the save at the end of a launch."""

    count: int
    stall_seconds: float
    asynchronous: bool


@dataclass(frozen=True)
class AxisFacts:
    """Messages along one axis in one step.

    `seconds`: of the rank that spends least, for others wait for it; `most_bytes`: what a rank
    hands over at most.
    """

    axis: str
    calls: int
    most_bytes: int
    seconds: float


@dataclass(frozen=True)
class MessageFacts:
    """Messages between ranks in the newest step that was measured, hidden or not."""

    step: int
    step_seconds: float
    axes: tuple[AxisFacts, ...]

    @property
    def source(self) -> str:
        return f"communication.json, step {self.step}"


@dataclass(frozen=True)
class SpeedFacts:
    """The check before training of the newest launch that has one.

    `slow`: what was slow, in sentences. `nodes`: those that are certainly slow. `far`: ranks on
    CPUs of another NUMA node than that of their GPU, in sentences.
    """

    epoch: int
    ranks: int
    slow: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    far: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        return f"speed.jsonl, launch {self.epoch}"


@dataclass(frozen=True)
class Planned:
    """The submitted spec, its profile and plan."""

    spec: RunSpec
    profile: ClusterProfile
    plan: Plan

    def network_per_gpu(self) -> float:
        """Compute the network bandwidth per GPU in bytes per second."""
        network = self.profile.network
        return network.nics_per_node * float(network.nic_bandwidth) / self.profile.gpu.per_node

    @property
    def gradient_bytes(self) -> int:
        """Gradients of one GPU, summed in fp32."""
        most = max(stage.parameters_per_gpu for stage in self.plan.stages)
        return round(4 * most * self.plan.learned / self.plan.parameters)


@dataclass(frozen=True)
class DiagnosisInput:
    """All inputs of a diagnosis."""

    run_id: str
    ranks: RankTimes | None = None
    steps: StepFacts | None = None
    saves: SaveFacts | None = None
    planned: Planned | None = None
    traces: tuple[TraceSummary, ...] = ()
    speed: SpeedFacts | None = None
    messages: MessageFacts | None = None

    @property
    def step_seconds(self) -> float | None:
        """Time of a usual step, from the ranks' window or else from the metrics."""
        if self.ranks is not None and self.ranks.step_seconds:
            return median(self.ranks.step_seconds)
        return self.steps.median_seconds if self.steps else None


def stage_of(layout: Layout | None, rank: int) -> int:
    """Find the pipeline stage of a rank, which vary over tp, cp, then in the layout's order."""
    if layout is None or layout.pp == 1:
        return 0
    inner = layout.tp * layout.cp
    if layout.order.endswith("-dp-pp"):
        inner *= layout.dp
    return rank // inner % layout.pp


def fullest_of_stages(layout: Layout | None, of_ranks: Sequence[int]) -> dict[int, int]:
    """Find the largest value of the ranks of each pipeline stage, such as bytes of memory."""
    most: dict[int, int] = {}
    for rank, value in enumerate(of_ranks):
        stage = stage_of(layout, rank)
        most[stage] = max(most.get(stage, 0), value)
    return most


# ----------------------------------------------------------------------------------------------
# The documents of a diagnosis: question, answer, measurements, remedies and their predicted gain.


Topic = Literal[
    "data", "communication", "imbalance", "pipeline", "buckets", "memory", "saves", "warm_up",
    "unsteady", "hardware",
]  # fmt: skip
Answer = Literal["yes", "no", "unknown"]
QUESTIONS: dict[Topic, str] = {
    "data": "Is it data loading?",
    "communication": "Is it communication?",
    "imbalance": "Are some ranks slower than others?",
    "pipeline": "Is it the pipeline's bubble?",
    "buckets": "Is it the shape of the gradient buckets?",
    "memory": "Is memory the limit?",
    "saves": "Is it saving?",
    "warm_up": "Is it starting again and again?",
    "unsteady": "Are some steps slower than others?",
    "hardware": "Was a GPU or a link slow before training?",
}


class Measurement(Frozen):
    """Measured numbers as text, and the file that they come from."""

    words: str
    source: str


class Price(Frozen):
    """The planner's predictions with the changes and without them."""

    step_seconds: float | None
    step_seconds_now: float | None
    peak_bytes: int
    peak_bytes_now: int


class Suggestion(Frozen):
    """A recommended action; `changes` are values of `--set`, `price` is their predicted effect."""

    words: str
    changes: tuple[str, ...] = ()
    price: Price | None = None


class TopicFinding(Frozen):
    """The answer to one question.

    `gain_seconds`: time per step that a remedy can save at most; with `at_least`, at least.
    """

    topic: Topic
    answer: Answer
    words: str
    evidence: tuple[Measurement, ...] = ()
    remedies: tuple[Suggestion, ...] = ()
    gain_seconds: float | None = None
    at_least: bool = False

    @property
    def question(self) -> str:
        return QUESTIONS[self.topic]


def unknown(topic: Topic, words: str) -> TopicFinding:
    return TopicFinding(topic=topic, answer="unknown", words=words)


def fine(topic: Topic, words: str, *evidence: Measurement) -> TopicFinding:
    return TopicFinding(topic=topic, answer="no", words=words, evidence=evidence)
