"""Requeue the job when the file system blocks the supervisor while Slurm is ending the job.

The supervisor works in a thread of its own; the main thread only receives signals and runs this
guard. Once a signal has announced the end of the job, the guard checks whether the run directory
still answers. If it does not, the trainer cannot save and the supervisor cannot read or write. What
remains is to requeue the job while Slurm still accepts it, so that the run resumes from its newest
checkpoint. The ledger cannot record this; the next attempt finds this one unfinished and records
it. Belongs here: the check and that one step. Does not belong here: a file system that hangs while
nobody ends the job, which is waited for (see `evidence.launch_watch`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from hpctrain.base import clock
from hpctrain.slurm.states import JobState
from hpctrain.supervise.act.requeue import requeue
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.job_facts import job_facts
from hpctrain.supervise.timeouts import run_with_timeout

_CHECK_SECONDS = 0.2
# A warning comes minutes ahead of the end, so a file system may still come back; after TERM there
# are only seconds (slurm.conf(5), KillWait: 30).
_AFTER_WARNING_SECONDS = 60.0
_AFTER_TERM_SECONDS = 10.0
_LOG_SECONDS = 2.0
_LAST_CHANCE_SECONDS = 0.5
_MESSAGE = "the run directory does not answer while the job is being ended: requeueing"


class FileSystemCheck:
    """Opens a file in a thread that may never return, to see whether the file system answers."""

    def __init__(self, path: Path, touch: Callable[[Path], None] | None = None) -> None:
        self._path = path
        # open(2) asks the server even for cached attributes (nfs(5)).
        self._touch = touch or (lambda path: path.open("rb", buffering=0).close())
        self._thread: threading.Thread | None = None
        self._began_at = 0.0

    def silent_seconds(self) -> float:
        """For how long the file system has not answered; 0 when the last check has ended."""
        if self._thread is not None:
            # on a machine that was suspended the check may not have run since it began
            self._thread.join(_LAST_CHANCE_SECONDS)
            if self._thread.is_alive():
                return clock.monotonic() - self._began_at

        def check() -> None:
            with contextlib.suppress(OSError):  # an error is an answer
                self._touch(self._path)

        self._began_at = clock.monotonic()
        self._thread = threading.Thread(target=check, daemon=True, name="file-system-check")
        self._thread.start()
        return 0.0


class Guard:
    """Watches the supervisor's own thread."""

    def __init__(self, context: AttemptContext, check: FileSystemCheck | None = None) -> None:
        self._context = context
        self._check = check or FileSystemCheck(context.run_layout.ledger)
        self._acted = False

    def wait_for(self, worker: threading.Thread) -> None:
        """Return when the supervisor's thread has ended."""
        context, signals = self._context, self._context.signals
        while worker.is_alive():
            worker.join(_CHECK_SECONDS)
            if not signals.names or self._acted or not worker.is_alive():
                continue
            patience = _AFTER_TERM_SECONDS if signals.final else _AFTER_WARNING_SECONDS
            if self._check.silent_seconds() >= patience:
                self._acted = True
                if context.config.continuation != "requeue":
                    continue  # its successor is in the queue already
                facts = job_facts(context, patient=False)
                if facts is None or facts.state is not JobState.RUNNING:
                    continue  # a job that a person has cancelled must not come back
                run_with_timeout(lambda: log_message(_MESSAGE), _LOG_SECONDS)
                requeue(context.slurm, context.job_id)
