"""What an onlooker makes of a run, symptom by symptom, and everything it must leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fabricated_runs import LAUNCHED, NOW, STARTED, SUBMITTED, Said, ended, said

from hpctrain.judge.causes import Cause
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig
from hpctrain.runs.state import RunState, judge
from hpctrain.runs.watch_rules import (
    DiskSpace,
    RunProblem,
    Symptom,
    WatchedRun,
    WatchRemedy,
    find_problems,
    is_reported,
)
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

RUN = "gpt-tiny-7f3a"
BEGUN = (*SUBMITTED, STARTED, LAUNCHED)
LEFT = (*BEGUN, *ended("preempted", "urgent", "leave"))
REQUEUED = (*BEGUN, *ended("preempted", "urgent", "requeue"))
SUCCESSOR = said(EventKind.SUBMITTED, job_id=2, successor_of=1)
CANCELLED = said(EventKind.CANCEL_REQUESTED, job_id=1)
SHAPES = (
    LaunchShape(nodes=4, tasks=4, train_config="train.json"),
    LaunchShape(nodes=2, tasks=2, train_config="train-n000002.json"),
)


def events(entries: tuple[Said, ...]) -> list[Event]:
    """`entries`, one second apart, the last of them an hour ago; actions belong to job 1."""
    whole = []
    for number, (kind, fields) in enumerate(entries):
        time = NOW - 3600 - len(entries) + number
        given = {"job_id": 1, "restart_count": 0, **fields}
        whole.append(Event.model_validate({"event": kind, "time": time, **given}))
    return whole


def job(state: JobState, job_id: int = 1, **more: object) -> JobRecord:
    over = dict(node_list="n[0-1]", start_time=NOW - 4000, end_time=NOW - 600, restart_count=0)
    told = {"name": RUN, **(over if state.is_ended else {}), **more}
    return JobRecord(job_id, state=state, **told)  # type: ignore[arg-type]


def look(entries: tuple[Said, ...], *jobs: JobRecord, **more: object) -> WatchedRun:
    config = SuperviseConfig(
        run_id=RUN,
        target_step=60,
        continuation="requeue",
        failures_without_progress=3,
        stall_seconds=600.0,
        setup_stall_seconds=1800.0,
        kill_wait_seconds=5.0,
        verify="auto",
    )
    settings = {key: more.pop(key) for key in list(more) if key in SuperviseConfig.model_fields}
    facts: dict[str, object] = {"now": NOW, "grace_seconds": 120.0, **more}
    changed = config.model_copy(update=settings)
    return WatchedRun(RUN, events(entries), changed, jobs, **facts)  # type: ignore[arg-type]


def only(seen: WatchedRun) -> RunProblem:
    (found,) = find_problems(seen)
    return found


PENDING = job(JobState.PENDING, reason="Priority")
UNKNOWN_JOB = job(JobState.RUNNING, 7)
STOP = said(EventKind.ACTION, action="stop", reason="3 crashes", exit_code=1)
FAILED = (ended("crash", "boom", "stop")[0], STOP)
ASKED = (ended("yielded", "asked", "stop")[0], said(EventKind.ACTION, action="stop", exit_code=0))
HELD_ENVIRONMENT = job(
    JobState.PENDING, reason="user_env_retrieval_failed_requeued_held", restart_count=1
)
HELD_LIMIT = job(
    JobState.REQUEUE_HOLD, reason="launch_failure_limit_exceeded_requeued_held", restart_count=5
)
HELD_LAUNCH = job(JobState.PENDING, reason="launch_failed_requeued_held", restart_count=1)
DELAYED = job(
    JobState.PENDING,
    reason="BeginTime",
    restart_count=1,
    submit_time=NOW - 20,
    start_time=NOW + 101,
)
AVOIDING = (
    *BEGUN,
    said(EventKind.ACTION, action="requeue", reason="hang", excluded=("n1", "n2")),
)
NO_NODE = job(JobState.PENDING, reason="ReqNodeNotAvail, UnavailableNodes:n1", restart_count=1)
WAITING = job(JobState.PENDING, reason="Resources", submit_time=NOW - 2000, node_count=4)
RUNNING = job(JobState.RUNNING, start_time=NOW - 9000, node_list="n[0-1]")
STORM = tuple(
    entry
    for number in range(5)
    for entry in (
        said(EventKind.LAUNCH_STARTED, epoch=number, resume_step=number * 10),
        *ended("crash", "boom", "relaunch", epoch=number),
    )
)

# what has happened, words of the message, by symptom and remedy
SEEN: dict[tuple[Symptom, WatchRemedy], list[tuple[str, WatchedRun, str]]] = {
    (Symptom.ORPHANED, WatchRemedy.RESUBMIT): [
        (
            "a node died, and Slurm may not requeue",
            look(BEGUN, job(JobState.NODE_FAIL), continuation="none"),
            "one of its nodes failed",
        ),
        (
            "the supervisor was killed",
            look(BEGUN, job(JobState.FAILED, exit_signal=9)),
            "supervisor of job 1 was lost (signal 9)",
        ),
        (
            "the script failed before the supervisor",
            look(SUBMITTED, job(JobState.FAILED, exit_code=127)),
            "ended before its supervisor began (exit code 127)",
        ),
        (
            "a restarted script failed before the supervisor",
            look(REQUEUED, job(JobState.FAILED, exit_code=1, restart_count=1)),
            "ended before its supervisor began",
        ),
        (
            "the time limit took the supervisor along",
            look(BEGUN, job(JobState.TIMEOUT)),
            "it reached its time limit",
        ),
        (
            "Slurm has forgotten a job that was running",
            look(BEGUN),
            "its supervisor left no record",
        ),
    ],
    (Symptom.PREEMPTED, WatchRemedy.RESUBMIT): [
        (
            "preempted where preempted jobs are cancelled",
            look(BEGUN, job(JobState.PREEMPTED)),
            "preempted",
        ),
        (
            "a requeue that Slurm never heard of",
            look(REQUEUED, job(JobState.COMPLETED)),
            "nothing followed",
        ),
    ],
    (Symptom.VANISHED, WatchRemedy.TELL): [
        (
            "Slurm has forgotten a job that it was ending",
            look((*BEGUN, said(EventKind.SIGNAL, signal="TERM"))),
            "how it ended is unknown",
        ),
        ("Slurm has forgotten a job that waited", look(SUBMITTED), "how it ended is unknown"),
        (
            "Slurm has forgotten a job that waited after a requeue: it may have been cancelled",
            look(REQUEUED),
            "how it ended is unknown",
        ),
        (
            "the successor of a chain that nobody knows any more",
            look((*LEFT, SUCCESSOR), job(JobState.COMPLETED), continuation="chain"),
            "how it ended is unknown",
        ),
    ],
    (Symptom.CHAIN_EXHAUSTED, WatchRemedy.RESUBMIT): [
        (
            "the last job of a chain",
            look(LEFT, job(JobState.COMPLETED), continuation="chain"),
            "no job of the chain is left",
        ),
        (
            "the last element of an array",
            look(LEFT, job(JobState.COMPLETED), continuation="array"),
            "no job of the array is left",
        ),
    ],
    (Symptom.UNRECORDED, WatchRemedy.ADOPT): [
        (
            "a job that the ledger does not know",
            look(SUBMITTED[:2], UNKNOWN_JOB, unrecorded=(UNKNOWN_JOB,)),
            "job 7 is one of this run",
        ),
    ],
    (Symptom.FAILED, WatchRemedy.TELL): [
        (
            "a run that is over without being done",
            look((*BEGUN, *FAILED), job(JobState.FAILED)),
            "it has stopped and is not done: 3 crashes",
        ),
    ],
    (Symptom.LAUNCH_HELD, WatchRemedy.RELEASE): [
        ("a prolog failed", look(REQUEUED, HELD_LAUNCH), "Slurm holds the job"),
    ],
    (Symptom.ENVIRONMENT_HELD, WatchRemedy.TELL): [
        (
            "a login shell failed on a node: a release would cost the next one",
            look(REQUEUED, HELD_ENVIRONMENT),
            "repair ~/.bash_profile",
        ),
    ],
    (Symptom.LIMIT_HELD, WatchRemedy.RELEASE): [
        ("Slurm has launched it five times", look(REQUEUED, HELD_LIMIT), "MaxBatchRequeue"),
    ],
    (Symptom.DELAYED, WatchRemedy.START_NOW): [
        ("the wait after a requeue", look(REQUEUED, DELAYED), "101 s more"),
    ],
    (Symptom.EXCLUDED, WatchRemedy.CLEAR_EXCLUDED): [
        ("excluded nodes are the only ones", look(AVOIDING, NO_NODE), "while it avoids n1, n2"),
    ],
    (Symptom.TOO_FEW_NODES, WatchRemedy.TAKE_FEWER): [
        (
            "nodes are missing for long",
            look(SUBMITTED, WAITING, shapes=SHAPES),
            "33 min for 4 nodes and may begin with 2",
        ),
    ],
    (Symptom.STALLED, WatchRemedy.TELL): [
        (
            "nothing moves",
            look(BEGUN, RUNNING, signs_time=NOW - 1921),
            "`scontrol requeue 1` restarts it",
        ),
    ],
    (Symptom.STORM, WatchRemedy.TELL): [
        (
            "failures come thick and fast",
            look((*BEGUN, *STORM), RUNNING, now=NOW - 3000, signs_time=NOW - 3000),
            "5 failures within 30 min",
        ),
    ],
}


@pytest.mark.parametrize(
    ("seen", "expected", "words"),
    [
        pytest.param(seen, expected, words, id=name)
        for expected, rows in SEEN.items()
        for name, seen, words in rows
    ],
)
def test_what_is_seen(seen: WatchedRun, expected: tuple[Symptom, WatchRemedy], words: str) -> None:
    found = only(seen)
    assert (found.symptom, found.remedy) == expected, found
    assert words in found.message


HELD = (*BEGUN, *ended("yielded", "asked", "hold"))
LEFT_ALONE: list[tuple[str, WatchedRun]] = [
    ("never submitted", look(SUBMITTED[:2])),
    ("it waits", look(SUBMITTED, PENDING)),
    ("it runs", look(BEGUN, RUNNING, signs_time=NOW - 5)),
    ("it has just begun and said nothing yet", look(SUBMITTED, replace(RUNNING, start_time=NOW))),
    ("it runs as long without a word as it may", look(BEGUN, RUNNING, signs_time=NOW - 1919)),
    ("its user stopped it", look((*BEGUN, *ASKED), job(JobState.COMPLETED))),
    (
        "cancelled, which its supervisor has said",
        look((*BEGUN, ended("cancelled", "scancel", "stop")[0], STOP), job(JobState.CANCELLED)),
    ),
    ("failed a week ago", look((*BEGUN, *FAILED), now=NOW + 7 * 86400)),
    ("Slurm knows no job, but it trains", look(BEGUN, alive_until=NOW + 1)),
    ("it is done", look((*BEGUN, *ended("done", "", "finish")), job(JobState.COMPLETED))),
    ("its user held it, and cancelled the held job", look(HELD, job(JobState.COMPLETED))),
    ("cancelled in the ledger", look((*BEGUN, CANCELLED), job(JobState.NODE_FAIL))),
    ("somebody has asked it to stop", look(BEGUN, job(JobState.NODE_FAIL), asked_by="a user")),
    ("held by its user", look(REQUEUED, job(JobState.PENDING, reason="JobHeldUser"))),
    ("held by an administrator", look(REQUEUED, job(JobState.PENDING, reason="JobHeldAdmin"))),
    ("held by a requeue", look(HELD, job(JobState.PENDING, reason="job requeued in held state"))),
    ("a state that nobody knows", look(BEGUN, job(JobState.UNKNOWN))),
    ("its nodes are being cleaned", look(BEGUN, job(JobState.COMPLETING))),
    ("it ended a moment ago", look(BEGUN, job(JobState.NODE_FAIL, end_time=NOW - 119))),
    ("the wait is nearly over", look(REQUEUED, replace(DELAYED, start_time=NOW + 9))),
    (
        "its user wants it to begin tomorrow",
        look(SUBMITTED, replace(DELAYED, restart_count=0, start_time=NOW + 86400)),
    ),
    (
        "its user has put it off after a requeue",
        look(REQUEUED, replace(DELAYED, start_time=NOW + 86400)),
    ),
    (
        "a wait that does it good",
        look((*BEGUN, *STORM), DELAYED),
    ),
    ("no node, but none is excluded", look(REQUEUED, NO_NODE)),
    (
        "no node, and the excluded ones are cleared already",
        look((*AVOIDING, said(EventKind.WATCH, action="clear excluded nodes")), NO_NODE),
    ),
    ("it waits for nodes and may not take fewer", look(SUBMITTED, WAITING)),
    (
        "it has not waited for long",
        look(SUBMITTED, replace(WAITING, submit_time=NOW - 1799), shapes=SHAPES),
    ),
    (
        "it takes fewer already",
        look(SUBMITTED, replace(WAITING, node_count=2), shapes=SHAPES),
    ),
    (
        "a successor waits",
        look(
            (*LEFT, SUCCESSOR),
            job(JobState.COMPLETED),
            job(JobState.PENDING, 2, reason="Dependency"),
            continuation="chain",
        ),
    ),
]


ENDED_BY_ITS_USER: list[tuple[str, WatchedRun]] = [
    ("cancelled in Slurm while it ran", look(BEGUN, job(JobState.CANCELLED))),
    ("cancelled in Slurm while it waited", look(SUBMITTED, job(JobState.CANCELLED))),
    (
        "cancelled after a requeue",
        look(REQUEUED, job(JobState.CANCELLED, restart_count=1, node_list=None)),
    ),
    (
        "the waiting successor was cancelled",
        look(
            (*LEFT, SUCCESSOR),
            job(JobState.COMPLETED),
            job(JobState.CANCELLED, 2, node_list=None),
            continuation="chain",
        ),
    ),
]


@pytest.mark.parametrize(
    "seen", [row[1] for row in ENDED_BY_ITS_USER], ids=[row[0] for row in ENDED_BY_ITS_USER]
)
def test_what_a_user_has_ended_is_only_noted(seen: WatchedRun) -> None:
    """Slurm forgets within minutes, and what it has forgotten looks lost."""
    found = only(seen)
    assert (found.symptom, found.remedy) == (Symptom.CANCELLED, WatchRemedy.NOTE)


@pytest.mark.parametrize("requeued", [False, True])
def test_a_deadline_is_told_and_is_no_cancel(requeued: bool) -> None:
    """Slurm would end the job again at once, and nobody has cancelled anything. Slurm 22.05.8 gives
    this state to jobs that wait, such as one that was requeued for its time limit."""
    said = (*BEGUN, *ended("time_limit", "it reached its time limit", "requeue"))
    found = only(look(said if requeued else BEGUN, job(JobState.DEADLINE, restart_count=1)))
    assert (found.symptom, found.remedy) == (Symptom.ORPHANED, WatchRemedy.TELL)
    assert "deadline given to sbatch" in found.message and "hpctrain resume" in found.message


@pytest.mark.parametrize("seen", [row[1] for row in LEFT_ALONE], ids=[row[0] for row in LEFT_ALONE])
def test_what_is_left_alone(seen: WatchedRun) -> None:
    assert find_problems(seen) == []


def attempt(number: int, cause: str, begun: bool = True, **launch: object) -> list[Said]:
    """One job of a run: submitted, perhaps begun and launched, and lost if there is a cause."""
    job_id = number + 1
    entries = [said(EventKind.SUBMITTED, job_id=job_id)]
    if begun:
        entries.append(said(EventKind.ATTEMPT_STARTED, job_id=job_id))
    if launch:
        entries.append(said(EventKind.LAUNCH_STARTED, job_id=job_id, **launch))
    if cause:
        entries.append(said(EventKind.ATTEMPT_LOST, job_id=job_id, cause=cause, reason="x"))
    return entries


@pytest.mark.parametrize(
    ("cause", "state", "times"),
    [
        ("launch_failure", JobState.FAILED, 2),
        ("supervisor_lost", JobState.FAILED, 2),
        ("time_limit", JobState.TIMEOUT, 2),
        ("node_failure", JobState.NODE_FAIL, 5),
        ("host_oom", JobState.OUT_OF_MEMORY, 1),
    ],
)
def test_budgets_are_those_of_the_supervisor(cause: str, state: JobState, times: int) -> None:
    """So many lost attempts of one cause without a checkpoint may be followed by another one."""
    begun = cause != "launch_failure"
    for count in range(times + 1):
        entries = [one for n in range(count) for one in attempt(n, cause, begun)]
        found = only(look((*entries, *attempt(count, "", begun)), job(state, count + 1)))
        expected = WatchRemedy.RESUBMIT if count < times else WatchRemedy.TELL
        assert found.remedy is expected, (count, found)
    assert "left alone" in found.message


def test_progress_fills_the_budget_up() -> None:
    entries = [one for n in range(10) for one in attempt(n, "supervisor_lost", resume_step=10 * n)]
    found = only(look((*entries, *attempt(10, "")), job(JobState.FAILED, 11, exit_signal=9)))
    assert found.remedy is WatchRemedy.RESUBMIT


def test_an_attempt_that_is_closed_already_is_not_counted_twice() -> None:
    """The watcher was interrupted between closing the attempt and submitting it again."""
    before = only(look(BEGUN, job(JobState.NODE_FAIL)))
    assert before.lost is not None and before.lost.cause == "node_failure"
    closed = said(EventKind.ATTEMPT_LOST, cause="node_failure", reason="x")
    after = only(look((*BEGUN, closed), job(JobState.NODE_FAIL)))
    assert after.lost is None and after.remedy is WatchRemedy.RESUBMIT


def test_a_storm_is_waited_out() -> None:
    entries = (*BEGUN, *STORM, said(EventKind.ACTION, action="requeue", reason="storm"))
    settings = dict(failures_without_progress=99)
    calm = look(entries, job(JobState.COMPLETED, end_time=NOW - 3600), **settings)
    assert only(calm).remedy is WatchRemedy.RESUBMIT
    soon = replace(calm, now=calm.events[-1].time + 290, grace_seconds=0.0)
    assert only(soon).remedy is WatchRemedy.TELL and "so it waits" in only(soon).message


def test_what_was_told_is_not_told_again_before_something_happens() -> None:
    told = said(EventKind.WATCH, action="tell", symptom=Symptom.STALLED)
    first = look(BEGUN, RUNNING, signs_time=NOW - 5000)
    again = look((*BEGUN, told), RUNNING, signs_time=NOW - 5000)
    later = look((*BEGUN, told, LAUNCHED), RUNNING, signs_time=NOW - 5000)
    other = look((*BEGUN, said(EventKind.WATCH, action="tell", symptom=Symptom.STORM)), RUNNING)
    stalled = only(first)
    assert [is_reported(one, stalled) for one in (first, again, later, other)] == [
        *(False, True, False, False)
    ]


TELL_DISK = said(EventKind.WATCH, action="tell", symptom=Symptom.DISK_LOW)
LOW = DiskSpace(free_bytes=3 << 40, checkpoint_bytes=2 << 40)


def test_another_event_does_not_end_what_lasts() -> None:
    """A launch frees no disk; a day later it is told again, while the run goes on."""
    later = look((*BEGUN, TELL_DISK, LAUNCHED, LAUNCHED), RUNNING, disk=LOW, signs_time=NOW)
    low = only(later)
    assert low.symptom is Symptom.DISK_LOW and is_reported(later, low)
    tomorrow = replace(later, now=NOW + 86400.0)
    assert not is_reported(tomorrow, low)
    idle = replace(tomorrow, events=events((*BEGUN, TELL_DISK)))
    assert is_reported(idle, low), "nothing has happened since"
    assert not is_reported(later, replace(low, job_id=2)), "another job"


def test_a_job_that_is_held_again_is_told_again() -> None:
    told = said(EventKind.WATCH, action="tell", symptom=Symptom.ENVIRONMENT_HELD)
    elsewhere = said(EventKind.ATTEMPT_STARTED, job_id=2)
    save = said(EventKind.CONTROL, action="save")
    resumed = said(EventKind.CONTROL, action="resume")
    stands = [(told,), (told, elsewhere), (told, save)]
    over = [(told, STARTED), (told, resumed)]
    held = only(look(REQUEUED, HELD_ENVIRONMENT))
    for more, expected in [*((one, True) for one in stands), *((one, False) for one in over)]:
        seen = look((*REQUEUED, *more), HELD_ENVIRONMENT)
        assert is_reported(seen, held) is expected, more
    other = replace(held, job_id=2)
    assert not is_reported(look((*REQUEUED, told), HELD_ENVIRONMENT), other), "a new job"


def test_a_stall_after_a_sign_of_life_is_another_one() -> None:
    told = said(EventKind.WATCH, action="tell", symptom=Symptom.STALLED)
    seen = look((*BEGUN, told), RUNNING, signs_time=NOW - 5000)
    stalled = only(seen)
    assert is_reported(seen, stalled)
    assert not is_reported(replace(seen, now=NOW + 9000, signs_time=NOW), stalled)


def test_a_storm_is_told_once_while_it_lasts() -> None:
    told = said(EventKind.WATCH, action="tell", symptom=Symptom.STORM)
    failure = said(EventKind.LAUNCH_ENDED, epoch=9, cause="crash", reason="boom")
    lasting = look((*BEGUN, *STORM, told, failure, failure), RUNNING, signs_time=NOW)
    storm = RunProblem(RUN, Symptom.STORM, WatchRemedy.TELL, "5 failures", 1)
    assert is_reported(lasting, storm)
    calm = [*lasting.events[:-1], lasting.events[-1].model_copy(update={"time": NOW - 10})]
    assert not is_reported(replace(lasting, events=calm), storm), "an hour without a failure"


def test_what_was_only_told_is_done_once_it_may_be() -> None:
    """A storm of failures is waited out; its report does not keep the run from going on."""
    told = said(EventKind.WATCH, action="tell", symptom=Symptom.ORPHANED)
    entries = (*BEGUN, *STORM, said(EventKind.ACTION, action="requeue", reason="storm"), told)
    settings = dict(failures_without_progress=99)
    calm = look(entries, job(JobState.COMPLETED, end_time=NOW - 3600), **settings)
    found = only(calm)
    assert found.remedy is WatchRemedy.RESUBMIT and not is_reported(calm, found)


@pytest.mark.parametrize("exit_code", [0, 1])
@pytest.mark.parametrize("launch_cause", [None, *Cause])
def test_a_stopped_run_is_reported_as_failed_if_its_status_is(
    launch_cause: Cause | None, exit_code: int
) -> None:
    launch_end = () if launch_cause is None else ended(launch_cause, "boom", "stop")[:1]
    last_job = job(JobState.FAILED)
    for cause in (None, *Cause):
        stop = said(EventKind.ACTION, action="stop", cause=cause, exit_code=exit_code)
        seen = look((*BEGUN, *launch_end, stop), last_job)
        state = judge(seen.events, RunJobs((last_job,)), done=False).state
        reported = [problem.symptom for problem in find_problems(seen)]
        assert reported == [Symptom.FAILED] * (state is RunState.FAILED), (cause, state)
