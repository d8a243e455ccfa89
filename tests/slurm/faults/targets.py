"""A run that faults are thrown at in a storm, and the installation that it shares with others.

Belongs here: what can be seen of a run from outside (squeue, its files), typing commands, and
writing down what was done to it. Does not belong here: the faults (see `strikes`), judging
(see `oracle`).

Several runs are struck at a time. Commands that need slurmctld hold `Field.with_controller`; a
strike that takes slurmctld away holds `Field.without_controller` and so meets no command half-way.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from another_user import Bystander
from command_line import Outcome
from other_cluster import OtherCluster
from rehearsal import PlannedFault, Rehearsal, Stage

from hpctrain.base.errors import SlurmError
from hpctrain.sandbox import faults
from hpctrain.sandbox.sandbox import Sandbox

COMMENT = "hpctrain:"
_HPCTRAIN = (sys.executable, "-c", "from hpctrain.cli.main import main; main()")
_COMMAND_SECONDS = 240.0
_PATIENCE_SECONDS = 300.0
_TAIL_BYTES = 4096


class DeedKind(StrEnum):
    """What was done to a run, as far as a true statement about it depends on it."""

    CANCELLED = "cancelled"
    STOPPED = "asked to stop"
    HELD = "asked to hold, or held"
    RESUMED = "resumed"
    SUPERVISOR_KILLED = "supervisor killed"
    FORGOTTEN = "slurmctld killed, which forgets the last seconds"
    DIRECTORY_AWAY = "run directory away"
    READ_ONLY = "run directory read-only"


@dataclass(frozen=True)
class Deed:
    """`time` and `until` are seconds since the epoch; `until` is infinite while it lasts."""

    kind: DeedKind
    time: float
    until: float = float("inf")


@dataclass(frozen=True)
class QueuedJob:
    """One line of squeue."""

    job_id: int
    state: str
    reason: str
    comment: str

    @property
    def is_live(self) -> bool:
        """It holds nodes or will; a job that is COMPLETING does neither for long."""
        return self.state in ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "SIGNALING")

    @property
    def is_held(self) -> bool:
        reason = self.reason.lower().replace("_", " ")
        return self.state == "PENDING" and ("held" in reason or "hold" in reason)


def queue(sandbox: Sandbox) -> tuple[QueuedJob, ...] | None:
    """All jobs that squeue shows, read without hpctrain's own parser; None without an answer."""
    try:
        text = sandbox.command("squeue", "--noheader", "--states=all", "--format=%A|%T|%r|%k")
    except SlurmError:
        return None
    found = (line.split("|", 3) for line in text.splitlines())
    return tuple(QueuedJob(int(job), state, why, words) for job, state, why, words in found)


class Field:
    """What all runs of a storm share: the cluster, another cluster, another user, the admin."""

    def __init__(
        self,
        stage: Stage,
        other: OtherCluster | None = None,
        bystander: Bystander | None = None,
    ) -> None:
        self.stage = stage
        self.other = other
        self.bystander = bystander
        self.machines = threading.RLock()  # sandbox.json is read and written as a whole
        self.away: list[Deed] = []  # when slurmctld was not there
        self.strangers: dict[int, bool] = {}  # job ids elsewhere that a run here has as well
        self._turn = threading.Condition()
        self._users = 0
        self._taken = False

    @property
    def sandbox(self) -> Sandbox:
        return self.stage.sandbox

    # -- slurmctld is there, or not ------------------------------------------------------------

    @contextlib.contextmanager
    def with_controller(self) -> Iterator[None]:
        """Nobody kills slurmctld meanwhile."""
        with self._turn:
            self._turn.wait_for(lambda: not self._taken)
            self._users += 1
        try:
            yield
        finally:
            with self._turn:
                self._users -= 1
                self._turn.notify_all()

    @contextlib.contextmanager
    def without_controller(self) -> Iterator[None]:
        """Whoever needs slurmctld waits; it is back when this is left."""
        with self._turn:
            self._turn.wait_for(lambda: not self._taken)
            self._taken = True
            self._turn.wait_for(lambda: not self._users)
        began_at = time.time()
        try:
            yield
        finally:
            if not self.sandbox.daemon_is_alive("slurmctld"):
                with self.machines:
                    faults.restart_controller(self.sandbox)
            self.away.append(Deed(DeedKind.FORGOTTEN, began_at, time.time()))
            with self._turn:
                self._taken = False
                self._turn.notify_all()

    def slurm(self, name: str, *arguments: str) -> str:
        """A command of a person or an administrator, typed again until slurmctld answers."""
        with self.with_controller():
            return self.sandbox.command(name, *arguments)

    # -- machines ------------------------------------------------------------------------------

    def bring_back(self, node: str, *, rebooted: bool) -> None:
        """Start the slurmd of a node that was down, and give the node back to the scheduler."""
        with self.machines:
            if not self.sandbox.daemon_is_alive(f"slurmd-{node}"):
                faults.restart_node(self.sandbox, node, rebooted=rebooted)

    def resume_nodes(self) -> None:
        """As an administrator: every node that Slurm keeps down although its slurmd lives."""
        with self.with_controller():
            for node, state in self.sandbox.node_states().items():
                down = state.startswith(("down", "drain", "fail"))
                if down and self.sandbox.daemon_is_alive(f"slurmd-{node}"):
                    with contextlib.suppress(SlurmError):
                        faults.resume_node(self.sandbox, node)

    # -- strangers -----------------------------------------------------------------------------

    def collide(self, job_id: int) -> None:
        """A stranger's job with this id on the other cluster, unless that has passed it."""
        if self.other is None:
            return
        with self.machines:
            if job_id not in self.strangers:
                self.strangers[job_id] = self.other.take_id(job_id)

    def harmed_strangers(self) -> list[str]:
        """What should have been left alone and was not."""
        if self.other is None:
            return []
        harmed = []
        for job_id in (job for job, taken in self.strangers.items() if taken):
            try:
                self.other.assert_untouched(job_id)
            except AssertionError as error:
                harmed.append(f"job {job_id} of cluster {self.other.name}: {error}")
        return harmed


@dataclass(frozen=True)
class Row:
    """The newest step that a run has trained."""

    epoch: int
    step: int
    time: float


@dataclass
class Target:
    """One run under fire. `dice` are its own: what strikes it does not depend on other runs."""

    field: Field
    rehearsal: Rehearsal
    dice: random.Random
    planned: list[PlannedFault] = field(default_factory=list)
    deeds: list[Deed] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    # What an administrator does once the run goes on: a node comes back.
    aftercare: list[Callable[[], None]] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return self.rehearsal.run.run_id

    @property
    def directory(self) -> Path:
        return self.rehearsal.run.layout.directory

    @property
    def sandbox(self) -> Sandbox:
        return self.field.sandbox

    # -- what is to be seen ----------------------------------------------------------------------

    def newest_row(self) -> Row | None:
        """From the end of metrics.jsonl; None before the first step, and without a directory."""
        for line in reversed(_tail(self.directory / "metrics.jsonl")):
            with contextlib.suppress(ValueError, KeyError):
                found = json.loads(line)
                return Row(found["epoch"], found["step"], found["time"])
        return None

    @property
    def trained_epoch(self) -> int:
        """The newest launch that has begun to train; 0 before the first."""
        row = self.newest_row()
        progress = self.progress()
        training = progress.get("phase") in ("training", "evaluating", "saving")
        return max(row.epoch if row else 0, int(progress["epoch"]) if training else 0)

    def progress(self) -> dict[str, Any]:
        """The trainer's last sign of life; empty without one."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((self.directory / "progress.json").read_text())
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def done(self) -> bool:
        return (self.directory / "done.json").exists()

    def jobs(self) -> list[QueuedJob] | None:
        """The jobs that bear the run's comment; None without an answer of Slurm."""
        seen = queue(self.sandbox)
        words = f"{COMMENT}{self.run_id}"
        return None if seen is None else [job for job in seen if job.comment == words]

    def live_jobs(self) -> list[QueuedJob]:
        """Those that hold nodes or will."""
        return [job for job in self._jobs_for_sure() if job.is_live]

    def has_left(self) -> bool:
        """No job of the run waits, runs or is just ending."""
        return not any(job.is_live or job.state == "COMPLETING" for job in self._jobs_for_sure())

    def only_waits(self) -> bool:
        """A job of the run waits, and nothing of it is left on the nodes."""
        states = {job.state for job in self._jobs_for_sure()}
        return "PENDING" in states and not states & {"RUNNING", "COMPLETING", "CONFIGURING"}

    def _jobs_for_sure(self) -> list[QueuedJob]:
        """Asked again until Slurm answers."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := self.jobs()) is None:
            assert time.monotonic() < deadline, "slurmctld does not answer"
            time.sleep(0.5)
        return found

    def follow(self) -> None:
        """Look up which job trains now, so that strikes find its processes."""
        live = self.live_jobs()
        running = [job for job in live if job.state != "PENDING"] or live
        if running:
            self.rehearsal.job_id = running[-1].job_id
            self.field.collide(running[-1].job_id)

    def nodes(self) -> list[str]:
        """The nodes of the newest attempt, the batch node first."""
        return self.rehearsal.nodes()

    # -- what is done ----------------------------------------------------------------------------

    def did(self, kind: DeedKind) -> None:
        self.deeds.append(Deed(kind, time.time()))

    @contextlib.contextmanager
    def doing(self, kind: DeedKind) -> Iterator[None]:
        began = Deed(kind, time.time())
        self.deeds.append(began)
        try:
            yield
        finally:
            self.deeds[self.deeds.index(began)] = Deed(kind, began.time, time.time())

    def has(self, *kinds: DeedKind, since: float = 0.0) -> bool:
        return any(deed.kind in kinds and deed.until >= since for deed in self.deeds)

    def plan(self, fault: PlannedFault) -> None:
        """Have a rank of a later launch do something to itself."""
        self.planned.append(fault)
        assert self.rehearsal.place is not None
        plan = self.rehearsal.place / "faults.json"
        draft = plan.with_suffix(".new")
        draft.write_text(json.dumps([vars(one) for one in self.planned]))
        draft.replace(plan)

    def hpctrain(
        self,
        verb: str,
        *options: str,
        client: Sandbox | None = None,
        path_first: Path | None = None,
        run: bool = True,
    ) -> Outcome:
        """`hpctrain VERB RUN OPTIONS` as a process of its own, as a user of `client`'s cluster."""
        words = [verb, *([self.run_id] if run else []), *options]
        words += ["--runs", str(self.field.stage.runs)]
        there = (client or self.sandbox).environment()
        if path_first is not None:
            there["PATH"] = f"{path_first}{os.pathsep}{there['PATH']}"
        with self.field.with_controller():
            return command(words, there)

    def until(self, reached: Callable[[], bool], seconds: float = _PATIENCE_SECONDS) -> bool:
        """Wait; False when the time is over."""
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def command(words: Sequence[str], client: Mapping[str, str]) -> Outcome:
    """Run hpctrain as a process; one that was killed has the negative number of the signal."""
    done = subprocess.run(
        [*_HPCTRAIN, *words],
        env={**os.environ, **client},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
        check=False,
    )
    return Outcome(tuple(words), done.returncode, done.stdout, done.stderr)


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
