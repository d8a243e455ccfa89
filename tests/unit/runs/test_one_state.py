"""A run has one state, whoever shows it: lives of runs, made up by a grammar, read by all commands.

What happens to a run is drawn: each step writes what the programs of a run would write into its
ledger, and moves its job in Slurm. So it is known what the run does, and how much of that the
ledger alone tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import cast

import pytest
from fabricated_runs import NOW, Said, fabricate, said
from virtual_clock import VirtualClock

from hpctrain.base import clock
from hpctrain.judge.causes import FAILURE_CAUSES, FINAL_CAUSES, SCHEDULER_CAUSES, Cause
from hpctrain.notify.notices import NoticeKind, RunFacts, notices_of
from hpctrain.observe.exporter import Exporter, ExporterSlurm
from hpctrain.observe.live_view import LiveRuns
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import nothing_follows
from hpctrain.records.ledger import EventKind
from hpctrain.report.collect import collect_reports
from hpctrain.runs.describe import describe
from hpctrain.runs.goodput import goodput
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.runs.watch import watch
from hpctrain.runs.watch_rules import Symptom
from hpctrain.runs.why import why
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

RUNS, STEPS = 220, 9
# Events that change nothing about what a run does.
REMARKS = (
    *(EventKind.JOB_CHANGED, EventKind.OBSERVED, EventKind.STACKS_SAVED, EventKind.STOP_TIMED),
    *(EventKind.SLOW_RANK, EventKind.SPEED_CHECKED, EventKind.PROBED, EventKind.PLACED),
    *(EventKind.TRACKING_FAILED, EventKind.METRICS_FAILED, EventKind.WATCH, EventKind.SERVING),
    *(EventKind.UPGRADED, EventKind.DATA_ACCEPTED, EventKind.CLEANED),
)
FAILURES = sorted(FAILURE_CAUSES | FINAL_CAUSES - {Cause.CANCELLED, Cause.YIELDED})
LOST = (JobState.FAILED, JobState.NODE_FAIL, JobState.TIMEOUT, JobState.PREEMPTED)
# What `watch` may say about a run in a state; of one without a job it may be that Slurm's word is
# the only one.
SYMPTOMS: dict[RunState, set[Symptom]] = {
    RunState.RUNNING: {Symptom.STALLED, Symptom.STORM, Symptom.DISK_LOW},
    RunState.PENDING: {
        *(Symptom.LAUNCH_HELD, Symptom.ENVIRONMENT_HELD, Symptom.LIMIT_HELD, Symptom.DELAYED),
        *(Symptom.EXCLUDED, Symptom.TOO_FEW_NODES, Symptom.WAITS_LONG),
    },
    RunState.FAILED: {Symptom.FAILED, Symptom.ORPHANED, Symptom.PREEMPTED},
    RunState.UNKNOWN: {Symptom.ORPHANED, Symptom.PREEMPTED, Symptom.VANISHED},
    RunState.CANCELLED: {Symptom.CANCELLED},
}
TOLD = {
    RunState.DONE: NoticeKind.DONE,
    RunState.FAILED: NoticeKind.FAILED,
    RunState.STOPPED: NoticeKind.STOPPED,
    RunState.CANCELLED: NoticeKind.STOPPED,
}
Step = Callable[["Life"], None]


@dataclass
class Life:
    """One run: its ledger, its jobs, and what it does in truth.

    `recorded`: its ledger alone tells that; `asked`: a client has asked Slurm for one more job, and
    no answer is recorded. `jobs`: the newest is the last.
    """

    chance: Random
    number: int
    entries: list[Said] = field(default_factory=lambda: [said(EventKind.RENDERED)])
    jobs: list[JobRecord] = field(default_factory=list)
    truth: RunState = RunState.PREPARED
    recorded: bool = True
    asked: bool = False
    done: bool = False
    job_count: int = 0
    epoch: int = 0
    cancelled: bool = False
    held: bool = False

    @property
    def told(self) -> RunState | None:
        """What its directory alone tells."""
        if self.done:
            return RunState.DONE
        return self.truth if self.recorded and not self.asked else None

    @property
    def name(self) -> str:
        return f"run-{self.number:03}"

    @property
    def job(self) -> JobRecord:
        return self.jobs[-1]

    def write(self, kind: EventKind, **fields: object) -> None:
        self.entries.append(said(kind, **fields))

    def of_attempt(self, kind: EventKind, **fields: object) -> None:
        of_job = {"job_id": self.job.job_id, "restart_count": self.job.restart_count}
        self.write(kind, **of_job, **fields)

    def move(self, state: JobState, **more: object) -> None:
        self.jobs[-1] = replace(self.job, state=state, **more)  # type: ignore[arg-type]

    def over(
        self, truth: RunState, state: JobState, *, recorded: bool = True, **more: object
    ) -> None:
        self.move(state, **more)
        self.truth, self.recorded = truth, recorded

    def successor(self) -> JobRecord:
        """The next job, which waits behind the newest one."""
        job = self.submitted()
        self.write(EventKind.SUBMITTED, job_id=job.job_id, successor_of=self.job.job_id)
        return job

    def submitted(self) -> JobRecord:
        self.job_count += 1
        number = self.number * 100 + self.job_count
        return JobRecord(number, self.name, JobState.PENDING, "Priority", restart_count=0)

    def launch(self) -> None:
        self.epoch += 1
        self.of_attempt(EventKind.LAUNCH_STARTED, epoch=self.epoch, resume_step=0)

    def end_launch(self, cause: str, action: str, code: int = 0) -> None:
        self.of_attempt(
            EventKind.LAUNCH_ENDED, epoch=self.epoch, cause=cause, reason="so", last_step=1
        )
        self.of_attempt(EventKind.ACTION, action=action, cause=cause, reason="so", exit_code=code)


# -- what can happen ---------------------------------------------------------------------------


def submit(life: Life) -> None:
    life.write(EventKind.SUBMITTING)
    life.jobs.append(life.submitted())
    life.write(EventKind.SUBMITTED, job_id=life.job.job_id)
    life.truth = RunState.PENDING
    life.recorded = life.asked = life.cancelled = life.held = False


def resume(life: Life) -> None:
    life.write(EventKind.CONTROL, action="resume", user="somebody")
    submit(life)


def refused(life: Life) -> None:
    life.write(EventKind.SUBMITTING)
    life.write(EventKind.SUBMIT_FAILED, reason="Invalid account")
    life.asked = False
    if not life.jobs:
        life.truth = RunState.NOT_SUBMITTED


def client_died(life: Life) -> None:
    life.write(EventKind.SUBMITTING)
    if life.chance.random() < 0.5:
        life.write(EventKind.SUBMIT_FAILED, reason="no answer within 20 s", answered=False)
    life.asked = True
    if not life.jobs:
        life.truth = RunState.NOT_SUBMITTED


def start(life: Life) -> None:
    life.move(JobState.RUNNING, node_list="n[0-1]", reason=None)
    life.of_attempt(EventKind.ATTEMPT_STARTED, nodes="n[0-1]")
    life.launch()
    life.truth, life.held = RunState.RUNNING, False


def relaunch(life: Life) -> None:
    life.end_launch(life.chance.choice(FAILURES), "relaunch")
    life.launch()


def requeue(life: Life) -> None:
    life.end_launch(life.chance.choice(sorted(SCHEDULER_CAUSES)), "requeue")
    back_in_queue(life, life.chance.choice(("BeginTime", "Priority", "Resources")))


def hold(life: Life) -> None:
    life.write(EventKind.CONTROL, action="hold", user="somebody")
    life.end_launch("yielded", "hold")
    back_in_queue(life, "JobHeldUser")
    life.held = True


def leave(life: Life) -> None:
    """The next job of a chain has been in the queue since the attempt began."""
    successor = life.successor()
    life.end_launch("time_limit", "leave")
    life.move(JobState.TIMEOUT)
    life.jobs.append(successor)
    life.truth = RunState.PENDING


def back_in_queue(life: Life, reason: str) -> None:
    again = (life.job.restart_count or 0) + 1
    life.move(JobState.PENDING, reason=reason, restart_count=again, node_list=None)
    life.truth = RunState.PENDING


def requeued_by_slurm(life: Life) -> None:
    """Its supervisor was killed with its node; the next attempt may say so."""
    back_in_queue(life, "Resources")
    if life.chance.random() < 0.5:
        before = {"job_id": life.job.job_id, "restart_count": (life.job.restart_count or 1) - 1}
        start(life)
        life.write(EventKind.ATTEMPT_LOST, cause="node_failure", reason="gone", **before)


def fail(life: Life) -> None:
    life.end_launch(life.chance.choice(FAILURES), "stop", 1)
    life.over(RunState.FAILED, JobState.FAILED, exit_code=1)


def stop(life: Life) -> None:
    life.write(EventKind.CONTROL, action="stop", user="somebody")
    life.end_launch("yielded", "stop")
    life.over(RunState.STOPPED, JobState.COMPLETED, exit_code=0)


def taken_out(life: Life) -> None:
    """`hpctrain stop` takes a job out of the queue, which nobody has started."""
    life.write(EventKind.CONTROL, action="stop", user="somebody")
    life.write(EventKind.ACTION, action="stop", exit_code=0, reason="so", job_id=life.job.job_id)
    life.over(RunState.STOPPED, JobState.CANCELLED)


def requeued_by_hand(life: Life) -> None:
    """Somebody calls `scontrol requeue` for a job that has ended."""
    life.jobs = [life.job]  # Slurm has forgotten the others meanwhile
    back_in_queue(life, "Priority")
    life.recorded = life.asked = False
    start(life)


def finish(life: Life) -> None:
    life.end_launch("done", "finish")
    life.done = life.chance.random() < 0.5  # its marker may come later to this host
    life.over(RunState.DONE, JobState.COMPLETED, exit_code=0)


def cancel(life: Life) -> None:
    life.write(EventKind.CANCEL_REQUESTED, job_id=life.job.job_id, user="somebody")
    life.cancelled, recorded = True, False
    if life.truth is RunState.RUNNING and life.chance.random() < 0.5:
        life.end_launch("cancelled", "stop", 1)
        recorded = True
    if life.chance.random() < 0.5:
        life.write(EventKind.CANCELLED, job_id=life.job.job_id, user="somebody")
        recorded = True
    life.over(RunState.CANCELLED, JobState.CANCELLED, recorded=recorded)


def scancel(life: Life) -> None:
    life.over(RunState.CANCELLED, JobState.CANCELLED, recorded=False)


def lose(life: Life) -> None:
    """The supervisor is killed, or the script ends before there is one."""
    killed = life.chance.random() < 0.5
    ended = {"exit_signal": 9} if killed else {"exit_code": life.chance.choice((0, 1, 78))}
    life.over(RunState.FAILED, life.chance.choice(LOST), recorded=False, **ended)


def script_fails(life: Life) -> None:
    """The script ends before its supervisor begins, and cancels the job behind it."""
    behind = life.successor()
    life.over(RunState.FAILED, JobState.FAILED, recorded=False, exit_code=78, node_list="n0")
    life.jobs.insert(-1, replace(behind, state=JobState.CANCELLED))


GRAMMAR: dict[RunState, tuple[Step, ...]] = {
    RunState.PREPARED: (submit, submit, submit, refused, client_died),
    RunState.NOT_SUBMITTED: (submit, resume, refused, client_died),
    RunState.PENDING: (*(start,) * 6, taken_out, cancel, scancel, lose, script_fails),
    RunState.RUNNING: (
        *(relaunch, requeue, requeued_by_slurm, hold, leave, fail, stop, finish),
        *(cancel, scancel, lose),
    ),
    RunState.FAILED: (resume, submit, refused, client_died, requeued_by_hand),
    RunState.STOPPED: (resume, submit, refused, client_died, requeued_by_hand),
    RunState.CANCELLED: (resume, submit, refused, client_died),
    RunState.DONE: (),
}


def lived(number: int) -> Life:
    """Draw a life of up to some steps."""
    life = Life(Random(number), number)
    for _ in range(life.chance.randrange(STEPS + 1)):
        steps = GRAMMAR[life.truth]
        if steps:
            life.chance.choice(steps)(life)
        if life.chance.random() < 0.3:
            life.write(life.chance.choice(REMARKS), job_id=life.number * 100, reason="by the way")
    return life


# -- what Slurm says, and who reads it ---------------------------------------------------------


@dataclass
class Stage:
    """All runs, what Slurm says of them, and in which state each has to be shown."""

    directory: Path
    runs: list[RunFiles]
    slurm: FakeSlurm
    expected: dict[str, RunState]

    @property
    def client(self) -> SlurmClient:
        return cast(SlurmClient, self.slurm)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """The jobs that have ended have not ended yet."""
        known = dict(self.slurm.records)
        for job_id, job in known.items():
            if job.state.is_ended:
                self.slurm.records[job_id] = replace(job, state=JobState.COMPLETING)
        yield
        self.slurm.records.update(known)


LIVES = [lived(number) for number in range(1, RUNS + 1)]


@pytest.fixture(scope="module")
def fabricated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RunFiles]]:
    directory = tmp_path_factory.mktemp("runs")
    runs = []
    for life in LIVES:
        steps = life.chance.randrange(3) if life.epoch else 0  # some have shown no sign of life
        run = fabricate(directory, life.name, life.entries, steps=steps, done=life.done)
        runs.append(run)
    return directory, runs


@pytest.fixture(params=["answers", "is late", "has forgotten", "is silent"])
def stage(
    request: pytest.FixtureRequest, fabricated: tuple[Path, list[RunFiles]]
) -> Iterator[Stage]:
    """Slurm answers, still ends jobs that have ended, has forgotten them, or does not answer."""
    directory, runs = fabricated
    slurm, expected = FakeSlurm(), {}
    for life in LIVES:
        shown = life.truth
        for job in life.jobs:
            slurm.records[job.job_id] = job
        over = bool(life.jobs) and life.job.state.is_ended
        if over and not life.done and request.param == "is late":
            slurm.records[life.job.job_id] = replace(life.job, state=JobState.COMPLETING)
            shown = RunState.RUNNING
        if over and request.param == "has forgotten":
            for job in life.jobs:
                del slurm.records[job.job_id]
            if not life.recorded and not life.cancelled:
                shown = RunState.UNKNOWN
        if request.param == "is silent":
            shown = life.told or RunState.UNKNOWN
        expected[life.name] = shown
    slurm.away = request.param == "is silent"
    slurm.queries = 0  # type: ignore[attr-defined]
    # Only in the first one trainers have shown a sign of life that is not old.
    now = NOW if request.param == "answers" else NOW + 86_400
    with clock.replaced(VirtualClock(now)):
        yield Stage(directory, runs, slurm, expected)


def test_all_commands_show_what_the_run_does(stage: Stage) -> None:
    runs, client = stage.runs, stage.client
    shown = {"status": {row.run_id: row.state for row in statuses(runs, client)}}
    top = LiveRuns(stage.directory, client)
    with stage.ending():
        top.look()  # what it keeps from one look to the next is no answer to the next one
    rows = top.look().rows
    shown["top"] = {row.status.run_id: row.status.state for row in rows}
    exporter = Exporter((stage.directory,), cast(ExporterSlurm, stage.slurm), 1e9)
    shown["exporter"] = {
        dict(sample.labels)["run"]: RunState(dict(sample.labels)["hpctrain_run_state"])
        for sample in exporter.samples()
        if sample.family.name == "hpctrain_run_state" and sample.value == 1
    }
    shown["report"] = {one.run_id: one.status.state for one in collect_reports(runs, client)}
    shown["why"] = {run.run_id: why(run, client).state for run in runs}
    for surface, states in shown.items():
        wrong = {name: state for name, state in states.items() if state is not stage.expected[name]}
        assert not wrong and len(states) == RUNS, f"{surface}: {wrong}"


def test_watch_sees_what_the_run_does(stage: Stage) -> None:
    found = watch(stage.directory, stage.client)
    symptoms = {one.run_id: one.symptom for one in found.seen}
    for name, state in stage.expected.items():
        may_be = SYMPTOMS.get(state, set())
        assert symptoms.get(name) in {None, *may_be}, f"{name}: {state}, {symptoms[name]}"
        if state is RunState.FAILED and clock.now() > NOW and not stage.slurm.away:
            assert name in symptoms, f"{name} has failed, and nobody says so"


@pytest.mark.parametrize("life", LIVES, ids=lambda life: life.name)
def test_what_reads_the_directory_alone_agrees(
    life: Life, fabricated: tuple[Path, list[RunFiles]]
) -> None:
    """The history, the account of time, tracking, and what people were told last."""
    run = fabricated[1][life.number - 1]
    assert describe(run).state is life.told
    assert goodput(run).over is (life.told is not None or life.held)
    events = run.ledger.events()
    ended = bool(life.jobs) and (life.recorded or life.cancelled)
    assert nothing_follows(events) is ended
    facts = RunFacts(life.name, "/runs", "user", "cluster", None)
    last = [one.kind for one in notices_of(events, facts) if one.kind in TOLD.values()][-1:]
    if life.jobs and life.recorded:
        assert last == [TOLD[life.truth]]
