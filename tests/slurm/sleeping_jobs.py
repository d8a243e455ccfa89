"""Jobs without a trainer on a sandbox: what Slurm itself does with them.

Belongs here: submitting, waiting, and taking nodes away. Does not belong here: runs (`rehearsal`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rehearsal import PATIENCE_SECONDS

from hpctrain.base.errors import SlurmUnreachableError
from hpctrain.slurm import JobRecord, SlurmClient

SLEEP = "#!/bin/sh\nexec sleep 3600\n"
QUIET = ("--output=/dev/null",)


def eventually(look: Callable[[], bool], timeout_seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether `look` becomes true in time."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(SlurmUnreachableError):  # held up: ask again
            if look():
                return True
        time.sleep(0.1)
    return False


def job_of(slurm: SlurmClient, job_id: int) -> JobRecord:
    return slurm.jobs([job_id])[job_id]


def running(slurm: SlurmClient, script: str = SLEEP, *options: str) -> int:
    job_id = slurm.submit(script, (*QUIET, *options)).job_id
    assert eventually(lambda: job_of(slurm, job_id).state.is_running)
    return job_id


def ended(slurm: SlurmClient, job_id: int) -> bool:
    return job_of(slurm, job_id).state.is_ended


def take_all_nodes(slurm: SlurmClient) -> int:
    """An urgent job that preempts whatever runs, and is over as soon as it has begun."""
    options = ("--partition=urgent", "--nodes=4", "--exclusive", "--no-requeue")
    return slurm.submit("#!/bin/sh\n", (*QUIET, *options)).job_id
