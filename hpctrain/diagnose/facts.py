"""The inputs of a diagnosis; any of them may be missing.

Belongs here: these records and simple sums of them. Does not belong here: judging them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

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

    `slow`: what was slow, in sentences. `nodes`: those that are certainly slow.
    """

    epoch: int
    ranks: int
    slow: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

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
