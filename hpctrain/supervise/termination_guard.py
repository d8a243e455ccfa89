"""What is left to do when the file system holds the supervisor up while its job is being ended.

The supervisor works in a thread of its own; the main thread only receives signals and keeps this
guard. Once the job has been told that it will end, the guard looks whether the run directory still
answers. If it does not, neither the trainer can save nor the supervisor read or write a word: all
that can be done is to put the job back into the queue while Slurm still takes it, so that the run
goes on from its newest checkpoint. Nothing of it can be in the ledger; the next attempt finds this
one unfinished and says so. Belongs here: noticing, and that one step. Does not belong here: a file
system that hangs while nobody ends the job, which is waited for (see `launch_watch`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hpctrain.slurm.states import JobState
from hpctrain.supervise.act.requeue import requeue
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.evidence.job_facts import job_facts
from hpctrain.supervise.evidence.run_dir_snapshot import in_time

_LOOK_SECONDS = 0.2
# A warning comes minutes ahead of the end, so a file system may still come back; after TERM there
# are only seconds (slurm.conf(5), KillWait: 30).
_AFTER_WARNING_SECONDS = 60.0
_AFTER_TERM_SECONDS = 10.0
_SPEAKING_SECONDS = 2.0


class Pulse:
    """Whether a file can be opened, asked in a thread that may never come back."""

    def __init__(self, path: Path, touch: Callable[[Path], None] | None = None) -> None:
        self._path = path
        self._touch = touch or _open_once
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0

    def silent_seconds(self) -> float:
        """For how long the file system has not answered; 0 when the last question was answered."""
        if self._thread is not None and self._thread.is_alive():
            return time.monotonic() - self._asked_at
        self._asked_at = time.monotonic()
        self._thread = threading.Thread(target=self._ask, daemon=True, name="pulse")
        self._thread.start()
        return 0.0

    def _ask(self) -> None:
        try:
            self._touch(self._path)
        except OSError:
            return  # an error is an answer


def _open_once(path: Path) -> None:
    """open(2) asks the server even where attributes are cached (nfs(5), close-to-open)."""
    os.close(os.open(path, os.O_RDONLY))


class Guard:
    """Watches over the supervisor's own thread."""

    def __init__(self, context: AttemptContext, pulse: Pulse | None = None) -> None:
        self._context = context
        self._pulse = pulse or Pulse(context.run_layout.ledger)
        self._acted = False

    def wait_for(self, worker: threading.Thread) -> None:
        """Until the supervisor's thread has ended."""
        while worker.is_alive():
            worker.join(_LOOK_SECONDS)
            if self._context.signals.names and not self._acted and worker.is_alive():
                self._look()

    def _look(self) -> None:
        final = self._context.signals.final
        patience = _AFTER_TERM_SECONDS if final else _AFTER_WARNING_SECONDS
        if self._pulse.silent_seconds() >= patience:
            self._acted = True
            self._go_back()

    def _go_back(self) -> None:
        """Only a job that still runs: one that a person has cancelled must not come back."""
        context = self._context
        if context.config.continuation != "requeue":
            return  # its successor is in the queue already
        facts = job_facts(context, patient=False)
        if facts is None or facts.state is not JobState.RUNNING:
            return
        words = "the run directory does not answer and the job is being ended: back into the queue"
        in_time(lambda: say(words), _SPEAKING_SECONDS)
        requeue(context.slurm, context.job_id)
