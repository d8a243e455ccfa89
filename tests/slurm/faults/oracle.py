"""Was everything true that was said? Statements of `hpctrain status` beside what was so.

A statement is compared with two looks at the world, one before it was asked for and one after: what
was so at either moment may be said. The looks use squeue, the files of the trainer and the notes of
the storm about its own deeds, none of hpctrain's judgement. Belongs here: looking, comparing. Does
not belong here: when to ask, and whom (see `storm_witness`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from targets import Deed, DeedKind, QueuedJob, Row, Target, queue

from hpctrain.checkpoints.publish import published_steps

# The row of a step that is followed by an evaluation is written after that.
EVALUATE_EVERY_STEPS = 35
# What was so for less than this may be missed by a look before and one after.
_LONGEST_LOOK_SECONDS = 3.0
_CLOCK_SECONDS = 0.5
# Metrics that could not be written follow within a second of a file system that is back.
_LATE_SECONDS = 5.0
_OVER = ("DONE", "FAILED", "STOPPED", "CANCELLED", "PREPARED", "NOT SUBMITTED")
Statement = Mapping[str, Any]


@dataclass(frozen=True)
class Truth:
    """One look at one run, from `time` to `ended`. `jobs` is None when Slurm did not answer."""

    time: float
    ended: float
    jobs: tuple[QueuedJob, ...] | None
    present: bool
    done: bool
    row: Row | None
    resume_step: int
    progress_time: float | None
    checkpoint: int

    @property
    def live(self) -> tuple[QueuedJob, ...]:
        return tuple(job for job in self.jobs or () if job.is_live)


@dataclass(frozen=True)
class Falsehood:
    """Something that was said of a run and was not so. `claim` is the same each time it is said."""

    run_id: str
    claim: str
    told: str

    def __str__(self) -> str:
        return f"{self.run_id}: {self.claim}; told: {self.told}"


def look(targets: Sequence[Target]) -> dict[str, Truth]:
    """The truth about each run, with one squeue for all."""
    if not targets:
        return {}
    began_at = time.time()
    seen = queue(targets[0].sandbox)
    found = {target.run_id: _look_at(target, seen, began_at) for target in targets}
    ended_at = time.time()
    return {run_id: replace(truth, ended=ended_at) for run_id, truth in found.items()}


def _look_at(target: Target, seen: tuple[QueuedJob, ...] | None, began_at: float) -> Truth:
    words = f"hpctrain:{target.run_id}"
    return Truth(
        time=began_at,
        ended=began_at,
        jobs=None if seen is None else tuple(job for job in seen if job.comment == words),
        present=target.directory.exists(),
        done=target.done,
        row=target.newest_row(),
        resume_step=_resume_step(target.directory / "ledger.jsonl"),
        progress_time=target.progress().get("time"),
        checkpoint=max(published_steps(target.directory / "checkpoints"), default=0),
    )


def _resume_step(ledger: Path) -> int:
    """Where the newest launch went on."""
    found = 0
    with contextlib.suppress(OSError):
        for line in ledger.read_text(errors="replace").splitlines():
            if '"launch_started"' in line:
                with contextlib.suppress(ValueError):
                    found = json.loads(line).get("resume_step") or 0
    return found


def falsehoods(
    said: Statement, before: Truth, after: Truth, deeds: Sequence[Deed], *, here: bool = True
) -> list[Falsehood]:
    """What is not so in one row of `hpctrain status`. `here`: asked on the run's own cluster."""
    if not (before.present and after.present) or _was_away(before, after, deeds):
        return []
    claims = [*_of_deeds(said, after, deeds)]
    if after.ended - before.time <= _LONGEST_LOOK_SECONDS:
        claims += _of_state(said, before, after, here=here)
        claims += _of_training(said, before, after, written=not _just_away(before, after, deeds))
    told = json.dumps({key: value for key, value in said.items() if value is not None})
    return [Falsehood(str(said["run_id"]), claim, told) for claim in claims]


def _was_away(before: Truth, after: Truth, deeds: Sequence[Deed]) -> bool:
    """There was nothing to read for a part of the time."""
    away = (deed for deed in deeds if deed.kind is DeedKind.DIRECTORY_AWAY)
    return any(deed.time <= after.ended and deed.until >= before.time for deed in away)


def _just_away(before: Truth, after: Truth, deeds: Sequence[Deed]) -> bool:
    """Rows of metrics that could not be written are still on their way."""
    away = (DeedKind.DIRECTORY_AWAY, DeedKind.READ_ONLY)
    return any(
        deed.kind in away and deed.time <= after.ended and before.time <= deed.until + _LATE_SECONDS
        for deed in deeds
    )


def _of_state(said: Statement, before: Truth, after: Truth, *, here: bool) -> list[str]:
    """The state and the job against Slurm's own words and the done marker."""
    state, claims = said["state"], []
    if state == "DONE" and not after.done:
        claims.append("said to be DONE without a done marker")
    if before.jobs is None or after.jobs is None:
        return claims
    same = {job.job_id for job in before.live} & {job.job_id for job in after.live}
    if state in _OVER and state != "DONE" and same:
        claims.append(f"said to be {state} while job {min(same)} runs or waits")
    states = {job.state for job in (*before.jobs, *after.jobs)} | _passed(before, after)
    if state == "RUNNING" and not states & {"RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING"}:
        claims.append("said to be RUNNING without a job that holds nodes")
    if state == "PENDING" and not states & {"PENDING", "COMPLETING"}:
        claims.append("said to be PENDING without a job that waits")
    if state == "UNKNOWN" and here and same:
        claims.append("said to be UNKNOWN although Slurm knows its job")
    own = {job.job_id for job in (*before.jobs, *after.jobs)}
    if state in ("RUNNING", "PENDING") and own and said["job_id"] not in own:
        claims.append(f"said to be job {said['job_id']}, which is not of this run")
    return claims


def _passed(before: Truth, after: Truth) -> set[str]:
    """States that a job went through between the looks: it waits before it runs, and runs before it
    ends."""
    earlier = {job.job_id: job for job in before.jobs or ()}
    passed = set()
    for job in after.jobs or ():
        was = earlier.get(job.job_id)
        if was is None and job.state != "PENDING":
            passed.add("PENDING")
        if (was is None or was.state == "PENDING") and not job.is_live:
            passed.add("RUNNING")
    return passed


def _of_training(said: Statement, before: Truth, after: Truth, *, written: bool) -> list[str]:
    """Steps, checkpoint and age against the trainer's own files.

    `written`: metrics.jsonl has all that was trained.
    """
    claims = []
    step, saved, age = said["step"], said["checkpoint_step"], said["updated_seconds_ago"]
    if step is not None and after.row is not None and before.row is not None:
        newest = max(before.row.step, after.row.step, after.resume_step)
        newest += (newest + 1) % EVALUATE_EVERY_STEPS == 0
        if step > newest and written:
            claims.append(f"said to be at step {step}, beyond what was trained")
        elif step < _lowest_step(before):
            claims.append("said to be at a step before the checkpoint that it goes on from")
    if saved is not None and saved > after.checkpoint:
        claims.append(f"said to have a checkpoint of step {saved}, which is not published")
    if age is not None and before.progress_time and after.progress_time:
        oldest = after.ended - before.progress_time + _CLOCK_SECONDS
        newest_age = before.time - after.progress_time - _CLOCK_SECONDS
        if not newest_age <= age <= oldest:
            claims.append("the age of its last sign of life is wrong")
    return claims


def _lowest_step(before: Truth) -> int:
    """A run that has been somewhere is not told to be at its beginning.

    Steps since the newest checkpoint may be lost; those before it are not.
    """
    assert before.row is not None
    return min(before.resume_step, before.row.step)


def _of_deeds(said: Statement, after: Truth, deeds: Sequence[Deed]) -> list[str]:
    """A state that only a person can bring about, where nobody did."""
    kinds = {deed.kind for deed in deeds if deed.time <= after.ended}
    state = said["state"]
    if state == "CANCELLED" and DeedKind.CANCELLED not in kinds:
        return ["said to be CANCELLED, and nobody has cancelled it"]
    if state == "STOPPED" and not kinds & {DeedKind.STOPPED, DeedKind.HELD}:
        return ["said to be STOPPED, and nobody has asked for that"]
    if state in ("PREPARED", "NOT SUBMITTED") and after.jobs:
        return [f"said to be {state}, and Slurm has a job of it"]
    return []
