"""Run processes beside the launches of an attempt: one copies metrics, one exports them.

They can harm nothing: each is a process of its own, with the least priority, that the kernel kills
first; it writes files that training does not. If one fails, the log and the ledger have one line
about it, and the attempt goes on. Belongs here: starting and ending them. Does not belong here:
what they write (`hpctrain.tracking`, `hpctrain.observe.attempt_exporter`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.records.ledger import EventKind
from hpctrain.records.tracking import tracking_commands
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.timeouts import run_with_timeout

# How long its last rows may hold the nodes of the job; Slurm may leave less.
_END_SECONDS = 20.0
_HURRIED_SECONDS = 5.0
_READ_SECONDS = 2.0


@dataclass(frozen=True)
class SideProgram:
    """A program beside training: its module, its log, and what a failure of it is recorded as.

    `remedy` completes the message about a failure.
    """

    name: str
    module: str
    options: tuple[str, ...]
    log: Path
    failed: EventKind
    remedy: str


def programs_beside(context: AttemptContext) -> Iterator[SideProgram]:
    """Name the programs that the spec and the profile ask for."""
    config, run = context.config, context.run_layout
    if config.tracking:  # copies metrics to TensorBoard and W&B
        yield SideProgram(
            name="tracking",
            module="hpctrain.tracking",
            options=("--follow",),
            log=run.tracking_log,
            failed=EventKind.TRACKING_FAILED,
            remedy=f"`hpctrain export {config.run_id}` writes what is missing",
        )
    if config.metrics is not None:  # exports metrics from the job
        yield SideProgram(
            name="metrics",
            module="hpctrain.observe.attempt_exporter",
            options=(),
            log=run.metrics_log,
            failed=EventKind.METRICS_FAILED,
            remedy="`hpctrain exporter` on a login node exports the same",
        )


class SideProcess:
    """The process of one program in one attempt."""

    def __init__(
        self, context: AttemptContext, environment: Mapping[str, str], program: SideProgram
    ) -> None:
        self._context, self._environment = context, dict(environment)
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None
        self._killed_after: float | None = None

    def start(self) -> None:
        """Start the process, once; a failure is reported and nothing else."""
        program, run = self._program, self._context.run_layout
        if self._process is not None:
            return
        words = (sys.executable, "-P", "-m", program.module, *program.options, "--run-directory")
        try:
            run.make_directory(program.log.parent)
            with program.log.open("wb") as log:
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
        self._watcher = threading.Thread(target=self._watch, daemon=True, name=program.name)
        self._watcher.start()

    def finish(self) -> None:
        """Have it write what is left, and wait for that no longer than a while."""
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

    def _watch(self) -> None:
        """Wait for its end, and report one that is a failure."""
        assert self._process is not None
        code = self._process.wait()
        if code != 0:
            reason = f"ended by signal {-code}" if code < 0 else _last_line(self._program.log)
            if self._killed_after is not None:
                reason = f"not ready {self._killed_after:.0f} s after the end"
            self._report(reason)

    def _report(self, reason: str) -> None:
        program = self._program
        words = f"{reason}; {program.remedy}"
        log_message(f"{program.name}: {words}")
        self._context.note(program.failed, reason=words)


class SideProcesses:
    """All processes beside training of one attempt."""

    def __init__(self, context: AttemptContext, environment: Mapping[str, str]) -> None:
        self._run = context.run_layout
        self._tracks = context.config.tracking
        self._processes = [
            SideProcess(context, environment, program) for program in programs_beside(context)
        ]

    def start(self) -> None:
        """Start those that the spec and the profile ask for, once."""
        for process in self._processes:
            process.start()

    def finish(self) -> None:
        """End them, and say in the log how curves are looked at."""
        for process in self._processes:
            process.finish()
        commands: list[str] = []
        if self._tracks:
            run_with_timeout(lambda: commands.extend(tracking_commands(self._run)), _READ_SECONDS)
        for command in commands:
            log_message(f"tracking: {command}")


def _last_line(log: Path) -> str:
    """Find what the process said last."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        text = log.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it failed"
