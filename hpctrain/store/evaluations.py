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

from hpctrain.durable import append_line
from hpctrain.formats import refuse_newer
from hpctrain.store.layout import RunLayout
from hpctrain.store.run_records import Record, parse_record

MOST_ATTEMPTS = 2
# So often may a login node try what Slurm refuses, before the evaluation counts as failed.
_MOST_REFUSALS = 2
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

    def wants(self, job: EvaluationJob, step: int) -> bool:
        """Return True if the checkpoint of that step is to be evaluated by `job`."""
        return step == self.last_step or job.every_steps is None or step % job.every_steps == 0


class EvaluationEvent(Record):
    """One line. `time` is seconds since the epoch; `metrics` is absent where there are none."""

    kind: Kind
    name: str
    step: int
    epoch: int
    attempt: int
    time: float
    by: Who
    job_id: int | None = None
    exit_code: int | None = None
    metrics: dict[str, float] | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Evaluation:
    """What the lines about one evaluation say together; `since_time` is that of the newest."""

    name: str
    step: int
    epoch: int
    state: State = "waiting"
    attempt: int = 0
    job_id: int | None = None
    metrics: Mapping[str, float] | None = None
    reason: str = ""
    refusals: int = 0
    refused_by: Who | None = None
    since_time: float = 0.0

    @property
    def settled(self) -> bool:
        """True if nothing more will happen: it has results, or has failed for good."""
        if self.state == "done":
            return True
        if self.state == "refused":
            return self.refused_by == "watch" and self.refusals >= _MOST_REFUSALS
        return self.state == "failed" and self.attempt >= MOST_ATTEMPTS

    @property
    def open(self) -> bool:
        """True if there may be a job of it in the queue."""
        return self.state in ("submitting", "submitted", "running")


def read_settings(run: RunLayout) -> EvaluationSettings | None:
    """Read the settings; None for a run without evaluation jobs. Raises NewerFormatError."""
    try:
        text = run.evaluation_config.read_bytes()
    except OSError:
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
    """Read what has happened, by name, step and epoch. A line that was cut off is left out."""
    try:
        lines = run.evaluations.read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    found: dict[Key, Evaluation] = {}
    for line in lines:
        event = parse_record(run.evaluations, line, EvaluationEvent)
        if event is not None:
            key = event.name, event.step, event.epoch
            found[key] = _after(found.get(key) or Evaluation(*key), event)
    return found


def _after(before: Evaluation, event: EvaluationEvent) -> Evaluation:
    """Apply one line. Results stay, and a late line of an earlier attempt changes nothing."""
    if before.state == "done" or event.attempt < before.attempt:
        return before
    now = replace(before, attempt=event.attempt, since_time=event.time)
    if event.kind == "refused":
        count = before.refusals + 1 if before.refused_by == event.by else 1
        return replace(
            now, state="refused", reason=event.reason or "", refused_by=event.by, refusals=count
        )
    if event.kind in ("submitting", "submitted", "started"):
        state: State = "running" if event.kind == "started" else event.kind
        if event.kind == "submitted" and before.attempt == event.attempt:
            # the job may have begun, and ended, before its client recorded it
            state = "submitted" if before.state in ("submitting", "refused") else before.state
        return replace(now, state=state, job_id=event.job_id or before.job_id)
    if event.metrics is not None:
        return replace(now, state="done", metrics=event.metrics, job_id=event.job_id, reason="")
    job_id = event.job_id or before.job_id
    return replace(now, state="failed", job_id=job_id, reason=event.reason or "")


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

    `epochs` are the launches that have saved the checkpoints, by step. Raises OSError and
    NewerFormatError, after which nothing may be deleted.
    """
    settings = read_settings(run)
    if settings is None:
        return set()
    known = read_evaluations_of(run)
    return {
        step
        for step, epoch in epochs.items()
        for job in settings.jobs
        if epoch is not None and settings.wants(job, step)
        if not ((found := known.get((job.name, step, epoch))) and found.settled)
    }


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
            one = known.get((job.name, step, epoch)) or Evaluation(job.name, step, epoch)
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
