"""Makes one pass over all runs, for cron: finds problems, and with `act` applies the rules.

A pass keeps no state in memory: it reads Slurm (one squeue for all runs) and the ledgers, and
writes its actions to the ledgers before it takes them. So it can be repeated, interrupted and run
from several hosts. Without an answer of Slurm nothing is done and no heartbeat is written, so that
monitoring of the heartbeat raises an alarm. Belongs here: queries, acting, the heartbeat, the lock.
Does not belong here: problems and their remedies (`watch_rules`), cron itself, printing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.run_jobs import find_jobs, jobs_of, record_found, with_past
from hpctrain.actions.runs import RunFiles, all_runs
from hpctrain.actions.submit import submit_jobs
from hpctrain.actions.watch_look import Look, Remedy, Sighting, Symptom, told_already
from hpctrain.actions.watch_rules import sightings
from hpctrain.durable import replace_text
from hpctrain.errors import HpctrainError, SlurmError, UsageError
from hpctrain.formats import NewerFormatError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.jobs import generation, job_ids
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import Event, EventKind
from hpctrain.store.requests import read_request, user_name
from hpctrain.store.run_records import Progress, read_record
from hpctrain.store.supervise_config import known_supervise_config
from hpctrain.supervise.judge.documents import ActionKind
from hpctrain.supervise.run_jobs import RunJobs

# Between the end of a job and the pass that calls its run orphaned: the last line of its ledger
# may reach this host late (nfs(5): attributes are cached for up to acregmax = 60 s), and a person
# may just be submitting it again.
GRACE_SECONDS = 120.0
WATCH_DIRECTORY = ".watch"
# This much of a ledger is read first; it mostly contains the newest submission.
_TAIL_BYTES = 16384
# A trainer counts as silent after it has missed this many progress records.
_SIGNS_MISSED = 5


class Seen(BaseModel):
    """One sighting and what became of it: "would", "done", "failed", or "told"."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    symptom: Symptom
    remedy: Remedy
    reason: str
    job_id: int | None
    outcome: str
    answer: str = ""


class Pass(BaseModel):
    """What a pass has seen; `pass_time` in seconds since the epoch. `complete` is False when Slurm
    or a ledger kept silent; `slurm_silent` says that it was Slurm. `elsewhere` counts runs whose
    jobs are on another cluster, which a pass there looks after."""

    model_config = ConfigDict(frozen=True)

    pass_time: float
    act: bool
    runs: int
    open_runs: int
    complete: bool
    elsewhere: int = 0
    blind_because: tuple[str, ...] = ()
    slurm_silent: bool = False
    seen: tuple[Seen, ...] = ()

    @property
    def failed(self) -> bool:
        return any(one.outcome == "failed" for one in self.seen)


class Heartbeat(BaseModel):
    """Proof that a pass has seen everything; `pass_time` in seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pass_time: float
    host: str
    act: bool
    runs: int
    open_runs: int
    sightings: int


@dataclass(frozen=True)
class _Open:
    """A run that is not done; `over` if its supervisor has ended it for good."""

    run: RunFiles
    events: Sequence[Event]
    ledger_bytes: int
    over: bool


@dataclass
class _Survey:
    """What the run directories say, before Slurm is asked."""

    runs: int = 0
    open: list[_Open] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)


def watch_directory(runs: Path) -> Path:
    """Where passes keep their lock and heartbeat; a team that shares `runs` has one for each user,
    because nobody looks after the runs of somebody else."""
    common = runs / WATCH_DIRECTORY
    try:
        foreign = common.stat().st_uid != os.getuid()
    except OSError:
        foreign = False
    return runs / f"{WATCH_DIRECTORY}-{user_name()}" if foreign else common


def heartbeat_path(runs: Path) -> Path:
    return watch_directory(runs) / "heartbeat.json"


def watch(
    runs: Path,
    slurm: SlurmClient,
    *,
    act: bool = False,
    heartbeat: Path | None = None,
    grace_seconds: float = GRACE_SECONDS,
) -> Pass:
    """One pass over the runs in `runs` that belong to this user.

    Raises UsageError when another pass is acting, or when the file system has no locks.
    """
    with _only_one(runs) if act else contextlib.nullcontext():
        survey = _survey(runs)
        jobs, silence = _ask(slurm, survey.open)
        here = [one for one in survey.open if not silence and not jobs[one.run.run_id].elsewhere]
        found = _look_at_all(here, jobs, grace_seconds, survey.unreadable)
        blind = (*survey.unreadable, *([silence] if silence else []))
        seen = tuple(
            _deal_with(one, sighting, slurm, act=act)
            for one, sighting in found
            if act or sighting.remedy is not Remedy.NOTE
        )
    result = Pass(
        pass_time=time.time(),
        act=act,
        runs=survey.runs,
        open_runs=sum(not one.over for one in survey.open),
        complete=not blind,
        elsewhere=0 if silence else len(survey.open) - len(here),
        blind_because=blind,
        slurm_silent=bool(silence),
        seen=seen,
    )
    if result.complete:
        _beat(heartbeat or heartbeat_path(runs), result)
    return result


# -- looking -----------------------------------------------------------------------------------


def _survey(runs: Path) -> _Survey:
    survey = _Survey()
    for run in all_runs(runs):
        if run.owner_id != os.getuid():
            continue  # nobody may requeue or release the jobs of somebody else
        survey.runs += 1
        if run.unreadable:
            survey.unreadable.append(f"run {run.run_id} {run.unreadable}")
            continue
        if run.layout.done.exists():
            continue
        try:
            opened = _read(run)
        except OSError as error:
            survey.unreadable.append(f"{run.layout.ledger}: {error.strerror}")
            continue
        except NewerFormatError as error:
            survey.unreadable.append(str(error))
            continue
        if opened is not None:
            survey.open.append(opened)
    return survey


def _read(run: RunFiles) -> _Open | None:
    """The end of the ledger, back to the newest submission; None for a run that nobody has
    submitted."""
    size_bytes = run.layout.ledger.stat().st_size
    events, whole = run.ledger.last_events(_TAIL_BYTES)
    if not whole and not generation(events):
        events = run.ledger.events()
    recent = generation(events)
    if not any(event.event is EventKind.SUBMITTING for event in events) and not recent:
        return None
    words = [e for e in recent if e.event in (EventKind.ACTION, EventKind.ATTEMPT_STARTED)]
    over = bool(words) and words[-1].action in (ActionKind.STOP, ActionKind.FINISH)
    return _Open(run, events, size_bytes, over)


def _ask(slurm: SlurmClient, opened: Sequence[_Open]) -> tuple[dict[str, RunJobs], str | None]:
    """Query the jobs of each run, by run id; the second value is the error, if any."""
    events = {one.run.run_id: one.events for one in opened}
    try:
        found = find_jobs([one.run for one in opened], slurm, events, silent=False)
        gone = {
            job_id
            for one in opened
            if not one.over and not found[one.run.run_id].jobs
            for job_id in job_ids(generation(one.events))
        }
        past = slurm.past_jobs(gone)
    except SlurmError as error:
        return {}, f"Slurm does not tell: {error}"
    return {
        run_id: with_past(found[run_id], run_id, events[run_id], past) for run_id in found
    }, None


def _look_at_all(
    opened: Sequence[_Open],
    jobs: dict[str, RunJobs],
    grace_seconds: float,
    unreadable: list[str],
) -> list[tuple[_Open, Sighting]]:
    """What is to be done about each run; adds to `unreadable` those that cannot be judged."""
    found: list[tuple[_Open, Sighting]] = []
    for one in opened:
        mine = jobs[one.run.run_id]
        try:
            config = known_supervise_config(one.run.layout.supervise_config)
            progress = read_record(one.run.layout.progress, Progress)
        except NewerFormatError as error:
            unreadable.append(str(error))
            continue
        if config is None:
            continue
        look = Look(
            run_id=one.run.run_id,
            events=one.events,
            config=config,
            jobs=mine.jobs,
            now=time.time(),
            grace_seconds=grace_seconds,
            signs_time=_newest_sign(one, progress),
            asked_by=_asked_by(one.run.layout),
            unrecorded=mine.unrecorded,
            alive_until=_alive_until(progress, grace_seconds),
        )
        news = (sighting for sighting in _judged(look, one) if not told_already(look, sighting))
        found.extend((one, sighting) for sighting in news)
    return found


def _judged(look: Look, one: _Open) -> list[Sighting]:
    """The sightings; budgets need the whole ledger, so it is read where they matter."""
    found = sightings(look)
    if not any(sighting.remedy in (Remedy.RESUBMIT, Remedy.RELEASE) for sighting in found):
        return found
    whole = Look(**{**look.__dict__, "events": one.run.ledger.events()})
    return sightings(whole)


def _alive_until(progress: Progress | None, grace_seconds: float) -> float:
    """Compute until when a trainer with this progress record may be silent.

    It writes one in each step, but at most one per second. A trainer in phase `leaving` has ended.
    """
    if progress is None or progress.phase == "leaving":
        return 0.0
    pace_seconds = _SIGNS_MISSED * max(1.0, progress.step_seconds or 0.0)
    return progress.time + max(grace_seconds, pace_seconds)


def _newest_sign(one: _Open, progress: Progress | None) -> float | None:
    times = [event.time for event in one.events if event.event is not EventKind.WATCH]
    return max([*times, progress.time] if progress else times, default=None)


def _asked_by(layout: RunLayout) -> str | None:
    request = read_request(layout)
    return request.by if request else None


# -- acting ------------------------------------------------------------------------------------


def _deal_with(one: _Open, sighting: Sighting, slurm: SlurmClient, *, act: bool) -> Seen:
    outcome, answer = ("told" if sighting.remedy is Remedy.TELL else "would"), ""
    if act:
        outcome, answer = _act(one, sighting, slurm)
    return Seen(
        run_id=sighting.run_id,
        symptom=sighting.symptom,
        remedy=sighting.remedy,
        reason=sighting.words,
        job_id=sighting.job_id,
        outcome=outcome,
        answer=answer,
    )


def _act(one: _Open, sighting: Sighting, slurm: SlurmClient) -> tuple[str, str]:
    """Apply the remedy after an entry in the ledger; nothing if the run has changed meanwhile."""
    layout, ledger = one.run.layout, one.run.ledger
    if layout.ledger.stat().st_size != one.ledger_bytes or read_request(layout):
        return "told", "the run has changed meanwhile; the next pass looks again"
    if sighting.lost is not None:
        lost = sighting.lost
        ledger.append(
            EventKind.ATTEMPT_LOST,
            job_id=lost.job_id,
            restart_count=lost.restart_count,
            cause=lost.cause,
            reason=lost.reason,
        )
    kind = EventKind.CANCELLED if sighting.remedy is Remedy.NOTE else EventKind.WATCH
    ledger.append(
        kind,
        job_id=sighting.job_id,
        action=sighting.remedy,
        reason=f"{sighting.symptom}: {sighting.words}",
        symptom=sighting.symptom,
        user=user_name(),
    )
    if sighting.remedy in (Remedy.TELL, Remedy.NOTE):
        return "told", ""
    try:
        return "done", _remedy(one.run, sighting, slurm)
    except HpctrainError as error:
        return "failed", str(error)


def _remedy(run: RunFiles, sighting: Sighting, slurm: SlurmClient) -> str:
    job_id = sighting.job_id
    if sighting.remedy is Remedy.RESUBMIT:
        return f"submitted as job {submit_jobs(run, slurm)}"
    if sighting.remedy is Remedy.ADOPT:
        record_found(run, jobs_of(run, slurm))
        return f"job {job_id}"
    assert job_id is not None, "all other remedies are about a job"
    if sighting.remedy is Remedy.RELEASE:
        slurm.release(job_id)
    elif sighting.remedy is Remedy.START_NOW:
        slurm.update_job(job_id, start_now=True)
    elif sighting.remedy is Remedy.CLEAR_EXCLUDED:
        slurm.update_job(job_id, exclude_nodes=())
    elif sighting.remedy is Remedy.TAKE_FEWER:
        slurm.update_job(job_id, nodes=sighting.nodes)
    return f"job {job_id}"


@contextlib.contextmanager
def _only_one(runs: Path) -> Iterator[None]:
    """Hold the lock of `runs`.

    The kernel frees it when its process ends in any way (flock(2)), on NFS for other hosts, too, so
    it is never stale.
    """
    directory = watch_directory(runs)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError("another pass of `hpctrain watch --act` is at work here") from error
        except OSError as error:
            raise UsageError(
                f"{directory} is on a file system without locks ({error.strerror})",
                hint="mount it with locks (Lustre: `-o flock`), or leave `--act` out",
            ) from error
        yield
    finally:
        os.close(descriptor)


# -- the heartbeat -----------------------------------------------------------------------------


def _beat(path: Path, result: Pass) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beat = Heartbeat(
        pass_time=result.pass_time,
        host=os.uname().nodename,
        act=result.act,
        runs=result.runs,
        open_runs=result.open_runs,
        sightings=len(result.seen),
    )
    replace_text(path, beat.model_dump_json() + "\n")


def heartbeat_age_seconds(path: Path) -> float | None:
    """Seconds since the last pass that saw everything; None when there is no readable heartbeat."""
    try:
        beat = Heartbeat.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return time.time() - beat.pass_time
