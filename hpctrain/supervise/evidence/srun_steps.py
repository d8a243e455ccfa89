"""The srun steps of this attempt, as far as Slurm can tell which they are.

Belongs here: finding, signalling and killing them; an answer that does not come leads to nothing.
Does not belong here: when (see `launch_watch`), and the srun process itself (see `srun_process`).
"""

from __future__ import annotations

import contextlib

from hpctrain.errors import SlurmError
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence.probe import STEP_NAME


class OwnSteps:
    """Numbered steps of the running attempt; asks Slurm anew each time."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context

    def ids(self) -> list[str]:
        """Ids of the live srun steps of this attempt (not `batch` and `extern`).

        Step ids start again at 0 when Slurm restarts the job (slurmctld/job_mgr.c,
        batch_requeue_fini), so a supervisor that outlived its attempt must not touch them.
        """
        slurm, attempt = self._context.slurm, self._context.attempt
        try:
            job = slurm.jobs([attempt.job_id]).get(attempt.job_id)
            if job is None or job.restart_count != attempt.restart_count:
                return []
            steps = slurm.steps(attempt.job_id)
        except SlurmError:
            return []
        return [
            step.step_id
            for step in steps
            # of a node that did not answer the probe, its step stays until Slurm gives it up
            if step.step_id.isdigit() and step.name != STEP_NAME
        ]

    def signal(self, name: str) -> None:
        """Send a signal such as `USR2` to all tasks."""
        for step_id in self.ids():
            with contextlib.suppress(SlurmError):
                self._context.slurm.signal_step(self._context.job_id, step_id, name)

    def kill(self) -> bool:
        """KILL all tasks; False if no step is left (or Slurm does not say)."""
        step_ids = self.ids()
        for step_id in step_ids:
            with contextlib.suppress(SlurmError):
                self._context.slurm.kill_step(self._context.job_id, step_id)
        return bool(step_ids)
