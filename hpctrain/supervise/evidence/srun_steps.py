"""List, signal and kill the srun steps of this attempt. If Slurm does not answer, do nothing.

Does not belong here: when to (`launch_watch`), the srun process itself (`srun_process`).
"""

from __future__ import annotations

import contextlib

from hpctrain.base.errors import SlurmError
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.evidence.probe import STEP_NAME


class OwnSteps:
    """The numbered steps of the running attempt; queries Slurm on each call."""

    def __init__(self, context: AttemptContext) -> None:
        self._context = context

    def ids(self) -> list[str]:
        """List the live srun steps of this attempt (not `batch` and `extern`).

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
            # The probe's step on a node that did not answer stays until Slurm gives the node up.
            if step.step_id.isdigit() and step.name != STEP_NAME
        ]

    def signal(self, name: str) -> None:
        """Send a signal such as `USR2` to all tasks."""
        for step_id in self.ids():
            with contextlib.suppress(SlurmError):
                self._context.slurm.signal_step(self._context.job_id, step_id, name)

    def kill(self) -> bool:
        """Kill all tasks; False if no step is left, or Slurm does not answer."""
        step_ids = self.ids()
        for step_id in step_ids:
            with contextlib.suppress(SlurmError):
                self._context.slurm.kill_step(self._context.job_id, step_id)
        return bool(step_ids)
