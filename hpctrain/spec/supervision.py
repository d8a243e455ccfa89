"""The supervise section of a run spec: limits of retries, and actions allowed without approval.

Belongs here: the fields of `supervise`. Does not belong here: deciding (`hpctrain.supervise`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpctrain.base.units import Duration
from hpctrain.spec.document import Document

# Causes of `hpctrain.judge.causes` with a budget of their own.
BudgetName = Literal[
    "node_failure",
    "load_failed",
    "prolog_failure",
    "node_command",
    "external_signal",
    "launch_failure",
    "crash",
    "hang",
    "gpu_oom",
    "host_oom",
    "gpu_error",
    "fabric",
    "storage",
    "port",
    "data_loader",
    "weights",
    "engine_exit",
    "ended_early",
    "diverged",
    "suspect_numerics",
    "supervisor_lost",
    "time_limit",
    "unknown",
]


# What is done when an attempt finds other software than the run began with.
SoftwareMode = Literal["locked", "warn", "any"]


class RollbackSpec(Document):
    """What is done about a loss that is not finite or jumps."""

    mode: Literal["observe", "act"] = Field(
        "observe", description="observe: stop and say what would be done; act: do it"
    )
    checkpoints: int = Field(
        1, ge=1, description="Good checkpoints to go back (1: the newest before the anomaly)"
    )
    skip_steps: int = Field(
        1, ge=0, description="Batches to leave out, up to and with that of the anomaly"
    )
    spike: float | None = Field(
        None,
        gt=1,
        description="A loss so many median absolute deviations above the median is an anomaly",
    )


class SpeedCheckSpec(Document):
    """The check of GPUs and links before the first step of a launch.

    Sources of the thresholds: GPUs of one kind differ by up to 22 % (Sinha et al. 2022, arXiv
    2208.11035); links of one kind hardly differ, but other jobs share them.
    """

    mode: Literal["auto", "off", "report", "exclude"] = Field(
        "auto",
        description="report: record what is slow; exclude: also replace a slow node like a failed "
        "one; auto: as the profile says",
    )
    slow_gpu: float = Field(
        0.75, gt=0, lt=1, description="A GPU below this share of its peers' median rate is slow"
    )
    slow_link: float = Field(0.5, gt=0, lt=1, description="The same for the bandwidth of its links")


class SuperviseSpec(Document):
    """When to give up, and what may be done without asking."""

    failures_without_progress: int = Field(
        3, ge=1, description="Stop after so many failures of one cause without a new checkpoint"
    )
    budgets: dict[BudgetName, Annotated[int, Field(ge=0)]] = Field(
        {}, description="Retries without a new checkpoint, for single causes, such as `hang: 5`"
    )
    storm_failures: int = Field(
        5,
        ge=2,
        description="So many failures within half an hour are a storm, with longer pauses",
    )
    stall: Duration = Field(
        Duration(600), gt=0, description="A step that takes longer than this counts as a hang"
    )
    setup_stall: Duration = Field(
        Duration(1800), gt=0, description="The same for start-up, loading and saving"
    )
    learn_stalls: bool = Field(
        True, description="Count a hang sooner once the run has shown how long things take"
    )
    slow_rank: float = Field(
        1.2, gt=1, description="Report a rank that computes so many times longer than the median"
    )
    speed_check: SpeedCheckSpec = SpeedCheckSpec()
    exclude_nodes: Literal["observe", "act"] = Field(
        "observe",
        description="observe: only say which suspected nodes to avoid; act: avoid them. Nodes on "
        "which the run cannot work as they are, are left in any case",
    )
    rollback: RollbackSpec = RollbackSpec()
    software: SoftwareMode = Field(
        "warn",
        description="When an attempt finds other software than the run began with (Python, "
        "packages, driver, NCCL, image, checkout): locked ends the run before it trains on; warn "
        "says so and trains on; any only records it",
    )
