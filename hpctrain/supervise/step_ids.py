"""Keep the step ids of this attempt apart from those of lost attempts of the same job.

Slurm numbers the steps of a job from 0 again when it restarts the job (slurmctld/job_mgr.c,
batch_requeue_fini). A batch node that froze and thaws after its job was restarted elsewhere brings
back an srun and slurmstepds of the lost attempt. They end their step by its id, and slurmctld
applies that to the step of the present attempt with the same id: its ranks are killed. (Observed on
22.05.8, whenever srun runs before the slurmstepd of the batch step kills it.) The supervisor cannot
prevent this, but it can use up the ids of the lost attempt with steps that end at once. slurmctld
then answers that there is no such step.

Belongs here: using up step ids. Does not belong here: signalling steps (`srun_steps`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

from hpctrain.base import clock
from hpctrain.records.ledger import EventKind
from hpctrain.slurm.process import for_queries
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.log_scan import newest_step
from hpctrain.supervise.evidence.probe import STEP_NAME
from hpctrain.supervise.timeouts import run_with_timeout

_LISTING_SECONDS = 5.0
_SECONDS_EACH, _SECONDS = 20.0, 60.0
_COMMAND = ("/bin/sh", "-c", "echo $SLURM_STEP_ID")


def use_up_step_ids(
    context: AttemptContext, environment: Mapping[str, str], srun: Sequence[str] = ("srun",)
) -> None:
    """Run empty steps until no id is left that an srun of a lost attempt could end.

    An attempt without lost predecessors in the same job, which is nearly every one, runs none.
    Gives up after a minute, or when Slurm does not start a step: then a node that thaws can cost
    one launch. Tests replace `srun`.
    """
    job_id = context.job_id
    logs = [
        context.run_layout.attempt_logs(job_id, event.restart_count or 0)
        for event in context.ledger.events()
        if event.event is EventKind.ATTEMPT_LOST and event.job_id == job_id
    ]
    found: list[int] = []
    run_with_timeout(lambda: found.extend(map(newest_step, logs)), _LISTING_SECONDS)
    newest = max(found, default=-1)
    # Steps of ranks leave logs; one more for the probe of nodes that may have followed.
    last = newest + 1 if newest >= 0 else -1
    deadline = clock.monotonic() + _SECONDS
    while last >= 0 and not context.signals.final:
        used = _empty_step(context, environment, srun) if clock.monotonic() < deadline else None
        if used is None:
            log_message(f"step ids up to {last} of lost attempts could not be used up")
            return
        if used >= last:
            return


def _empty_step(
    context: AttemptContext, environment: Mapping[str, str], srun: Sequence[str]
) -> int | None:
    """Run an empty step beside all others; return its id, None if it did not run."""
    argv = [
        *srun,
        *(f"--jobid={context.job_id}", f"--job-name={STEP_NAME}", "--overlap"),
        *("--nodes=1", "--ntasks=1", f"--nodelist={context.attempt.node}"),
        *("--mpi=none", "--input=none", "--export=ALL", "--chdir=/", "--cpu-bind=none"),
        *_COMMAND,
    ]
    try:
        done = subprocess.run(
            argv,
            env=for_queries(environment or os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS_EACH,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    text = done.stdout.strip()
    return int(text) if text.isdecimal() else None
