"""Run the site's commands for the job and its nodes (`commands.sh`), each part in bounded time.

The parts of nodes are short job steps of their own, as the checks of nodes are (`evidence.probe`).
They overlap with what is left of other steps, and start no container. Belongs here: starting,
waiting, and what is recorded. Does not belong here: parsing and judging what they print
(`judge.command_results`), the text of `commands.sh` (`hpctrain.job.render.shell_files`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.judge.command_results import (
    CommandFailure,
    CommandResults,
    job_verdict,
    node_verdict,
)
from hpctrain.judge.documents import Verdict
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import read_request
from hpctrain.slurm.process import without_options
from hpctrain.supervise.context import AttemptContext, log_message
from hpctrain.supervise.evidence.probe import COMMANDS_STEP_NAME
from hpctrain.supervise.time_limit import JobTimeLimit

_POLL_SECONDS = 0.2
# Beyond what the commands may take: to start a step on all nodes, and to kill a command.
_START_SECONDS, _SECONDS_PER_NODE = 60.0, 0.05
_ENDING_SECONDS = 5.0
# Near the time limit: what is left for the requeue, and less than this is not worth a step.
_RESERVED_SECONDS, _LEAST_SECONDS = 60.0, 10.0


class SiteCommands:
    """The commands of one attempt; without any its methods do nothing."""

    def __init__(self, context: AttemptContext, environment: Mapping[str, str]) -> None:
        self._context = context
        self._environment = dict(environment)
        self._ran_on: tuple[str, ...] = ()

    def run_for_job(self) -> Verdict | None:
        """Run the job's commands; return the verdict if one failed."""
        settings = self._context.config.commands
        if settings is None or not settings.job:
            return None
        seconds = settings.job * settings.limit_seconds + _START_SECONDS
        log_message("software.commands.job")
        argv = ["bash", str(self._context.run_layout.commands), "job"]
        failed = self._run(argv, self._environment, "job", seconds, self._is_asked_to_leave)
        return job_verdict(failed[0]) if failed else None

    def run_before(self, nodes: Sequence[str]) -> Verdict | None:
        """Run the commands of `nodes` before their ranks; return the verdict if one failed."""
        settings = self._context.config.commands
        if settings is None:
            return None
        self._ran_on = tuple(nodes)
        if not settings.node:
            return None
        seconds = settings.node * settings.limit_seconds + _start_seconds(nodes)
        return node_verdict(self._run_on(nodes, "node", seconds, self._is_asked_to_leave), nodes)

    def run_after(self, lost: Sequence[str], limit: JobTimeLimit | None) -> None:
        """Run what follows on the nodes of the last launch but `lost`; failures are warnings.

        Not while Slurm ends the job: then only the requeue counts, and no step would start.
        """
        settings, signals = self._context.config.commands, self._context.signals
        nodes, self._ran_on = [node for node in self._ran_on if node not in lost], ()
        if settings is None or not settings.node_after or not nodes:
            return
        seconds = settings.node_after * settings.limit_seconds + _start_seconds(nodes)
        if signals.standing:
            left = limit.left_seconds(clock.now()) if limit and limit.end_time else 0.0
            seconds = min(seconds, 0.0 if signals.final else left - _RESERVED_SECONDS)
            if seconds < _LEAST_SECONDS:
                return self._warn("are not run: Slurm ends the job")
        failed = self._run_on(nodes, "node_after", seconds, lambda: signals.final)
        if failed:
            self._warn(*(f"on {one.node}: {one}" for one in failed))

    def _warn(self, *texts: str) -> None:
        reason = f"software.commands.node_after {texts[0]}"
        self._context.note(EventKind.OBSERVED, reason=reason, evidence=texts[1:])
        for text in texts:
            log_message(f"software.commands.node_after {text}")

    def _run_on(
        self, nodes: Sequence[str], part: str, seconds: float, interrupted: Callable[[], bool]
    ) -> tuple[CommandFailure, ...]:
        """Run one part once on each node, in a step of the job; a step that hangs is killed."""
        log_message(f"software.commands.{part} on {len(nodes)} nodes")
        run = self._context.run_layout
        argv = [
            *("srun", f"--jobid={self._context.job_id}", f"--job-name={COMMANDS_STEP_NAME}"),
            *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
            *(f"--nodelist={','.join(nodes)}", "--overlap", "--kill-on-bad-exit=0", "--no-kill"),
            *("--mpi=none", "--input=none", "--export=ALL", "--cpu-bind=none", "--label"),
            *(f"--chdir={run.directory}", "bash", str(run.commands), part),
        ]
        # Without the options of the job's own srun; --jobid finds the allocation.
        return self._run(argv, without_options(self._environment), part, seconds, interrupted)

    def _kill_steps(self) -> None:
        """Kill what is left of these steps; scancel waits for hung nodes, too."""
        slurm, job_id = self._context.slurm, self._context.job_id
        with contextlib.suppress(SlurmError):
            for step in slurm.steps(job_id):
                if step.name == COMMANDS_STEP_NAME and step.step_id.isdigit():
                    slurm.kill_step(job_id, step.step_id)

    def _run(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        part: str,
        seconds: float,
        interrupted: Callable[[], bool],
    ) -> tuple[CommandFailure, ...]:
        """Run a command until it has ended or its time is over; list what has failed.

        What is `interrupted` has not failed.
        """
        try:
            process = subprocess.Popen(
                argv,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            log_message(f"{argv[0]} could not be run: {error.strerror}")
            return ()
        results = CommandResults()
        deadline, stopped = clock.monotonic() + seconds, False
        reader = threading.Thread(
            target=self._read, args=(process.stdout, part, results), daemon=True
        )
        reader.start()
        while process.poll() is None and clock.monotonic() < deadline and not stopped:
            clock.sleep(_POLL_SECONDS)
            stopped = interrupted()
        if process.poll() is None:
            threading.Thread(target=self._kill_steps, daemon=True).start()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_ENDING_SECONDS)
        reader.join(_ENDING_SECONDS)
        return results.failures(interrupted=stopped)

    def _read(self, lines: Iterable[str], part: str, results: CommandResults) -> None:
        """Collect the results, and keep what else is printed in a log of the attempt."""
        attempt = self._context.attempt
        directory = self._context.run_layout.attempt_logs(attempt.job_id, attempt.restart_count)
        log: TextIO | None = None
        for line in lines:
            text = results.add_line(line)
            with contextlib.suppress(OSError):
                if text is not None:
                    log = log or (directory / f"{part}-commands.log").open("a")
                    log.write(f"{text}\n")
                    log.flush()

    def _is_asked_to_leave(self) -> bool:
        """Whether the job is being ended, or a person wants it to: the launch then sees to it."""
        if self._context.signals.standing:
            return True
        with contextlib.suppress(OSError):
            return read_request(self._context.run_layout) is not None
        return False


def _start_seconds(nodes: Sequence[str]) -> float:
    return _START_SECONDS + _SECONDS_PER_NODE * len(nodes)
