"""Published shares of failure causes of large runs. Pure data.

Each mix is a table of (kind, count or weight, the supervisor's cause, symptom, whether the node is
lost). Belongs here: numbers with their source. Does not belong here: the failure rate
(`plan.forecast.published`, the profile).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hpctrain.judge.causes import Cause

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
