"""A pass over runs on disk with a Slurm in memory: what it asks, does and writes, and when not."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from command_line import hpctrain
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, Said, ended, fabricate, said

from hpctrain.base.errors import UsageError
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import run_comment
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import Progress, write_record
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig
from hpctrain.records.watch_heartbeat import heartbeat_age_seconds, heartbeat_path
from hpctrain.runs.watch import watch
from hpctrain.runs.watch_rules import Symptom, WatchRemedy
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

BEGUN = (*SUBMITTED, STARTED, LAUNCHED)


class Slurm(FakeSlurm):
    """Counts the questions."""

    def __init__(self, *jobs: JobRecord) -> None:
        super().__init__()
        self.records = {job.job_id: job for job in jobs}
        self.asked: list[Collection[int]] = []
        self.updates: list[dict[str, object]] = []

    def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
        self.asked.append(user_ids)
        return super().jobs_of_users(user_ids)

    def update_job(self, job_id: int, **changes: object) -> None:  # type: ignore[override]
        self.updates.append({"job_id": job_id, **changes})
        super().update_job(job_id, **changes)  # type: ignore[arg-type]

    def release(self, job_id: int) -> None:
        self.updates.append({"job_id": job_id, "release": True})
        super().release(job_id)

    @property
    def client(self) -> SlurmClient:
        return cast(SlurmClient, self)


def job(state: JobState, job_id: int = 1, **more: object) -> JobRecord:
    over = {"node_list": "n0", "start_time": 1.0, "end_time": 100.0}
    fields = {**(over if state.is_ended else {}), "restart_count": 0, **more}
    return JobRecord(job_id, state=state, **fields)  # type: ignore[arg-type]


def kinds(run: RunFiles) -> list[str]:
    return [event.event.value for event in run.ledger.events()]


def configure(run: RunFiles, **settings: object) -> None:
    path = run.layout.supervise_config
    config = SuperviseConfig.model_validate_json(path.read_bytes())
    path.write_text(config.model_copy(update=settings).model_dump_json())


def test_one_question_for_all_runs(tmp_path: Path) -> None:
    for number in range(1, 6):
        again = said(EventKind.SUBMITTED, job_id=number)
        fabricate(tmp_path, f"run-{number}", (again, *ended("crash", "", "relaunch")))
    fabricate(tmp_path, "over", (*BEGUN, *ended("crash", "boom", "stop")))
    fabricate(tmp_path, "done", BEGUN, done=True)
    slurm = Slurm(*(job(JobState.RUNNING, n, start_time=time.time()) for n in range(1, 6)))
    result = watch(tmp_path, slurm.client)
    assert slurm.asked == [{os.getuid()}]
    assert (result.runs, result.open_runs, result.complete, result.seen) == (7, 5, True, ())


def test_without_act_nothing_is_done_and_nothing_is_written(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)
    before = run.layout.ledger.read_bytes()
    slurm = Slurm(job(JobState.NODE_FAIL))
    (seen,) = watch(tmp_path, slurm.client).seen
    assert (seen.symptom, seen.remedy) == (Symptom.ORPHANED, WatchRemedy.RESUBMIT)
    assert seen.outcome == "would"
    assert not slurm.scripts and run.layout.ledger.read_bytes() == before


def test_an_orphan_is_submitted_again_and_the_ledger_says_so_first(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)

    class Looking(Slurm):
        def submit(self, *arguments: object, **named: object) -> object:  # type: ignore[override]
            self.ledger = kinds(run)
            return super().submit(*arguments, **named)  # type: ignore[arg-type]

    slurm = Looking(job(JobState.NODE_FAIL))
    (seen,) = watch(tmp_path, slurm.client, act=True).seen
    assert (seen.outcome, seen.answer) == ("done", "submitted as job 2")
    assert slurm.ledger[-3:] == ["attempt_lost", "watch", "submitting"]
    lost, told, _, submitted = run.ledger.events()[-4:]
    assert (lost.job_id, lost.restart_count, lost.cause) == (1, 0, "node_failure")
    assert told.action == "resubmit" and told.user and "nodes failed" in (told.reason or "")
    assert (submitted.job_id, submitted.successor_of) == (2, None)
    assert watch(tmp_path, slurm.client, act=True).seen == (), "once is enough"


def test_the_ledger_is_read_whole_where_budgets_count(tmp_path: Path) -> None:
    """Its tail alone would show too few lost attempts, or none."""
    many = [
        entry
        for number in range(1, 4)
        for entry in (
            said(EventKind.SUBMITTED, job_id=number),
            said(EventKind.ATTEMPT_STARTED, job_id=number, restart_count=0),
            *(said(EventKind.OBSERVED, reason="x" * 200) for _ in range(200)),
            said(EventKind.ATTEMPT_LOST, job_id=number, cause="supervisor_lost", reason="x"),
        )
    ]
    last = (said(EventKind.SUBMITTED, job_id=4), said(EventKind.ATTEMPT_STARTED, job_id=4))
    run = fabricate(tmp_path, entries=(*many, *last))
    assert run.layout.ledger.stat().st_size > 4 * 16384
    slurm = Slurm(job(JobState.FAILED, 4, exit_signal=9))
    (seen,) = watch(tmp_path, slurm.client, act=True).seen
    assert seen.remedy is WatchRemedy.TELL and "3 supervisors lost" in seen.reason.replace("4", "3")
    assert not slurm.scripts


def test_a_submission_long_ago_is_found(tmp_path: Path) -> None:
    noise = [said(EventKind.OBSERVED, reason="x" * 200) for _ in range(200)]
    fabricate(tmp_path, entries=(*BEGUN, *noise))
    slurm = Slurm(job(JobState.RUNNING, start_time=time.time()))
    result = watch(tmp_path, slurm.client)
    assert result.open_runs == 1 and len(slurm.asked) == 1


# -- each remedy -----------------------------------------------------------------------------


REQUEUED = (*BEGUN, *ended("preempted", "urgent", "requeue"))
EXCLUDING = (*BEGUN, said(EventKind.ACTION, action="requeue", reason="x", excluded=("n1",)))


@pytest.mark.parametrize(
    ("entries", "queued", "settings", "change"),
    [
        (
            REQUEUED,
            job(JobState.PENDING, reason="launch failed requeued held", restart_count=1),
            {},
            {"release": True},
        ),
        (
            REQUEUED,
            job(
                JobState.PENDING,
                reason="BeginTime",
                restart_count=1,
            ),
            {},
            {"start_now": True},
        ),
        (EXCLUDING, job(JobState.PENDING, reason="BadConstraints"), {}, {"exclude_nodes": ()}),
        (
            SUBMITTED,
            job(JobState.PENDING, reason="Resources", submit_time=1.0, node_count=5),
            {
                "spare_nodes": 1,
                "shapes": tuple(
                    LaunchShape(nodes=nodes, tasks=nodes, train_config="train.json")
                    for nodes in (4, 3)
                ),
            },
            {"nodes": (3, 5)},
        ),
    ],
)
def test_remedies_of_jobs_that_wait(
    entries: tuple[Said, ...],
    queued: JobRecord,
    settings: dict[str, object],
    change: dict[str, object],
    tmp_path: Path,
) -> None:
    run = fabricate(tmp_path, entries=entries)
    configure(run, **settings)
    if queued.reason == "BeginTime":
        now = time.time()
        queued = replace(queued, submit_time=now, start_time=now + 121)
    slurm = Slurm(queued)
    (seen,) = watch(tmp_path, slurm.client, act=True).seen
    assert seen.outcome == "done", seen
    assert slurm.updates == [{"job_id": 1, **change}]
    assert EventKind.WATCH.value in kinds(run)[-2:] and not slurm.scripts


def test_a_cancelled_job_is_noted_because_slurm_forgets_it(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)
    slurm = Slurm(job(JobState.CANCELLED))
    assert watch(tmp_path, slurm.client).seen == () and len(kinds(run)) == 5
    (seen,) = watch(tmp_path, slurm.client, act=True).seen
    assert seen.outcome == "told" and kinds(run)[-1] == "cancelled"
    slurm.records.clear()
    assert watch(tmp_path, slurm.client, act=True).seen == ()


def test_what_a_person_must_know_is_told_once(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=SUBMITTED)
    slurm = Slurm()
    for expected in (["told"], []):
        # The events of these tests lie in the future.
        result = watch(tmp_path, slurm.client, act=True, grace_seconds=-1e12)
        assert [one.outcome for one in result.seen] == expected
    assert kinds(run)[-1] == "watch"


def test_a_refusal_is_told_and_the_next_pass_tries_again(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)
    slurm = Slurm(job(JobState.NODE_FAIL))
    slurm.refusal = "Invalid account"
    result = watch(tmp_path, slurm.client, act=True)
    assert result.failed and result.seen[0].answer == "Invalid account"
    slurm.refusal = ""
    assert watch(tmp_path, slurm.client, act=True).seen[0].outcome == "done"
    assert kinds(run).count("attempt_lost") == 1, "an attempt is closed once"


def test_what_has_changed_meanwhile_is_left_for_the_next_pass(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)

    class Resubmitting(Slurm):
        def jobs_of_users(self, user_ids: Collection[int]) -> dict[int, JobRecord]:
            run.ledger.append(EventKind.SUBMITTING)
            return super().jobs_of_users(user_ids)

    slurm = Resubmitting(job(JobState.NODE_FAIL))
    (seen,) = watch(tmp_path, slurm.client, act=True).seen
    assert "changed meanwhile" in seen.answer and not slurm.scripts


def test_a_standing_request_of_a_person_wins(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)
    run.layout.stop_request.write_text("somebody\n")
    slurm = Slurm(job(JobState.NODE_FAIL))
    assert watch(tmp_path, slurm.client, act=True).seen == () and not slurm.scripts


def test_a_job_that_ended_within_the_grace_waits(tmp_path: Path) -> None:
    fabricate(tmp_path, entries=BEGUN)
    slurm = Slurm(job(JobState.NODE_FAIL, end_time=time.time() - 60))
    assert watch(tmp_path, slurm.client).seen == ()
    assert len(watch(tmp_path, slurm.client, grace_seconds=59.0).seen) == 1


# -- other clusters, jobs that nobody has recorded ---------------------------------------------


def test_a_run_of_another_cluster_is_counted_and_left_alone(tmp_path: Path) -> None:
    """Both clusters see the directory of runs; job 1 of this one is somebody else's."""
    entries = (*SUBMITTED[:2], said(EventKind.SUBMITTED, job_id=1, cluster="alpha"), STARTED)
    run = fabricate(tmp_path, entries=entries)
    stranger = job(JobState.NODE_FAIL, name="innocent", cluster="fake")
    for slurm in (Slurm(), Slurm(stranger)):
        before = run.layout.ledger.read_bytes()
        result = watch(tmp_path, slurm.client, act=True, grace_seconds=0)
        assert (result.elsewhere, result.seen, result.complete) == (1, (), True)
        assert not slurm.scripts and run.layout.ledger.read_bytes() == before


def test_a_run_that_trains_is_no_orphan_whatever_slurm_knows(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN, steps=20)
    progress = Progress(epoch=1, phase="training", step=20, target_step=60, time=time.time() + 300)
    write_record(run.layout.progress, progress)  # ahead: it stays young while this machine pauses
    slurm = Slurm(job(JobState.NODE_FAIL))
    assert watch(tmp_path, slurm.client, act=True, grace_seconds=0).seen == ()
    old = progress.model_copy(update={"time": time.time() - 6})
    write_record(run.layout.progress, old)
    (seen,) = watch(tmp_path, slurm.client, act=True, grace_seconds=0).seen
    assert (seen.symptom, seen.outcome) == (Symptom.ORPHANED, "done")


def test_a_slow_step_is_a_young_sign_of_life(tmp_path: Path) -> None:
    """A step of 60 s: the sign of life is old and the next one is not due yet."""
    run = fabricate(tmp_path, entries=BEGUN, steps=20)
    progress = Progress(
        epoch=1, phase="training", step=20, target_step=60, time=time.time() - 200, step_seconds=60
    )
    write_record(run.layout.progress, progress)
    slurm = Slurm(job(JobState.NODE_FAIL))
    assert watch(tmp_path, slurm.client, act=True, grace_seconds=0).seen == ()


def test_a_job_whose_client_died_gets_its_line_in_the_ledger(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=SUBMITTED[:2])
    mark = {"comment": run_comment(run.run_id), "work_directory": str(run.layout.directory)}
    slurm = Slurm(job(JobState.PENDING, 7, cluster="fake", **mark))
    assert watch(tmp_path, slurm.client).seen[0].outcome == "would"
    (seen,) = watch(tmp_path, slurm.client, act=True).seen
    assert (seen.symptom, seen.outcome) == (Symptom.UNRECORDED, "done")
    adopted = run.ledger.events()[-1]
    assert (adopted.event, adopted.job_id, adopted.cluster) == (EventKind.ADOPTED, 7, "fake")
    assert watch(tmp_path, slurm.client, act=True).seen == ()


def test_a_run_that_failed_is_told_once(tmp_path: Path) -> None:
    stop = said(EventKind.ACTION, action="stop", reason="3 crashes", exit_code=1)
    fabricate(tmp_path, entries=(*BEGUN, ended("crash", "boom", "stop")[0], stop))
    slurm = Slurm(job(JobState.FAILED))
    for _ in range(2):
        (seen,) = watch(tmp_path, slurm.client).seen
        assert (seen.symptom, seen.outcome) == (Symptom.FAILED, "told")
    assert len(watch(tmp_path, slurm.client, act=True).seen) == 1
    assert watch(tmp_path, slurm.client, act=True).seen == (), "told already"


# -- blind, beating, alone -------------------------------------------------------------------


def test_a_silent_slurm_means_nothing_is_known(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=BEGUN)
    before = run.layout.ledger.read_bytes()
    slurm = Slurm(job(JobState.NODE_FAIL))
    slurm.away = True
    result = watch(tmp_path, slurm.client, act=True)
    assert not result.complete and result.seen == () and "Slurm" in result.blind_because[0]
    assert not heartbeat_path(tmp_path).exists()
    assert run.layout.ledger.read_bytes() == before


def test_a_ledger_that_cannot_be_read_stops_the_heartbeat_but_not_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabricate(tmp_path, "good", BEGUN)
    bad = fabricate(tmp_path, "bad", (said(EventKind.SUBMITTED, job_id=2),))
    read = type(bad.ledger).last_events

    def refuse(ledger: object, size_bytes: int) -> object:
        if ledger.path == bad.layout.ledger:  # type: ignore[attr-defined]
            raise PermissionError(13, "Permission denied")
        return read(ledger, size_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(type(bad.ledger), "last_events", refuse)
    result = watch(tmp_path, Slurm(job(JobState.NODE_FAIL)).client)
    assert [one.run_id for one in result.seen] == ["good"]
    assert not result.complete and "Permission denied" in result.blind_because[0]
    assert not heartbeat_path(tmp_path).exists()


def test_runs_of_others_are_not_ours_to_look_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fabricate(tmp_path, entries=BEGUN)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    slurm = Slurm(job(JobState.NODE_FAIL))
    result = watch(tmp_path, slurm.client, act=False)
    assert result.runs == 0 and slurm.asked == []


def test_the_heartbeat(tmp_path: Path) -> None:
    assert heartbeat_age_seconds(heartbeat_path(tmp_path)) is None
    watch(tmp_path, Slurm().client)
    beat = json.loads(heartbeat_path(tmp_path).read_text())
    assert (beat["runs"], beat["act"]) == (0, False)
    age = heartbeat_age_seconds(heartbeat_path(tmp_path))
    assert age is not None and age < 60
    elsewhere = tmp_path / "elsewhere" / "beat.json"
    watch(tmp_path, Slurm().client, heartbeat=elsewhere)
    assert elsewhere.exists()
    heartbeat_path(tmp_path).write_text("{")
    assert heartbeat_age_seconds(heartbeat_path(tmp_path)) is None


def test_two_passes_do_not_act_at_once(tmp_path: Path) -> None:
    fabricate(tmp_path, entries=BEGUN)
    slurm = Slurm(job(JobState.NODE_FAIL))
    (tmp_path / ".watch").mkdir()
    descriptor = os.open(tmp_path / ".watch" / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another pass"):
        watch(tmp_path, slurm.client, act=True)
    assert len(watch(tmp_path, slurm.client).seen) == 1, "looking needs no lock"
    os.close(descriptor)  # as at the end of its process
    assert watch(tmp_path, slurm.client, act=True).seen[0].outcome == "done"


def test_a_file_system_without_locks_is_no_place_to_act(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UsageError, match="without locks"):
        watch(tmp_path, Slurm().client, act=True)


def test_a_thousand_runs_in_two_seconds(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The tail of a ledger is enough for a run that is well. CPU time: the machine is shared."""
    noise = [said(EventKind.OBSERVED, reason="x" * 200) for _ in range(40)]
    for number in range(1, 1001):
        last = said(EventKind.SUBMITTED, job_id=number)
        over = ended("crash", "boom", "stop") if number % 2 else ()
        fabricate_fast(tmp_path, f"run-{number:04d}", (*noise, last, *over))
    now = time.time()
    records = [job(JobState.RUNNING, number, start_time=now) for number in range(2, 1001, 2)]
    slurm = Slurm(*records)
    start = time.process_time()
    result = watch(tmp_path, slurm.client)
    record_property("cpu_seconds", time.process_time() - start)
    assert (result.runs, result.open_runs, result.seen, len(slurm.asked)) == (1000, 500, (), 1)


_TEMPLATE: dict[str, str] = {}


def fabricate_fast(runs: Path, run_id: str, entries: tuple[Said, ...]) -> None:
    """As `fabricate`, without an fsync for each line."""
    directory = runs / run_id
    directory.mkdir()
    if not _TEMPLATE:
        run = fabricate(runs.parent / "template", "template")
        _TEMPLATE["supervise.json"] = run.layout.supervise_config.read_text()
    (directory / "supervise.json").write_text(_TEMPLATE["supervise.json"])
    lines = [json.dumps({"event": kind, "time": 1.0, **fields}) for kind, fields in entries]
    (directory / "ledger.jsonl").write_text("\n".join(lines) + "\n")


def test_a_job_of_an_array_counts_for_its_run(tmp_path: Path) -> None:
    run = fabricate(tmp_path, entries=SUBMITTED)
    configure(run, continuation="array")
    element = replace(job(JobState.RUNNING, 7, start_time=time.time()), array_job_id=1)
    assert watch(tmp_path, Slurm(element).client).seen == ()
    waits = replace(job(JobState.PENDING, 1, reason="Priority"), array_job_id=1)
    assert watch(tmp_path, Slurm(waits).client).seen == ()


# -- `hpctrain watch` as cron and monitoring see it: streams and exit codes ----------------------


RUN = "gpt-tiny-7f3a"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """One run whose job has died with its node."""
    monkeypatch.chdir(tmp_path)
    fake = FakeSlurm()
    fake.submit("#!/bin/sh\n")
    fake.records[1] = replace(fake.records[1], state=JobState.NODE_FAIL, end_time=1.0)
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", lambda: fake)
    fabricate(tmp_path / "runs", RUN, (*SUBMITTED, STARTED, LAUNCHED))
    return fake


def test_it_tells_what_it_would_do_and_then_does_it(slurm: FakeSlurm) -> None:
    would = hpctrain("watch")
    reason = "the supervisor of job 1 recorded no end: one of its nodes failed"
    line = f"{RUN}  orphaned: {reason}  [would resubmit]\n"
    assert (would.stdout, would.stderr, would.exit_code) == (line, "", 0)
    done = hpctrain("watch", "--act")
    assert "[resubmit: submitted as job 2]" in done.stdout and done.exit_code == 0
    again = hpctrain("watch", "--act")
    assert (again.stdout, again.stderr, again.exit_code) == ("", "", 0), "cron mails every line"


def test_json(slurm: FakeSlurm) -> None:
    document = json.loads(hpctrain("watch", "--json").stdout)["watch"]
    (seen,) = document["seen"]
    assert (seen["symptom"], seen["outcome"]) == ("orphaned", "would")
    assert document["complete"] is True and document["open_runs"] == 1


def test_silence_and_refusals_of_slurm_end_with_5(slurm: FakeSlurm) -> None:
    slurm.away = True
    blind = hpctrain("watch", "--act")
    assert blind.exit_code == 5 and "no heartbeat was written" in blind.stderr
    slurm.away, slurm.refusal = False, "Invalid account"
    refused = hpctrain("watch", "--act")
    assert refused.exit_code == 5 and "[resubmit FAILED: Invalid account]" in refused.stdout


def test_the_heartbeat_for_monitoring(slurm: FakeSlurm) -> None:
    missing = hpctrain("watch", "--check-heartbeat", "15min")
    assert missing.exit_code == 1 and "no heartbeat in runs/.watch" in missing.stderr
    assert hpctrain("watch").exit_code == 0
    assert hpctrain("watch", "--check-heartbeat", "15min").exit_code == 0
    path = Path("runs/.watch/heartbeat.json")
    path.write_text(path.read_text().replace(str(int(time.time()))[:4], "1000", 1))
    assert hpctrain("watch", "--check-heartbeat", "15min").exit_code == 1
    assert hpctrain("watch", "--check-heartbeat", "soon").exit_code == 2
    assert hpctrain("watch", "--grace", "soon").exit_code == 2


def test_the_lines_for_cron_are_whole(slurm: FakeSlurm) -> None:
    hint = hpctrain("watch", "--install-hint").stdout
    lines = [line for line in hint.splitlines() if line and not line.startswith("#")]
    cron = [line for line in lines if line.startswith("*/")]
    runs = os.path.abspath("runs")
    assert len(cron) == 2 and all(line.endswith(f"watch --act --runs {runs}") for line in cron)
    assert all(Path(line.split()[5]).is_absolute() for line in cron)
    path = next(line for line in lines if line.startswith("PATH="))
    assert path.endswith("/usr/bin:/bin")
    assert not Path("runs/.watch").exists(), "a hint does nothing"
