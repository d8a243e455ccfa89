"""Computes how long before the time limit Slurm sends its signal: the longest stop. Pure.

The trainer handles a stop between two steps, between two batches of an evaluation, after a
synchronous save, and immediately during a start or a pause. Then it writes the last checkpoint.
Belongs here: that sum and its sentence. Does not belong here: how the supervisor reacts.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.base.units import short_duration
from hpctrain.plan.forecast.rates import longest_save_seconds
from hpctrain.plan.job import TrainingJob

# slurmctld checks every 30 s (sbatch(1), --signal: up to 60 s early), a busy one later; then the
# ranks exit, the verdict is written and the job is requeued.
_SLURM_SECONDS = 60.0
# The least time to expect for whatever a stop waits for: a step, the batch of an evaluation (a
# forward pass, a third of a step: Kaplan et al. 2020, arXiv 2001.08361, section 2.1), the end of a
# start (20 s, `hpctrain.supervise.evidence.launch_watch`), a trace of a profiler (measured: 0.6 MB
# of compressed trace per second, so up to 36 MB).
_LEAST_RUNNING_SECONDS = 60.0
# A step takes longer than planned: up to 97 % for software that the planner has not seen
# (docs/planner.md, unseen software).
_STEP_FACTOR = 2.0
# One save may have just begun, and one more follows.
_SAVES = 2
# sbatch(1), --signal: sig_time must be between 0 and 65535.
_LONGEST_SECONDS = 65535


@dataclass(frozen=True)
class WarningLead:
    """`seconds` before the limit, and the parts of this sum.

    `cut`: the sum is more than half of the time limit, and a job must train before its warning.
    """

    seconds: int
    slurm_seconds: float
    running_seconds: float
    saving_seconds: float
    cut: bool

    @property
    def sentence(self) -> str:
        """Describe the sum in one sentence, for a comment of the script."""
        parts = (
            f"{self.slurm_seconds:.0f} s for Slurm, {self.running_seconds:.0f} s for the running "
            f"step (or batch of an evaluation), {self.saving_seconds:.0f} s for a save under way "
            "and the last one"
        )
        limited = "; cut to half of the limit" if self.cut else ""
        return f"USR1 comes {self.seconds} s before the time limit: {parts}{limited}"


def warning_lead(job: TrainingJob) -> WarningLead:
    """Compute the lead of the warning (sbatch(1), --signal) for an attempt of a run.

    It is at most half of the time limit, so that the job trains before it is warned.
    """
    plan = job.plan
    # on as few nodes as the run may continue with; 0 if the plan predicts no time
    least = min(job.spec.resources.min_nodes or plan.nodes.nodes, plan.nodes.nodes)
    saving_seconds = _SAVES * _save_seconds(job, least)
    longest_step_seconds = (plan.step_seconds or 0.0) * plan.nodes.nodes / least
    running_seconds = max(_LEAST_RUNNING_SECONDS, _STEP_FACTOR * longest_step_seconds)
    wanted = round((_SLURM_SECONDS + running_seconds + saving_seconds) / 10) * 10
    most = min(round(float(job.walltime) / 2), _LONGEST_SECONDS)
    return WarningLead(
        seconds=max(1, min(wanted, most)),
        slurm_seconds=_SLURM_SECONDS,
        running_seconds=running_seconds,
        saving_seconds=saving_seconds,
        cut=wanted > most,
    )


def short_grace(job: TrainingJob) -> str | None:
    """Describe a grace that ends before a step and a save do; None if it is long enough.

    Both as planned. None, too, where nothing is preempted or the plan predicts no time.
    """
    preemption, plan = job.partition.preemption, job.plan
    if preemption.mode == "off" or plan.step_seconds is None:
        return None
    saving_seconds = _save_seconds(job, plan.nodes.nodes)
    grace_seconds = float(preemption.grace)
    if grace_seconds >= plan.step_seconds + saving_seconds:
        return None
    grace = short_duration(grace_seconds) if grace_seconds else "no grace"
    return (
        f"partition {job.partition.name} gives preempted jobs {grace}, and a "
        f"step ({short_duration(plan.step_seconds)}) with a save "
        f"({short_duration(saving_seconds)}) takes longer: a preemption costs the work since the "
        "last checkpoint"
    )


def _save_seconds(job: TrainingJob, nodes: int) -> float:
    return longest_save_seconds(
        job.spec,
        job.profile,
        parameters=job.plan.learned,
        gpus=nodes * job.plan.nodes.gpus_per_node,
        nodes=nodes,
    )
