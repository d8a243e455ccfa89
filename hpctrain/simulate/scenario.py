"""The inputs of a simulation: a run, its cluster, failure rates and costs. Frozen documents.

Belongs here: fields, units, quantities derived from them, published shares of failure causes. Does
not belong here: the source of the numbers of one run (`hpctrain.job.simulation`), random numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from hpctrain.judge.causes import Cause
from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.spec.document import Document

# -- Failure causes of large runs: (kind, count or weight, cause, symptom, whether the node is lost)


# stop: a process dies, and srun reports it at once. stall: detected by the stall limit only.
Symptom = Literal["stop", "stall"]


@dataclass(frozen=True)
class FailureKind:
    """One kind of failure; `takes_node`: its node is unusable until it has been repaired."""

    name: str
    weight: float
    cause: Cause
    symptom: Symptom
    takes_node: bool


@dataclass(frozen=True)
class FailureMix:
    """Kinds of failures, with the source of their weights."""

    name: str
    source: str
    kinds: tuple[FailureKind, ...]

    @property
    def total_weight(self) -> float:
        return sum(kind.weight for kind in self.kinds)

    @property
    def share_taking_nodes(self) -> float:
        """Share of all failures that cost a node."""
        return sum(kind.weight for kind in self.kinds if kind.takes_node) / self.total_weight


# Counts of table 5, "The Llama 3 Herd of Models", arXiv 2407.21783: 419 unexpected interruptions
# in 54 days on 16,384 H100 (the counts add up to 419; the percentage printed for faulty GPUs,
# 30.1 %, does not fit its count). Symptoms and lost nodes are our interpretation: the paper names
# components only. Its silent data corruptions appear as anomalies.
LLAMA3 = FailureMix(
    name="llama3",
    source="table 5 of arXiv 2407.21783",
    kinds=(
        FailureKind("faulty GPU", 148, Cause.GPU_ERROR, "stop", True),
        FailureKind("GPU HBM3 memory", 72, Cause.GPU_ERROR, "stop", True),
        FailureKind("software bug", 54, Cause.CRASH, "stop", False),
        FailureKind("network switch or cable", 35, Cause.FABRIC, "stall", False),
        FailureKind("host maintenance", 32, Cause.NODE_FAILURE, "stop", True),
        FailureKind("GPU SRAM memory", 19, Cause.GPU_ERROR, "stop", True),
        FailureKind("GPU system processor", 17, Cause.GPU_ERROR, "stop", True),
        FailureKind("network card", 7, Cause.FABRIC, "stall", True),
        FailureKind("NCCL watchdog", 7, Cause.HANG, "stall", False),
        FailureKind("silent data corruption", 6, Cause.SUSPECT_NUMERICS, "stop", True),
        FailureKind("GPU thermal interface and sensor", 6, Cause.GPU_ERROR, "stop", True),
        FailureKind("SSD", 3, Cause.NODE_FAILURE, "stop", True),
        FailureKind("power supply", 3, Cause.NODE_FAILURE, "stop", True),
        FailureKind("server chassis", 2, Cause.NODE_FAILURE, "stop", True),
        FailureKind("IO expansion board", 2, Cause.NODE_FAILURE, "stop", True),
        FailureKind("dependency", 2, Cause.STORAGE, "stop", False),
        FailureKind("CPU", 2, Cause.NODE_FAILURE, "stop", True),
        FailureKind("system memory", 2, Cause.NODE_FAILURE, "stop", True),
    ),
)

# ByteRobust, arXiv 2509.16293: 43,264 explicit and 5,948 implicit failures of 778,135 jobs; of all
# incidents hangs are 9.9 %, NaN 0.3 %. Jobs of every size and state of development, so that most
# of the explicit ones are software. Which part of them takes a node is not published: a third is
# assumed, near the share of hardware that Meta gives for small jobs.
BYTEROBUST = FailureMix(
    name="byterobust",
    source="arXiv 2509.16293; a third of the explicit failures is assumed to take a node",
    kinds=(
        FailureKind("explicit, machine", 29.9, Cause.GPU_ERROR, "stop", True),
        FailureKind("explicit, software", 59.9, Cause.CRASH, "stop", False),
        FailureKind("hang", 9.9, Cause.HANG, "stall", False),
        FailureKind("NaN", 0.3, Cause.SUSPECT_NUMERICS, "stop", False),
    ),
)

# Failures of the infrastructure only, as Kokolis et al. count them (arXiv 2410.21680: 6.50 per
# 1000 node-days on RSC-1): each is one of a node.
NODES_ONLY = FailureMix(
    name="nodes",
    source="every failure takes a node, as failures are counted in arXiv 2410.21680",
    kinds=(FailureKind("node failure", 1.0, Cause.NODE_FAILURE, "stop", True),),
)

# For comparison with closed forms: nothing is lost but time.
CRASHES_ONLY = FailureMix(
    name="crashes",
    source="every failure leaves the nodes in order",
    kinds=(FailureKind("crash", 1.0, Cause.CRASH, "stop", False),),
)

MIXES = {mix.name: mix for mix in (LLAMA3, BYTEROBUST, NODES_ONLY, CRASHES_ONLY)}


# -- The scenario ----------------------------------------------------------------------------------


MixName = Literal["llama3", "byterobust", "nodes", "crashes"]


class Scenario(Document):
    """One run to be simulated. Durations in seconds; `nodes` train, `spare_nodes` are idle.

    An interruption costs detection (`detect_seconds`, or `stall_seconds` for a silent one), then
    `relaunch_seconds` in place or a wait in the queue, then `restart_seconds` for start-up and
    loading. `requeue_delay_seconds` is Slurm's own delay (cred_expire + 1 s = 121 s),
    `queue_wait_seconds` the mean of an exponential wait after it. `walltime_seconds` ends
    attempts; with `saves_at_limit` before that, and with `warned` before a preemption, there is a
    last save. Without `resumes` nothing is saved, and each launch starts over.
    `step_deviation`, of the logarithm of the step time, is drawn once per run.
    `bad_nodes_found` is the share of responsive nodes with broken hardware that a probe detects.
    The other ones are avoided if the policy may exclude nodes, or else fail the next launch.
    """

    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(8, ge=1)
    spare_nodes: int = Field(0, ge=0)
    cluster_nodes: int | None = Field(None, ge=1)
    work_seconds: float = Field(gt=0)
    step_seconds: float = Field(gt=0)
    step_deviation: float = Field(0.0, ge=0)
    interval_seconds: float = Field(gt=0)
    save_stall_seconds: float = Field(ge=0)
    save_write_seconds: float = Field(0.0, ge=0)
    failures_per_node_day: float = Field(ge=0)
    mix: MixName = "llama3"
    detect_seconds: float = Field(15.0, ge=0)
    stall_seconds: float = Field(600.0, ge=0)
    lost_node_seconds: float = Field(300.0, ge=0)
    relaunch_seconds: float = Field(5.0, ge=0)
    restart_seconds: float = Field(600.0, ge=0)
    requeue_delay_seconds: float = Field(121.0, ge=0)
    queue_wait_seconds: float = Field(0.0, ge=0)
    first_wait_seconds: float = Field(0.0, ge=0)
    bad_nodes_found: float = Field(1.0, ge=0, le=1)
    repair_seconds: float = Field(86400.0, ge=0)
    walltime_seconds: float = Field(math.inf, gt=0, allow_inf_nan=True)
    preemptions_per_day: float = Field(0.0, ge=0)
    preemption_wait_seconds: float = Field(0.0, ge=0)
    warned: bool = True
    saves_at_limit: bool = True
    resumes: bool = True
    supervise: SuperviseConfig

    @property
    def gpus(self) -> int:
        """GPUs of the training nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def held_gpus(self) -> int:
        """GPUs of all allocated nodes, spare nodes included."""
        return (self.nodes + self.spare_nodes) * self.gpus_per_node

    @property
    def failure_mix(self) -> FailureMix:
        return MIXES[self.mix]

    @property
    def failures_per_second(self) -> float:
        """Failure rate of one node."""
        return self.failures_per_node_day / 86400

    @property
    def mttf_seconds(self) -> float:
        """Mean time between failures of all training nodes; infinite without failures."""
        rate = self.nodes * self.failures_per_second
        return 1 / rate if rate else math.inf

    @property
    def work_between_saves(self) -> float:
        """The interval in whole steps, as the trainer saves; at least one."""
        return max(1, round(self.interval_seconds / self.step_seconds)) * self.step_seconds

    @property
    def stall(self) -> float:
        """Seconds without training per save: a save also waits for the one before to be written."""
        return self.save_stall_seconds + max(0.0, self.save_write_seconds - self.work_between_saves)

    @property
    def last_save(self) -> float:
        """Seconds until a save is durable when training waits for it."""
        return self.save_stall_seconds + self.save_write_seconds
