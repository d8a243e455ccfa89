"""Run the process that copies metrics to TensorBoard and W&B beside the launches of an attempt.

It can harm nothing: it is a process of its own, with the least priority, that the kernel kills
first; it reads and writes files that training does not. If it fails, the log and the ledger have
one line about it, and the attempt goes on. Belongs here: starting and ending the process. Does not
belong here: what it writes (`hpctrain.tracking`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping

from hpctrain.store.ledger import EventKind
from hpctrain.store.tracking import tracking_commands
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.timeouts import run_with_timeout

# How long its last rows may hold the nodes of the job; Slurm may leave less.
_END_SECONDS = 20.0
_HURRIED_SECONDS = 5.0
_READ_SECONDS = 2.0


class TrackingProcess:
    """The process of one attempt, if the spec asks for tracking."""

    def __init__(self, context: AttemptContext, environment: Mapping[str, str]) -> None:
        self._context, self._environment = context, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._killed_after: float | None = None

    def start(self) -> None:
        """Start the process, once; a failure is reported and nothing else."""
        context = self._context
        if not context.config.tracking or self._process is not None:
            return
        run = context.run_layout
        words = (sys.executable, "-P", "-m", "hpctrain.tracking", "--follow", "--run-directory")
        try:
            run.make_directory(run.tracking)
            with run.tracking_log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*words, str(run.directory)],
                    env={**self._environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            self._report(f"it cannot be started: {error}")
            return
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="tracking")
        self._watcher.start()

    def finish(self) -> None:
        """Have it write the last rows, and wait for that no longer than a while."""
        process, watcher = self._process, self._watcher
        if process is None or watcher is None:
            return
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        seconds = _HURRIED_SECONDS if self._context.signals.final else _END_SECONDS
        watcher.join(seconds)
        if watcher.is_alive():
            self._killed_after = seconds
            with contextlib.suppress(OSError):  # with what it has started
                os.killpg(process.pid, signal.SIGKILL)
            watcher.join(_READ_SECONDS)
        commands: list[str] = []
        run_with_timeout(
            lambda: commands.extend(tracking_commands(self._context.run_layout)), _READ_SECONDS
        )
        for command in commands:
            log_message(f"tracking: {command}")

    def _watch(self) -> None:
        """Wait for its end, and report one that is a failure."""
        assert self._process is not None
        code = self._process.wait()
        if code != 0:
            reason = f"ended by signal {-code}" if code < 0 else self._last_line()
            if self._killed_after is not None:
                reason = f"not ready {self._killed_after:.0f} s after the end"
            self._report(reason)

    def _report(self, reason: str) -> None:
        words = f"{reason}; `hpctrain export {self._context.config.run_id}` writes what is missing"
        log_message(f"tracking: {words}")
        self._context.note(EventKind.TRACKING_FAILED, reason=words)

    def _last_line(self) -> str:
        """What the process said last."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            text = self._context.run_layout.tracking_log.read_text(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else "it failed"
