"""Makes one pass over all runs, for cron: finds problems, and with `act` applies the rules.

A pass keeps no state in memory: it reads Slurm (one squeue for all runs) and the ledgers, and
writes its actions to the ledgers before it takes them. So it can be repeated, interrupted and run
from several hosts. If Slurm does not answer, nothing is done and no heartbeat is written, so that
monitoring raises an alarm. Belongs here: queries, acting, the heartbeat, the lock. Does not belong
here: problems and their remedies (`watch_rules`), cron itself, printing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError, SlurmError, UsageError
from hpctrain.base.formats import NewerFormatError
from hpctrain.job.job_queries import (
    find_jobs,
    jobs_of,
    record_found,
    slurm_of,
    with_past_jobs,
)
from hpctrain.job.job_submission import submit_jobs
from hpctrain.notify.delivery import NoticeResult
from hpctrain.records.find import RunFiles, all_runs
from hpctrain.records.jobs import ever_submitting, generation
from hpctrain.records.ledger import EventKind
from hpctrain.records.requests import read_request, user_name
from hpctrain.records.run_jobs import RunJobs
from hpctrain.records.watch_heartbeat import WatchHeartbeat, heartbeat_path, watch_directory
from hpctrain.runs.evaluations import evaluations_of_runs, submit_evaluations
from hpctrain.runs.notify import disk_space, send_notices
from hpctrain.runs.status import ObservedRun
from hpctrain.runs.watch_rules import (
    RunProblem,
    Symptom,
    WatchedRun,
    WatchRemedy,
    find_problems,
    is_reported,
)
from hpctrain.slurm.client import SlurmClient

# Between the end of a job and the pass that calls its run orphaned. The last line of its ledger may
# reach this host late (nfs(5): attributes are cached for up to acregmax = 60 s), and its user may
# be about to submit it again.
GRACE_SECONDS = 120.0
# This much of a ledger is read first; it mostly contains the newest submission.
_TAIL_BYTES = 16384
# The first two depend on budgets; what is told may have been told before the end that was read.
_NEED_WHOLE_LEDGER = (WatchRemedy.RESUBMIT, WatchRemedy.RELEASE, WatchRemedy.TELL)
# A trainer counts as silent after it has missed this many progress records.
_SIGNS_MISSED = 5


class WatchResult(BaseModel):
    """One problem and its outcome: "would", "done", "failed", or "told" (only reported)."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    symptom: Symptom
    remedy: WatchRemedy
    reason: str
    job_id: int | None
    outcome: str
    answer: str = ""


class WatchPass(BaseModel):
    """The result of a pass; `pass_time` in seconds since the epoch.

    `complete` is False if Slurm did not answer (`slurm_silent`) or a ledger could not be read.
    `elsewhere` counts runs whose jobs are on another cluster, which a pass there checks. `notices`
    are the messages that a pass with `act` has sent, or could not send.
    `evaluations`: what was done about evaluation jobs, or would be, one sentence for each.
    """

    model_config = ConfigDict(frozen=True)

    pass_time: float
    act: bool
    runs: int
    open_runs: int
    complete: bool
    elsewhere: int = 0
    blind_because: tuple[str, ...] = ()
    slurm_silent: bool = False
    seen: tuple[WatchResult, ...] = ()
    notices: tuple[NoticeResult, ...] = ()
    evaluations: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return any(one.outcome == "failed" for one in self.seen)


@dataclass
class _Survey:
    """What the run directories contain; `open` are the runs that are not done.

    `ledger_bytes`: the sizes of the ledgers of these, by run id, when they were read.
    """

    runs: int = 0
    open: list[ObservedRun] = field(default_factory=list)
    ledger_bytes: dict[str, int] = field(default_factory=dict)
    done: list[RunFiles] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def watch(
    runs: Path,
    slurm: SlurmClient,
    *,
    act: bool = False,
    heartbeat: Path | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> WatchPass:
    """Make one pass over the runs in `runs` that belong to this user.

    Raises UsageError when another pass is acting, or when the file system has no locks.
    """
    with _only_one(runs) if act else contextlib.nullcontext():
        survey = _read_runs(runs)
        silence = None
        here: list[ObservedRun] = []
        try:
            survey.open = _with_jobs(survey.open, slurm)
            here = [one for one in survey.open if one.jobs is not None and not one.jobs.elsewhere]
        except SlurmError as error:
            silence = f"Slurm does not answer: {error}"
        found = _find_new_problems(here, grace_seconds, survey.unreadable)
        blind = (*survey.unreadable, *([silence] if silence else []))
        seen = []
        for one, problem in found:
            if act:
                size_bytes = survey.ledger_bytes[one.run.run_id]
                outcome, answer = _apply_remedy(one.run, size_bytes, problem, slurm)
            elif problem.remedy is WatchRemedy.NOTE:
                continue
            else:
                outcome = "told" if problem.remedy is WatchRemedy.TELL else "would"
                answer = ""
            seen.append(
                WatchResult(
                    run_id=problem.run_id,
                    symptom=problem.symptom,
                    remedy=problem.remedy,
                    reason=problem.message,
                    job_id=problem.job_id,
                    outcome=outcome,
                    answer=answer,
                )
            )
        runs_told = [*survey.done, *(one.run for one in survey.open)] if act else []
        notices = send_notices(runs_told, grace_seconds)
        evaluations: tuple[str, ...] = ()
        if not silence:
            try:
                evaluations = submit_evaluations(evaluations_of_runs(runs), slurm, act=act)
            except SlurmError as error:
                silence = f"Slurm does not answer: {error}"
                blind = (*blind, silence)
    result = WatchPass(
        pass_time=clock.now(),
        act=act,
        runs=survey.runs,
        open_runs=sum(not one.is_over_by_ledger for one in survey.open),
        complete=not blind,
        elsewhere=0 if silence else len(survey.open) - len(here),
        blind_because=blind,
        slurm_silent=bool(silence),
        seen=tuple(seen),
        notices=notices,
        evaluations=evaluations,
    )
    if not result.complete:
        return result
    path = heartbeat or heartbeat_path(runs)
    _make(path.parent)
    beat = WatchHeartbeat(
        pass_time=result.pass_time,
        host=os.uname().nodename,
        act=act,
        runs=result.runs,
        open_runs=result.open_runs,
        sightings=len(seen),
    )
    try:
        replace_text(path, beat.model_dump_json() + "\n")
    except OSError as error:  # what the pass has found is shown all the same
        blind = (f"{path} cannot be written: {error.strerror}",)
        return result.model_copy(update={"complete": False, "blind_because": blind})
    return result


def _read_runs(runs: Path) -> _Survey:
    """Read the ledgers of this user's runs, each back to its newest submission."""
    survey = _Survey()
    for run in all_runs(runs):
        if run.owner_id != os.getuid():
            continue  # only its owner can requeue or release a job
        survey.runs += 1
        if run.unreadable:
            survey.unreadable.append(f"run {run.run_id} {run.unreadable}")
            continue
        if run.layout.done.exists():
            survey.done.append(run)
            continue
        try:
            size_bytes = run.layout.ledger.stat().st_size
            events, whole = run.ledger.last_events(_TAIL_BYTES)
            if not whole and not generation(events):
                events = run.ledger.events()
        except OSError as error:
            survey.unreadable.append(f"{run.layout.ledger}: {error.strerror}")
            continue
        except NewerFormatError as error:
            survey.unreadable.append(str(error))
            continue
        if not (ever_submitting(events) or generation(events)):
            continue  # it has never been submitted
        survey.open.append(ObservedRun(run, events, RunJobs(answered=False)))
        survey.ledger_bytes[run.run_id] = size_bytes
    return survey


def _with_jobs(opened: Sequence[ObservedRun], slurm: SlurmClient) -> list[ObservedRun]:
    """Query the jobs of all runs: one squeue, and one sacct for those that ought to have jobs."""
    events = {one.run.run_id: one.events for one in opened}
    found = find_jobs([one.run for one in opened], slurm, events, silent=False)
    going = [one.run for one in opened if not one.is_over_by_ledger]
    jobs = with_past_jobs(going, found, slurm, events)
    return [replace(one, jobs=jobs[one.run.run_id]) for one in opened]


def _find_new_problems(
    opened: Sequence[ObservedRun], grace_seconds: float, unreadable: list[str]
) -> list[tuple[ObservedRun, RunProblem]]:
    """Find problems that are not reported yet; adds runs that cannot be read to `unreadable`."""
    found: list[tuple[ObservedRun, RunProblem]] = []
    for one in opened:
        try:
            watched = snapshot(one, grace_seconds)
        except NewerFormatError as error:
            unreadable.append(str(error))
            continue
        if watched is None:
            continue
        problems = _unreported(watched)
        if any(p.remedy in _NEED_WHOLE_LEDGER for p in problems):
            problems = _unreported(replace(watched, events=one.run.ledger.events()))
        found.extend((one, problem) for problem in problems)
    return found


def snapshot(one: ObservedRun, grace_seconds: float = GRACE_SECONDS) -> WatchedRun | None:
    """Read what the rules look at in a run that is not done; None for one without settings.

    Raises NewerFormatError.
    """
    layout, config, progress = one.run.layout, one.config, one.progress
    if config is None or one.jobs is None:
        return None
    alive_until = 0.0
    if progress is not None and progress.phase != "leaving":
        # A trainer writes one record in each step, but at most one per second.
        pace_seconds = _SIGNS_MISSED * max(1.0, progress.step_seconds or 0.0)
        alive_until = progress.time + max(grace_seconds, pace_seconds)
    request = read_request(layout)
    return WatchedRun(
        run_id=one.run.run_id,
        events=one.events,
        config=config,
        jobs=one.jobs.jobs,
        now=clock.now(),
        grace_seconds=grace_seconds,
        signs_time=one.newest_sign_time,
        asked_by=request.by if request else None,
        unrecorded=one.jobs.unrecorded,
        alive_until=alive_until,
        disk=disk_space(layout, config),
        ended_by_script=one.script_end,
    )


def _unreported(watched: WatchedRun) -> list[RunProblem]:
    return [one for one in find_problems(watched) if not is_reported(watched, one)]


def _apply_remedy(
    run: RunFiles, ledger_bytes: int, problem: RunProblem, slurm: SlurmClient
) -> tuple[str, str]:
    """Record and apply a remedy, unless the run has changed; returns outcome and answer."""
    ledger, job_id = run.ledger, problem.job_id
    if run.layout.ledger.stat().st_size != ledger_bytes or read_request(run.layout):
        return "told", "the run has changed meanwhile; the next pass looks again"
    try:
        if problem.lost is not None:
            ledger.write(problem.lost.model_copy(update={"time": clock.now()}))
        ledger.append(
            EventKind.CANCELLED if problem.remedy is WatchRemedy.NOTE else EventKind.WATCH,
            job_id=job_id,
            action=problem.remedy,
            reason=f"{problem.symptom}: {problem.message}",
            symptom=problem.symptom,
            user=user_name(),
        )
    except OSError as error:
        return "failed", f"{run.layout.ledger} cannot be written: {error.strerror}"
    if problem.remedy in (WatchRemedy.TELL, WatchRemedy.NOTE):
        return "told", ""
    try:
        if problem.remedy is WatchRemedy.RESUBMIT:
            return "done", f"submitted as job {submit_jobs(run, slurm)}"
        assert job_id is not None, "all other remedies are about a job"
        slurm = slurm_of(run, slurm)
        if problem.remedy is WatchRemedy.ADOPT:
            record_found(run, jobs_of(run, slurm))
        elif problem.remedy is WatchRemedy.RELEASE:
            slurm.release(job_id)
        elif problem.remedy is WatchRemedy.START_NOW:
            slurm.update_job(job_id, start_now=True)
        elif problem.remedy is WatchRemedy.CLEAR_EXCLUDED:
            slurm.update_job(job_id, exclude_nodes=())
        elif problem.remedy is WatchRemedy.TAKE_FEWER:
            slurm.update_job(job_id, nodes=problem.nodes)
        return "done", f"job {job_id}"
    except HpctrainError as error:
        return "failed", str(error)


@contextlib.contextmanager
def _only_one(runs: Path) -> Iterator[None]:
    """Hold the lock of `runs`.

    It is never stale: the kernel frees it when its process ends (flock(2)), also on NFS.
    """
    directory = watch_directory(runs)
    _make(directory)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError("another pass of `hpctrain watch --act` is running here") from error
        except OSError as error:
            raise UsageError(
                f"{directory} is on a file system without locks ({error.strerror})",
                hint="mount it with locks (Lustre: `-o flock`), or leave `--act` out",
            ) from error
        yield
    finally:
        os.close(descriptor)


def _make(directory: Path) -> None:
    """Make the directory of lock and heartbeat. Raises UsageError where that is impossible."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(
            f"the heartbeat and the lock of `watch` need {directory}: {error.strerror}",
            hint="`--heartbeat FILE` is enough for a pass without `--act`",
        ) from error
