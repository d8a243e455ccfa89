"""Probe all nodes of the job, long before Slurm would notice that one is dead.

Slurm reports a dead node as responding for SlurmdTimeout (300 s by default), so our own `srun`
runs `preflight` on every node. Observed on Slurm 22.05.8: for a crashed node, srun reports after
about MessageTimeout that the launch failed and kills the tasks of the others. For a hung node it
waits for ever. With fewer nodes in the job than requested it does not start. So the probe does not
wait for a node that takes much longer than the others, and probes missing nodes once more, alone.
The step of a dead node stays in squeue; its name, `hpctrain-probe`, keeps others from waiting.

Belongs here: running the probe and waiting. Does not belong here: parsing answers
(`judge.probe_results`), checking a node (`preflight`), what follows from a lost node (`policy`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError
from hpctrain.judge.preflight_format import SHUTDOWN
from hpctrain.judge.probe_results import NodeResults, ProbeResult
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.process import for_queries

STEP_NAME, COMMANDS_STEP_NAME = "hpctrain-probe", "hpctrain-commands"
_POLL_SECONDS = 0.05
# Python starts on all nodes at once, usually from a shared file system.
_FIRST_SECONDS, _SECONDS_PER_NODE = 20.0, 0.05
# MessageTimeout (10 s by default) passes before srun says that it cannot reach a node.
_ALONE_SECONDS = 15.0
_ALONE_AT_ONCE = 16
# Once half of the nodes have answered, how much longer than the last of them the others may take.
_LATER_FACTOR, _LATER_SECONDS = 3.0, 3.0
_ENDING_SECONDS = 1.0
_READING_SECONDS = 0.5


@dataclass(frozen=True)
class PreflightOptions:
    """Options of `preflight` on each node. `since` is seconds since the epoch.

    `settings` is the run's `supervise.json`, which lists its `inputs`; None: do not check inputs.
    """

    run_directory: Path
    since: float = 0.0
    gpus: int = 0
    settings: Path | None = None
    python: str = sys.executable

    @property
    def argv(self) -> tuple[str, ...]:
        return (
            *(self.python, "-m", "hpctrain.supervise.preflight"),
            f"--run-directory={self.run_directory}",
            f"--since={self.since:.3f}",
            f"--gpus={self.gpus}",
            *((f"--settings={self.settings}",) if self.settings is not None else ()),
        )


def probe_nodes(
    slurm: SlurmClient,
    job_id: int,
    nodes: Sequence[str],
    options: PreflightOptions,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    deadline_seconds: float | None = None,
    srun: Sequence[str] = ("srun",),
    environment: Mapping[str, str] | None = None,
) -> ProbeResult:
    """Probe `nodes` of our own job; never raises, takes at most about twice the deadline.

    `interrupted` ends the waiting early (Slurm ends the job); nodes that have not answered by then
    are unknown. `deadline_seconds` is for all nodes together, by default 20 s plus 0.05 s per node.
    Tests replace `srun` and `environment`.
    """
    started = clock.monotonic()
    try:
        states = _query_states(slurm, job_id, nodes, options.since)
    except SlurmError as error:
        return ProbeResult(tuple(nodes), trouble=str(error))
    probe = _Probe(job_id, options, srun, environment or os.environ, interrupted)
    limit = deadline_seconds or _FIRST_SECONDS + _SECONDS_PER_NODE * len(nodes)
    asked = [node for node in nodes if node not in states.gone]
    probe.run_together(asked, limit)
    # Nodes that have not answered, unless they do not answer Slurm either, and nodes that failed a
    # check which may have been slow rather than broken.
    again = {node for node in asked if node not in {*probe.answers.begun, *states.silent}}
    for answer in ProbeResult(tuple(asked), probe.answers.compared()).broken:
        if any(problem.blocks and not problem.hard for problem in answer.problems):
            again.add(answer.node)
    probe.run_alone([node for node in asked if node in again], limit)

    def kill(step_id: str) -> None:
        with contextlib.suppress(SlurmError):
            slurm.kill_step(job_id, step_id)

    # Kill the checks that did not end, in the background: scancel waits for hung nodes, too.
    unfinished = [node for node in probe.answers.found.values() if not node.ended]
    for step_id in {node.step_id for node in unfinished if node.step_id.isdigit()}:
        threading.Thread(target=kill, args=(step_id,), daemon=True).start()
    if len(probe.answers.compared()) < len(asked):
        # Slurm may have found out meanwhile that a node is down or has booted.
        with contextlib.suppress(SlurmError):
            states = _query_states(slurm, job_id, nodes, options.since)
    return _result(nodes, states, probe, clock.monotonic() - started)


# -- states of nodes ---------------------------------------------------------------


@dataclass(frozen=True)
class _NodeStates:
    """Slurm's states of the nodes.

    `gone`: nodes that cannot be probed, with the reason. `silent`: do not answer Slurm. `drained`:
    are taken out of service after the job. `leaving`: are being rebooted or powered down.
    """

    gone: Mapping[str, str]
    silent: frozenset[str]
    drained: tuple[str, ...]
    leaving: frozenset[str]


def _query_states(
    slurm: SlurmClient, job_id: int, nodes: Sequence[str], since: float
) -> _NodeStates:
    """Query Slurm. Raises SlurmError: no step starts without the controller."""
    job = slurm.jobs([job_id]).get(job_id)
    held = set(slurm.hostnames(job.node_list)) if job and job.node_list else set(nodes)
    states = slurm.node_states(nodes)
    gone = {node: "no longer part of the job" for node in nodes if node not in held}
    if since:
        booted = slurm.boot_times(nodes)
        gone |= {node: "it has been rebooted" for node, at in booted.items() if at > since}
    for node, one in states.items():
        if one.is_down:
            gone[node] = f"Slurm reports it as {one.state}"
    silent = frozenset(node for node, one in states.items() if not one.responding)
    drained = tuple(node for node in nodes if node in states and states[node].is_drained)
    leaving = frozenset(node for node, one in states.items() if one.leaving)
    return _NodeStates(gone, silent, drained, leaving)


def _result(
    nodes: Sequence[str], states: _NodeStates, probe: _Probe, seconds: float
) -> ProbeResult:
    answers = probe.answers.compared()
    answered = {one.node for one in answers}
    missing = [node for node in nodes if node not in answered]
    reasons = {node: f"no answer within {seconds:.0f} s" for node in missing} | dict(states.gone)
    trouble = ""
    # The supervisor runs on a node of the job. If no node answers, the probe itself has failed.
    if not answered or probe.interrupted():
        trouble = " / ".join(probe.stderr_lines) or "no node has answered"
        missing = [node for node in missing if node in states.gone]
        if len(missing) == len(nodes):  # a controller that has just started reports all as down
            missing = []
    shutting_down = {
        one.node for one in answers if any(problem.check == SHUTDOWN for problem in one.problems)
    }
    return ProbeResult(
        probed=tuple(nodes),
        results=answers,
        lost=tuple(missing),
        why_lost=tuple(reasons[node] for node in missing),
        drained=states.drained,
        leaving=tuple(node for node in nodes if node in states.leaving | shutting_down),
        trouble=trouble,
        seconds=seconds,
    )


# -- running the probe -----------------------------------------------------------------------


class _Probe:
    """The `srun` processes of one probe and the answers they have received."""

    def __init__(
        self,
        job_id: int,
        options: PreflightOptions,
        srun: Sequence[str],
        environment: Mapping[str, str],
        interrupted: Callable[[], bool],
    ) -> None:
        self.job_id = job_id
        self.options = options
        self.srun = srun
        # Without the options of the job's own srun; --jobid finds the allocation.
        self.environment = for_queries(environment)
        self.interrupted = interrupted
        self.answers = NodeResults()
        self.stderr_lines: deque[str] = deque(maxlen=5)

    def run_together(self, nodes: Sequence[str], limit_seconds: float) -> None:
        """Probe all nodes with one srun."""
        if nodes:
            deadline = clock.monotonic() + limit_seconds
            self._wait([self._start(nodes)], nodes, deadline, _Stragglers(nodes))

    def run_alone(self, nodes: Sequence[str], limit_seconds: float) -> None:
        """Probe each node with its own srun, so that a dead node does not affect the others.

        A new answer replaces an earlier one; without a new one the earlier one stays.
        """
        found = self.answers.found
        earlier = {node: found.pop(node) for node in nodes if node in found}
        deadline = clock.monotonic() + limit_seconds
        for first in range(0, len(nodes), _ALONE_AT_ONCE):
            if clock.monotonic() >= deadline or self.interrupted():
                break
            batch = nodes[first : first + _ALONE_AT_ONCE]
            processes = [self._start([node]) for node in batch]
            self._wait(processes, batch, min(deadline, clock.monotonic() + _ALONE_SECONDS))
        self.answers.found = {**earlier, **found}

    def _start(self, nodes: Sequence[str]) -> _ProbeProcess | None:
        argv = [
            *self.srun,
            *(f"--jobid={self.job_id}", f"--job-name={STEP_NAME}", "--overlap"),
            *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
            *(f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=0", "--no-kill"),
            # A dead mount as working directory would hang slurmstepd before the first answer.
            *("--mpi=none", "--input=none", "--export=ALL", "--chdir=/", "--cpu-bind=none"),
            *self.options.argv,
        ]
        try:
            return _ProbeProcess(argv, self.environment, self.answers, self.stderr_lines)
        except OSError as error:
            self.stderr_lines.append(f"srun could not be run: {error.strerror}")
            return None

    def _wait(
        self,
        processes: Sequence[_ProbeProcess | None],
        nodes: Sequence[str],
        deadline: float,
        stragglers: _Stragglers | None = None,
    ) -> None:
        """Wait until all nodes have finished, no srun is left, or the time is up."""
        running = [process for process in processes if process is not None]
        while clock.monotonic() < deadline and not self.interrupted():
            ended = self.answers.ended
            if set(nodes) <= ended or not any(process.is_running for process in running):
                break
            if stragglers is not None and stragglers.are_overdue(ended):
                break
            clock.sleep(_POLL_SECONDS)
        for process in running:
            process.terminate()
        last = clock.monotonic() + _ENDING_SECONDS
        for process in running:
            process.end(last)


class _Stragglers:
    """Detects that the remaining of `nodes` take much longer than the others took."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = frozenset(nodes)
        self._started = self._last = clock.monotonic()
        self._ended = 0

    def are_overdue(self, ended: frozenset[str]) -> bool:
        """True once half have ended, and the last of them long ago for how long it took."""
        now, count = clock.monotonic(), len(ended & self._nodes)
        if count != self._ended:
            self._ended, self._last = count, now
        patience = _LATER_FACTOR * (self._last - self._started) + _LATER_SECONDS
        return 2 * count >= len(self._nodes) and now - self._started > patience


class _ProbeProcess:
    """One running `srun`; threads read its lines as they come."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        answers: NodeResults,
        stderr_lines: deque[str],
    ) -> None:
        self.process = process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

        def read_answers() -> None:
            for line in process.stdout or ():
                answers.add_line(line, clock.now())

        def read_errors() -> None:
            for line in process.stderr or ():
                stderr_lines.append(line.strip()[:200])

        self._readers = [
            threading.Thread(target=read, daemon=True) for read in (read_answers, read_errors)
        ]
        for reader in self._readers:
            reader.start()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def terminate(self) -> None:
        """Send TERM, on which srun ends its step on the nodes that it can reach."""
        if self.is_running:
            self.process.terminate()

    def end(self, deadline: float) -> None:
        """Wait until `deadline`, then kill srun, which would wait for a hung node for ever."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - clock.monotonic()))
        if self.is_running:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(_READING_SECONDS)
