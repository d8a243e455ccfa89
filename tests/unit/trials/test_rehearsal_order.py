"""The faults of a rehearsal in their order, against a run that is played by a Slurm in memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fabricated_runs import published
from virtual_clock import VirtualClock

from hpctrain.base import clock
from hpctrain.base.errors import SlurmRefusedError
from hpctrain.checkpoints.discover import inspect
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.find import RunFiles, find_run
from hpctrain.records.ledger import EventKind
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.rehearsals import Proof, rehearsals_directory
from hpctrain.records.run_records import append_metrics
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import SubmittedJob
from hpctrain.slurm.states import JobState
from hpctrain.trials.rehearsal import KILL_RANK, RehearsalRequest, rehearse
from hpctrain.trials.rehearsal_proofs import DAMAGED, KILLED, LOSSES, RESUME, SAVE, START
from tests.step_rows import trained_step

SPEC = r"""
name: own
trainer:
  command: [python, own.py, "{output}", "{resume}"]
  done: {step: 100000}
  checkpoint: {path: "state-{step}"}
  signal: {save: TERM}
  metrics: [{output: 'step (?P<step>\d+) loss (?P<loss>\S+)'}]
resources: {gpus: 2}
"""
SAVE_EVERY_STEPS = 7


class PlayedSlurm(FakeSlurm):
    """A Slurm whose jobs train a step each second until something is done to them.

    `continuation` is that of the site. `scancel_fails` although the signal arrives, and no step may
    be started beside those of a job where it `refuses_steps`. A launch with a killed rank may save
    its last step (`saves_when_killed`), or leave a later one that is published before the next
    launch, so many times (`leaves`). `kill_seconds` is how long each kill takes, the last first.
    """

    def __init__(self, runs: Path, time: VirtualClock) -> None:
        super().__init__()
        self.runs, self.time = rehearsals_directory(runs), time
        self.continuation = "requeue"
        self.scancel_fails = self.refuses_steps = self.is_full = False
        self.saves_when_killed, self.leaves = False, 0
        self.kill_seconds: list[float] = []
        self.epoch = self.step = 0

    @property
    def run(self) -> RunFiles:
        directory = max(self.runs.glob("try-*"), key=lambda path: path.stat().st_ctime_ns)
        return find_run(self.runs, directory.name)

    def later(self, seconds: float, do: Callable[[], object]) -> None:
        self.time.at(self.time.passed_seconds + seconds, do)

    def note(self, kind: EventKind, **fields: object) -> None:
        self.run.ledger.append(kind, **fields)

    def submit(self, *words: Any, **named: Any) -> SubmittedJob:
        made = super().submit(*words, **named)
        if not self.is_full:
            self.later(1.0, lambda: self.begin(made.job_id))
        return made

    def begin(self, job_id: int) -> None:
        self.records[job_id] = replace(self.records[job_id], state=JobState.RUNNING)
        self.note(EventKind.ATTEMPT_STARTED, job_id=job_id, restart_count=0, nodes="n0")
        self.launch(job_id)

    def launch(self, job_id: int) -> None:
        """Resume from the newest good checkpoint."""
        root, self.step = self.run.layout.checkpoints, 0
        for step in reversed(published_steps(root)):
            found = inspect(root / checkpoint_name(step), step, "size")
            if found.good:
                self.step = step
                break
            self.note(EventKind.CHECKPOINT_REJECTED, checkpoint_step=step, reason=found.problem)
        self.epoch = epoch = self.epoch + 1
        where = dict(job_id=job_id, restart_count=0, epoch=epoch)
        self.note(EventKind.LAUNCH_STARTED, **where, resume_step=self.step)
        self.later(1.0, lambda: self.train(epoch))

    def train(self, epoch: int) -> None:
        if epoch != self.epoch or self.run.layout.done.exists():
            return
        self.step += 1
        row = trained_step(self.step, 1.0 / self.step, epoch=epoch, time=clock.now())
        append_metrics(self.run.layout, row)
        if self.step % SAVE_EVERY_STEPS == 0:
            self.save(self.step)
        self.later(1.0, lambda: self.train(epoch))

    def save(self, step: int) -> None:
        if step not in published_steps(self.run.layout.checkpoints):
            published(self.run, step)

    def end(self, cause: str) -> None:
        self.note(EventKind.LAUNCH_ENDED, epoch=self.epoch, cause=cause, last_step=self.step)
        self.epoch += 1

    def signal_batch(self, job_id: int, signal_name: str) -> None:
        self.note(EventKind.SIGNAL, job_id=job_id, restart_count=0, signal=signal_name)
        self.save(self.step)
        self.end("time_limit")
        if self.continuation == "requeue":
            self.later(5.0, lambda: self.begin(job_id))
        else:
            self.records[job_id] = replace(self.records[job_id], state=JobState.COMPLETED)
        if self.continuation == "array":
            self.begin(super().submit("#!/bin/sh\n").job_id)
        if self.scancel_fails:
            raise SlurmRefusedError("`scancel` ended with exit code 229")

    def run_on_node(self, job_id: int, node: str, step_name: str, words: Sequence[str]) -> str:
        if self.refuses_steps:
            raise SlurmRefusedError("srun: error: Unable to create step")
        if self.kill_seconds:
            self.time.advance(self.kill_seconds.pop())
        if self.saves_when_killed:
            self.save(self.step)
        self.leaves -= 1
        if self.leaves >= 0:
            left = self.step + 1
            self.later(2.0, lambda: self.save(left))
        self.end("crash")
        self.later(3.0, lambda: self.launch(job_id))
        return "rank 1\n"


@pytest.fixture
def played(tmp_path: Path, virtual_clock: VirtualClock) -> PlayedSlurm:
    return PlayedSlurm(tmp_path / "runs", virtual_clock)


def proofs(slurm: PlayedSlurm, place: Path) -> dict[str, Proof]:
    spec, site = place / "own.yaml", place / "site.yaml"
    spec.write_text(SPEC)
    (place / "own.py").touch()
    site.write_text(f"extends: sandbox\nname: site\ncontinuation: {slurm.continuation}\n")
    wanted = RehearsalRequest(spec, str(site), patience_seconds=60.0, keep=True)
    done = rehearse(wanted, place / "runs", slurm)  # type: ignore[arg-type]
    return {one.topic: one for one in done.proofs}


PROMISED = "all that is promised"
NO_KILL = ("not tried", "Slurm started no step that kills a rank")
# What the Slurm or the trainer does, and of each topic its verdict and words of its fact.
PLAYED: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]]]] = {
    "Slurm requeues": (
        {},
        {PROMISED: ("yes", ""), RESUME: ("yes", "by itself, in the same job")},
    ),
    "the signal of an array arrives also where scancel fails": (
        {"continuation": "array", "scancel_fails": True},
        {PROMISED: ("yes", ""), RESUME: ("yes", "by itself, in the run's next job, 2")},
    ),
    "resumed by hand where nothing continues it": (
        {"continuation": "none"},
        {PROMISED: ("yes", ""), RESUME: ("yes", "by `hpctrain resume`")},
    ),
    "what cannot be done here is no failure of the trainer": (
        {"refuses_steps": True},
        {KILLED: NO_KILL, DAMAGED: NO_KILL, SAVE: ("yes", ""), RESUME: ("yes", "")},
    ),
    "nor is a full cluster": (
        {"is_full": True},
        {START: ("not tried", "the job waited 60 s in the queue")},
    ),
    # newer than all that was published, and than what was truncated: once more
    "what a killed launch has left complete is resumed from": (
        {"leaves": 2},
        {KILLED: ("yes", ""), DAMAGED: ("yes", "")},
    ),
    "always leaving a newer checkpoint is no failure": (
        {"leaves": 100},
        {DAMAGED: ("not tried", "too often")},
    ),
    "losses are compared where each killed launch saves": (
        {"saves_when_killed": True},
        {LOSSES: ("yes", "")},
    ),
    # the checkpoint before that is where two launches began, and none went through it
    "losses are compared where one saves while it is being killed": (
        {"kill_seconds": [6.0, 0.0]},
        {LOSSES: ("yes", ""), DAMAGED: ("yes", "")},
    ),
}


@pytest.mark.parametrize("name", PLAYED)
def test_proofs_of_a_rehearsal(played: PlayedSlurm, tmp_path: Path, name: str) -> None:
    what_happens, expected = PLAYED[name]
    for attribute, value in what_happens.items():
        setattr(played, attribute, list(value) if isinstance(value, list) else value)
    found = proofs(played, tmp_path)
    for topic, (verdict, words) in expected.items():
        topics = [one for one in found.values() if one.promised and topic == PROMISED]
        for one in topics or [found[topic]]:
            assert one.verdict == verdict and words in one.fact, found


# -- What is killed --------------------------------------------------------------------------------


@pytest.fixture
def sleepers() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []

    def start(**variables: str) -> subprocess.Popen[bytes]:
        step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "n0"}
        words = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]
        one = subprocess.Popen(words, env={**step, **variables}, stdout=subprocess.PIPE)
        started.append(one)
        assert one.stdout is not None and one.stdout.readline()
        return one

    yield start
    for one in started:
        one.kill()
        one.communicate()


TRAINER = {"SLURM_PROCID": "0", "HPCTRAIN_OUTPUT": "/run/output/launch-000001"}


@pytest.mark.parametrize(
    ("others", "victim", "words"),
    [
        ([{**TRAINER, "RANK": "0"}], {**TRAINER, "RANK": "1"}, "rank 1"),
        ([TRAINER], {**TRAINER, "RAY_ADDRESS": "n0:6379"}, "the driver of Ray"),
        ([], TRAINER, "the command on n0"),
        ([{"SLURM_PROCID": "0"}], {"SLURM_PROCID": "1"}, "rank 1"),
    ],
)
def test_one_rank_is_killed_and_nothing_above_it(
    sleepers: Callable[..., subprocess.Popen[bytes]],
    others: list[dict[str, str]],
    victim: dict[str, str],
    words: str,
) -> None:
    """Not the agent, and nothing of another job: the agent is in the same task."""
    spared = [sleepers(**one) for one in others]
    spared += [sleepers(SLURM_JOB_ID="8", RANK="5")]
    spared += [sleepers(SLURM_PROCID="0")] if victim.get("HPCTRAIN_OUTPUT") else []
    killed = sleepers(**victim)
    own = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURMD_NODENAME": "n0"}
    done = subprocess.run(
        ["/bin/sh", "-c", KILL_RANK],
        env={"PATH": os.environ["PATH"], **own},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == f"{words}\n", done.stderr
    assert killed.wait(60) == -signal.SIGKILL
    assert [one.poll() for one in spared] == [None] * len(spared)
