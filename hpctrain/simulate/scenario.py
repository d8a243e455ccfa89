"""The inputs of a simulation: a run, its cluster, failure rates and costs. Frozen documents.

Belongs here: fields, units, and quantities derived from them. Does not belong here: the source of
the numbers (`hpctrain.job.simulation`), random numbers.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from hpctrain.records.supervise_config import SuperviseConfig
from hpctrain.simulate.failure_mixes import MIXES, FailureMix
from hpctrain.spec.document import Document

MixName = Literal["llama3", "byterobust", "nodes", "crashes"]


class Scenario(Document):
    """One run to be simulated. Durations in seconds; `nodes` train, `spare_nodes` are idle.

    An interruption costs detection (`detect_seconds`, or `stall_seconds` for a silent one), then
    `relaunch_seconds` in place or a wait in the queue, then `restart_seconds` for start-up and
    loading. `requeue_delay_seconds` is Slurm's own delay (cred_expire + 1 s = 121 s),
    `queue_wait_seconds` the mean of an exponential wait after it. `walltime_seconds` ends
    attempts; before that, and with `warned` before a preemption, there is time for a last save.
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
