"""Evaluation jobs of a run: what is wanted, what has happened, the results.

An evaluation is of one checkpoint: of a step as one launch has saved it. A command that fails is
tried once more. Belongs here: the records, what they say together, which checkpoints are still
needed. Does not belong here: submitting (`hpctrain.supervise.evaluation_jobs`), the table of a run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import append_line
from hpctrain.base.formats import refuse_newer
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, parse_record
from hpctrain.records.supervise_config import SubmitSettings

MOST_ATTEMPTS = 2
# A login node tries what Slurm refuses for so long, and so often, before it counts as failed.
_REFUSED_SECONDS = 24 * 3600.0
_LEAST_REFUSALS = 10
# Between two tries of what is refused: from the first pause, each is twice the one before.
_FIRST_PAUSE_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 1800.0
# So many checkpoints, the newest, are kept for a job that Slurm refuses.
MOST_KEPT_FOR_REFUSED = 4
Kind = Literal["submitting", "submitted", "refused", "started", "ended", "lost"]
Who = Literal["supervisor", "watch", "job"]
State = Literal["waiting", "submitting", "submitted", "running", "done", "failed", "refused"]
Key = tuple[str, int, int]


class EvaluationJob(BaseModel):
    """One job of the spec. `every_steps` None: each checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    every_steps: int | None


class EvaluationSettings(BaseModel):
    """The settings of all evaluation jobs of a run; `last_step` is evaluated in any case."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    jobs: tuple[EvaluationJob, ...]
    last_step: int
    submit_variables: tuple[str, ...] | None = None
    submission: SubmitSettings = SubmitSettings()

    def wants(self, job: EvaluationJob, step: int) -> bool:
        """Return True if the checkpoint of that step is to be evaluated by `job`."""
        return step == self.last_step or job.every_steps is None or step % job.every_steps == 0


class EvaluationEvent(Record):
    """One line. `time` is seconds since the epoch; `metrics` is absent where there are none.

    `cluster`: that of the Slurm to which a job is submitted; None in lines of older versions.
    """

    kind: Kind
    name: str
    step: int
    epoch: int
    attempt: int
    time: float
    by: Who
    job_id: int | None = None
    cluster: str | None = None
    exit_code: int | None = None
    metrics: dict[str, float] | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Refusals:
    """What sbatch has refused of one job to one submitter, since it has taken the job last."""

    count: int
    first_time: float
    last_time: float

    @property
    def final(self) -> bool:
        """True if they have lasted for so long that nobody waits any more."""
        return (
            self.last_time - self.first_time >= _REFUSED_SECONDS and self.count >= _LEAST_REFUSALS
        )

    @property
    def next_time(self) -> float:
        """When the job is tried again: the pause grows with each refusal."""
        doublings = min(self.count - 1, 10)
        return self.last_time + min(_FIRST_PAUSE_SECONDS * 2.0**doublings, _LONGEST_PAUSE_SECONDS)


RefusalsByJob = dict[tuple[str, Who], Refusals]


class EvaluationState(BaseModel):
    """How far one evaluation is, and its results; `reason`: why it has none."""

    model_config = ConfigDict(frozen=True)

    name: str
    step: int
    state: State = "waiting"
    attempt: int = 0
    job_id: int | None = None
    metrics: dict[str, float] | None = None
    reason: str = ""


class Evaluation(EvaluationState):
    """What the lines about one evaluation say together; `since_time` is that of the newest."""

    epoch: int
    cluster: str | None = None
    refused_by: Who | None = None
    refused_for_good: bool = False
    since_time: float = 0.0

    @property
    def settled(self) -> bool:
        """True if nothing more will happen: it has results, or has failed for good."""
        if self.state == "done":
            return True
        if self.state == "refused":
            return self.refused_for_good
        return self.state == "failed" and self.attempt >= MOST_ATTEMPTS

    @property
    def open(self) -> bool:
        """True if there may be a job of it in the queue."""
        return self.state in ("submitting", "submitted", "running")


def read_settings(run: RunLayout) -> EvaluationSettings | None:
    """Read the settings; None for a run without evaluation jobs.

    Raises NewerFormatError, and OSError: what cannot be read now may ask for evaluations.
    """
    try:
        text = run.evaluation_config.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return EvaluationSettings.model_validate_json(text)
    except ValidationError:
        refuse_newer(run.evaluation_config, text, EvaluationSettings)
        return None


def append_event(run: RunLayout, event: EvaluationEvent) -> None:
    """Append one line durably. Raises OSError."""
    line = event.model_dump_json(exclude_defaults=True)
    append_line(run.evaluations, line, mode=0o600)


def read_evaluations_of(run: RunLayout) -> dict[Key, Evaluation]:
    """Read what has happened, by name, step and epoch."""
    return read_history(run)[0]


def read_history(run: RunLayout) -> tuple[dict[Key, Evaluation], RefusalsByJob]:
    """Read what has happened, and the refusals of jobs. A line that was cut off is left out."""
    try:
        lines = run.evaluations.read_bytes().splitlines()
    except FileNotFoundError:
        return {}, {}
    found: dict[Key, Evaluation] = {}
    refusals: RefusalsByJob = {}
    for line in lines:
        event = parse_record(run.evaluations, line, EvaluationEvent)
        if event is None:
            continue
        key = event.name, event.step, event.epoch
        found[key] = _after(found.get(key) or _evaluation(*key), event)
        if event.kind == "submitted":
            refusals = {one: those for one, those in refusals.items() if one[0] != event.name}
        elif event.kind == "refused":
            now = Refusals(1, event.time, event.time)
            if (before := refusals.get((event.name, event.by))) is not None:
                now = replace(before, count=before.count + 1, last_time=event.time)
            refusals[event.name, event.by] = now
            # a supervisor's refusal proves nothing: a login node may be allowed what it is not
            if found[key].state == "refused" and event.by == "watch" and now.final:
                found[key] = found[key].model_copy(update={"refused_for_good": True})
    return found, refusals


def _evaluation(name: str, step: int, epoch: int) -> Evaluation:
    return Evaluation(name=name, step=step, epoch=epoch)


def _after(before: Evaluation, event: EvaluationEvent) -> Evaluation:
    """Apply one line. Results stay, and a late line of an earlier attempt changes nothing."""
    if before.state == "done" or event.attempt < before.attempt:
        return before
    reason, job_id = event.reason or "", event.job_id or before.job_id
    changed: dict[str, object] = {"attempt": event.attempt, "since_time": event.time}
    if event.kind == "refused":
        changed |= {"state": "refused", "reason": reason, "refused_by": event.by}
    elif event.kind in ("submitting", "submitted", "started"):
        state: State = "running" if event.kind == "started" else event.kind
        if event.kind == "submitted" and before.attempt == event.attempt:
            # the job may have begun, and ended, before its client recorded it
            state = "submitted" if before.state in ("submitting", "refused") else before.state
        cluster = event.cluster or before.cluster
        changed |= {"state": state, "job_id": job_id, "cluster": cluster}
    elif event.metrics is not None:
        results = {"metrics": event.metrics, "job_id": event.job_id, "reason": ""}
        changed |= {"state": "done", **results}
    else:
        changed |= {"state": "failed", "job_id": job_id, "reason": reason}
    return before.model_copy(update=changed)


def parse_metrics(path: Path) -> tuple[dict[str, float] | None, str]:
    """Read the file that a command has written: its numbers, or the reason why there are none."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None, "it wrote no {output}"
    except (OSError, ValueError) as error:
        return None, f"its {{output}} cannot be read: {error}"
    if not isinstance(document, dict) or not document:
        return None, 'its {output} is no JSON object such as {"loss": 2.5}'
    for name, value in document.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None, f"its {{output}} has no number for {name!r}"
        if not math.isfinite(value):
            return None, f"its {{output}} has {value} for {name!r}"
    return {str(name): float(value) for name, value in document.items()}, ""


def needed_steps(run: RunLayout, epochs: Mapping[int, int | None]) -> set[int]:
    """List the steps, of those on disk, whose evaluations are not settled: they must stay.

    While Slurm refuses a job, only the newest that wait for it: all would fill the disk.
    `epochs` are the launches that have saved the checkpoints, by step. Raises OSError and
    NewerFormatError, after which nothing may be deleted.
    """
    settings = read_settings(run)
    if settings is None:
        return set()
    known, refusals = read_history(run)
    refused = {name for name, _ in refusals}
    needed: set[int] = set()
    without_job: dict[str, list[int]] = {}
    for job, one in waiting_evaluations(settings, known, epochs):
        if one.open or job.name not in refused:
            needed.add(one.step)
        else:
            without_job.setdefault(job.name, []).append(one.step)
    for steps in without_job.values():
        needed.update(steps[-MOST_KEPT_FOR_REFUSED:])
    return needed


def waiting_evaluations(
    settings: EvaluationSettings, known: Mapping[Key, Evaluation], epochs: Mapping[int, int | None]
) -> list[tuple[EvaluationJob, Evaluation]]:
    """List what is wanted of the checkpoints on disk and is not settled, oldest step first."""
    found = []
    for step in sorted(epochs):
        epoch = epochs[step]
        for job in settings.jobs:
            if epoch is None or not settings.wants(job, step):
                continue
            one = known.get((job.name, step, epoch)) or _evaluation(job.name, step, epoch)
            if not one.settled:
                found.append((job, one))
    return found


def newest_of_each_step(known: Collection[Evaluation]) -> list[Evaluation]:
    """Select the evaluations of the newest save of each step, by name and step."""
    newest: dict[tuple[str, int], Evaluation] = {}
    for one in known:
        before = newest.get((one.name, one.step))
        if before is None or before.epoch < one.epoch:
            newest[one.name, one.step] = one
    return [newest[key] for key in sorted(newest, key=lambda key: (key[1], key[0]))]


@contextlib.contextmanager
def submission_lock(run: RunLayout) -> Iterator[bool]:
    """Hold the lock of whoever submits evaluations; False while another process has it.

    The kernel frees it when its process ends (flock(2)). Without locks everybody gets it.
    """
    descriptor = os.open(run.evaluations_lock, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    finally:
        os.close(descriptor)
