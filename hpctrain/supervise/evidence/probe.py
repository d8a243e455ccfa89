"""Asking all nodes of the job whether they live and are fit, long before Slurm would notice.

Slurm calls a dead node responding for SlurmdTimeout (300 s by default), so the nodes are asked by
an `srun` of their own (`preflight` on each). Seen on 22.05.8: of a crashed node srun says after
about MessageTimeout that the launch failed and kills the others' tasks; for a hung node it waits
for ever; with fewer nodes in the job than asked for it does not start at all. So the others have
to answer quickly, nobody waits for a node that takes much longer than the others, and whoever did
not answer is asked once more alone. The step of a dead node stays in squeue; it is named
`hpctrain-probe`, so that nobody waits for its end.

Belongs here: asking and waiting. Does not belong here: reading answers (`probe_answers`), looking
at a node (`preflight`), and what is done about a lost one (`policy`).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SlurmError
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.environment import for_queries
from hpctrain.supervise.judge.preflight_format import SHUTDOWN
from hpctrain.supervise.judge.probe_answers import Answers, NodeAnswer, ProbeResult

STEP_NAME = "hpctrain-probe"
_POLL_SECONDS = 0.05
# A Python starts on all nodes at once, as a rule from a shared file system.
_FIRST_SECONDS, _SECONDS_PER_NODE = 20.0, 0.05
# MessageTimeout (10 s by default) passes before srun says that it cannot reach a node.
_ALONE_SECONDS = 15.0
_ALONE_AT_ONCE = 16
# Once half of the nodes have answered, how much longer than the last of them the others may take.
_LATER_FACTOR, _LATER_SECONDS = 3.0, 3.0
_ENDING_SECONDS = 1.0
_READING_SECONDS = 0.5


@dataclass(frozen=True)
class Question:
    """What each node is asked: see `preflight`. `since` is seconds since the epoch.

    `settings` is the run's `supervise.json`, which lists its `inputs`; None: do not look for them.
    """

    run_directory: Path
    since: float = 0.0
    gpus: int = 0
    settings: Path | None = None
    python: str = sys.executable

    @property
    def words(self) -> tuple[str, ...]:
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
    question: Question,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    deadline_seconds: float | None = None,
    srun: Sequence[str] = ("srun",),
    environment: Mapping[str, str] | None = None,
) -> ProbeResult:
    """Ask `nodes` of our own job; never raises, never waits longer than about twice the deadline.

    `interrupted` ends the waiting early (the job is being ended): what has not answered until
    then is unknown. `deadline_seconds` is for all nodes together, by default 20 s and a twentieth
    of a second for each node. `srun` and `environment` are the seam for tests.
    """
    started = time.monotonic()
    try:
        look = _look(slurm, job_id, nodes, question.since)
    except SlurmError as error:
        return ProbeResult(tuple(nodes), trouble=str(error))
    probe = _Probe(job_id, question, srun, environment or os.environ, interrupted)
    limit = deadline_seconds or _FIRST_SECONDS + _SECONDS_PER_NODE * len(nodes)
    asked = [node for node in nodes if node not in look.gone]
    probe.ask_together(asked, limit)
    again = {*_missing(asked, look, probe.answers), *_condemned(asked, probe.answers)}
    probe.ask_alone([node for node in asked if node in again], limit)
    _end_steps(slurm, job_id, probe.answers)
    if len(probe.answers.compared()) < len(asked):
        # Slurm may have learned meanwhile that a node is down or has booted.
        with contextlib.suppress(SlurmError):
            look = _look(slurm, job_id, nodes, question.since)
    return _result(nodes, look, probe, time.monotonic() - started)


def _missing(asked: Sequence[str], look: _Look, answers: Answers) -> list[str]:
    """Who has not answered, unless Slurm gets no answer either."""
    return [node for node in asked if node not in answers.begun and node not in look.silent]


def _condemned(asked: Sequence[str], answers: Answers) -> list[str]:
    """Whom a check would put out of use that may have been slow and not broken."""
    told = ProbeResult(tuple(asked), answers.compared())
    return [
        one.node
        for one in told.broken
        if any(problem.blocks and not problem.hard for problem in one.problems)
    ]


# -- the controller's opinion ----------------------------------------------------------------


@dataclass(frozen=True)
class _Look:
    """Nodes that cannot be asked and why, those silent to Slurm, those on their way out, and those
    that Slurm has rebooted or powered down."""

    gone: Mapping[str, str]
    silent: frozenset[str]
    drained: tuple[str, ...]
    leaving: frozenset[str]


def _look(slurm: SlurmClient, job_id: int, nodes: Sequence[str], since: float) -> _Look:
    """Raises SlurmError: without the controller no step starts, so nothing can be found out."""
    job = slurm.jobs([job_id]).get(job_id)
    held = set(slurm.hostnames(job.node_list)) if job and job.node_list else set(nodes)
    states = slurm.node_states(nodes)
    gone = {node: "no longer part of the job" for node in nodes if node not in held}
    if since:
        booted = slurm.boot_times(nodes)
        gone |= {node: "it has been rebooted" for node, at in booted.items() if at > since}
    for node, one in states.items():
        if one.is_down:
            gone[node] = f"Slurm says that it is {one.state}"
    silent = frozenset(node for node, one in states.items() if not one.responding)
    drained = tuple(node for node in nodes if node in states and states[node].is_drained)
    leaving = frozenset(node for node, one in states.items() if one.leaving)
    return _Look(gone, silent, drained, leaving)


def _result(nodes: Sequence[str], look: _Look, probe: _Probe, seconds: float) -> ProbeResult:
    answers = probe.answers.compared()
    answered = {one.node for one in answers}
    missing = [node for node in nodes if node not in answered]
    reasons = {node: f"no answer within {seconds:.0f} s" for node in missing} | dict(look.gone)
    trouble = ""
    # We run on a node of the job ourselves: where nobody answers, it is the asking that failed.
    if not answered or probe.interrupted():
        trouble = probe.last_words() or "no node has answered"
        missing = [node for node in missing if node in look.gone]
        if len(missing) == len(nodes):  # a controller that has just started calls all nodes down
            missing = []
    return ProbeResult(
        asked=tuple(nodes),
        answers=answers,
        lost=tuple(missing),
        why_lost=tuple(reasons[node] for node in missing),
        drained=look.drained,
        leaving=tuple(node for node in nodes if node in look.leaving or node in _leaving(answers)),
        trouble=trouble,
        seconds=seconds,
    )


def _leaving(answers: Sequence[NodeAnswer]) -> frozenset[str]:
    """Those that say themselves that they are being shut down."""
    return frozenset(one.node for one in answers if any(p.check == SHUTDOWN for p in one.problems))


# -- asking ----------------------------------------------------------------------------------


class _Probe:
    """The `srun`s of one probe and what they have heard."""

    def __init__(
        self,
        job_id: int,
        question: Question,
        srun: Sequence[str],
        environment: Mapping[str, str],
        interrupted: Callable[[], bool],
    ) -> None:
        self.job_id = job_id
        self.question = question
        self.srun = srun
        # Without the options of the job's own srun; --jobid finds the allocation.
        self.environment = for_queries(environment)
        self.interrupted = interrupted
        self.answers = Answers()
        self._words: deque[str] = deque(maxlen=5)

    def ask_together(self, nodes: Sequence[str], limit_seconds: float) -> None:
        """One srun for all."""
        if nodes:
            deadline = time.monotonic() + limit_seconds
            self._wait([self._start(nodes)], nodes, deadline, _Latecomers(nodes))

    def ask_alone(self, nodes: Sequence[str], limit_seconds: float) -> None:
        """One srun for each node, some at a time: a dead one must not take the others along.

        A new answer takes the place of an earlier one; without a new one the earlier one stands.
        """
        found = self.answers.found
        earlier = {node: found.pop(node) for node in nodes if node in found}
        self._ask_each(nodes, time.monotonic() + limit_seconds)
        self.answers.found = {**earlier, **found}

    def _ask_each(self, nodes: Sequence[str], deadline: float) -> None:
        for first in range(0, len(nodes), _ALONE_AT_ONCE):
            some = nodes[first : first + _ALONE_AT_ONCE]
            if time.monotonic() >= deadline or self.interrupted():
                return
            asking = [self._start([node]) for node in some]
            self._wait(asking, some, min(deadline, time.monotonic() + _ALONE_SECONDS))

    def last_words(self) -> str:
        return " / ".join(self._words)

    def _start(self, nodes: Sequence[str]) -> _Asking | None:
        argv = [
            *self.srun,
            *(f"--jobid={self.job_id}", f"--job-name={STEP_NAME}", "--overlap"),
            *(f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
            *(f"--nodelist={','.join(nodes)}", "--kill-on-bad-exit=0", "--no-kill"),
            # A dead mount as working directory would hang slurmstepd before the first answer.
            *("--mpi=none", "--input=none", "--export=ALL", "--chdir=/", "--cpu-bind=none"),
            *self.question.words,
        ]
        try:
            return _Asking(argv, self.environment, self.answers, self._words)
        except OSError as error:
            self._words.append(f"srun could not be run: {error.strerror}")
            return None

    def _wait(
        self,
        asking: Sequence[_Asking | None],
        nodes: Sequence[str],
        deadline: float,
        latecomers: _Latecomers | None = None,
    ) -> None:
        """Until all have said everything, no srun is left, or the time is up."""
        running = [one for one in asking if one is not None]
        while time.monotonic() < deadline and not self.interrupted():
            ended = self.answers.ended
            if set(nodes) <= ended or not any(one.lives for one in running):
                break
            if latecomers is not None and latecomers.are_overdue(ended):
                break
            time.sleep(_POLL_SECONDS)
        for one in running:
            one.ask_to_end()
        last = time.monotonic() + _ENDING_SECONDS
        for one in running:
            one.end(last)


class _Latecomers:
    """Those of `nodes` that let the others wait."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = frozenset(nodes)
        self._started = self._last = time.monotonic()
        self._ended = 0

    def are_overdue(self, ended: frozenset[str]) -> bool:
        """Half have ended, and the last of them long ago compared with how long it took."""
        now, count = time.monotonic(), len(ended & self._nodes)
        if count != self._ended:
            self._ended, self._last = count, now
        patience = _LATER_FACTOR * (self._last - self._started) + _LATER_SECONDS
        return 2 * count >= len(self._nodes) and now - self._started > patience


class _Asking:
    """One running `srun` whose lines are read as they come."""

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        answers: Answers,
        words: deque[str],
    ) -> None:
        self.process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (lambda: self._hear(answers), lambda: self._remember(words))
        ]
        for reader in self._readers:
            reader.start()

    def _hear(self, answers: Answers) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answers.hear(line, time.time())

    def _remember(self, words: deque[str]) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            words.append(line.strip()[:200])

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def ask_to_end(self) -> None:
        """TERM makes srun end its step on the nodes that it can reach."""
        if self.lives:
            self.process.terminate()

    def end(self, deadline: float) -> None:
        """srun waits for a hung node for ever; without it nobody does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        if self.lives:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join(_READING_SECONDS)


def _end_steps(slurm: SlurmClient, job_id: int, answers: Answers) -> None:
    """Kill the checks that did not end. In the background: scancel waits for hung nodes, too."""
    silent = (one for one in answers.found.values() if not one.ended and one.step_id.isdigit())
    for step_id in {one.step_id for one in silent}:
        threading.Thread(target=_kill_step, args=(slurm, job_id, step_id), daemon=True).start()


def _kill_step(slurm: SlurmClient, job_id: int, step_id: str) -> None:
    with contextlib.suppress(SlurmError):
        slurm.kill_step(job_id, step_id)
