"""Wait for the file of the supervisor's settings, or end the job without it.

Does not belong here: the document and its reader (`hpctrain.records.supervise_config`).
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from pathlib import Path

from hpctrain.base.errors import SlurmError, StorageError
from hpctrain.judge.causes import Cause
from hpctrain.judge.policy import RETRIES, STOPPED_EXIT_CODE
from hpctrain.records.supervise_config import read_supervise_config
from hpctrain.slurm.client import SlurmClient
from hpctrain.supervise.attempt import attempt_from
from hpctrain.supervise.context import log_message

# As often and as long as the policy tries again after a fault of storage.
_TRIES = RETRIES[Cause.STORAGE] + 1
_PAUSE_SECONDS = 30.0


def wait_for_settings(path: Path, signals: Collection[signal.Signals]) -> bool:
    """Wait until the file can be read, as at submit time; False if that takes too long.

    `signals` are blocked. A signal that arrives ends the waiting: the job may be about to end.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            read_supervise_config(path)
        except StorageError as error:
            log_message(f"storage: {error}; {tries_left} more tries, {_PAUSE_SECONDS:.0f} s apart")
            if signal.sigtimedwait(signals, _PAUSE_SECONDS if tries_left else 0) is not None:
                return False
        else:
            return True
    return False


def end_without_settings(environment: Mapping[str, str], slurm: SlurmClient) -> int:
    """End a job that cannot read its settings; return its exit code.

    Other nodes may reach the run directory. Slurm takes a requeue only of a job that was submitted
    with one (sbatch(1), --requeue), and its own count of starts is the budget. A job that Slurm
    does not list as running is left alone: it may be cancelled.
    """
    attempt = attempt_from(environment)
    if attempt.restart_count >= RETRIES[Cause.STORAGE]:
        log_message(
            f"stop: started {attempt.restart_count + 1} times without reaching the run directory"
        )
        return STOPPED_EXIT_CODE
    try:
        job = slurm.jobs([attempt.job_id]).get(attempt.job_id)
    except SlurmError:
        job = None
    if job is None or not job.state.is_running:
        log_message("stop: the run directory is away, and Slurm does not list the job as running")
        return STOPPED_EXIT_CODE
    answer = slurm.requeue(attempt.job_id)
    log_message(f"requeue: {answer.result.value}: other nodes may reach the run directory")
    return 0 if answer.will_run_again else STOPPED_EXIT_CODE
