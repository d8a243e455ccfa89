"""Run directories of trainers that are no engine of hpctrain, in every state and at every level.

Submitted by the code that submits real ones; what the trainer has done is made up. It trains a
step in two seconds, reports every tenth one (its loss, and nothing else), saves every twentieth.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.durable import append_line, replace_text
from hpctrain.job.run_directory import write_run_directory
from hpctrain.job.trainer_run import prepare_any
from hpctrain.records.exit_records import write_exit_record
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.manifest import MANIFEST_NAME, Manifest, checkpoint_name, digest_file
from hpctrain.records.run_records import (
    DoneMarker,
    ExitRecord,
    Progress,
    SaveRecord,
    StepMetrics,
    append_metrics,
    append_save,
    write_record,
)
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

NOW = 1_800_000_000.0
STEP_SECONDS, REPORT_STEPS, SAVE_STEPS, TARGET_STEP = 2.0, 10, 20, 60
# What a spec adds for each level.
_OF_LEVEL = (
    "",
    "  checkpoint: {path: 'checkpoint-{step}', complete: {files: [state.json]}}\n",
    "  signal: {save: TERM, seconds: 60s}\n",
    "  metrics: [{output: 'step (?P<step>\\d+) loss (?P<loss>\\S+)'}]\n",
)
STATES = ("waiting", "running", "preempted", "resumed", "failed", "stopped", "done")
_JOB = 4711


@dataclass(frozen=True)
class TrainerRun:
    """A run in a state at the time `now`; `slurm` knows its job.

    `level`: 0 to 3, with reports of steps. `target_step`: None for a run that ends with a file.
    """

    run: RunFiles
    slurm: FakeSlurm
    level: int
    state: str
    target_step: int | None
    now: float


def spec_text(level: int, *, name: str = "mine", done: str = f"step: {TARGET_STEP}") -> str:
    words = "[python, train.py" + (", --resume, '{resume}']" if level else "]")
    added = "".join(_OF_LEVEL[: level + 1])
    trainer = f"trainer:\n  command: {words}\n  done: {{{done}}}\n{added}"
    return f"name: {name}\n{trainer}resources: {{gpus: 16}}\n"


def trainer_run(
    place: Path, state: str, level: int = 3, *, by_file: bool = False, name: str = "mine"
) -> TrainerRun:
    """Make a run below `place`/runs; `by_file`: it ends with a file and not at a step."""
    done = "file: final/model.safetensors" if by_file else f"step: {TARGET_STEP}"
    submitted = _submitted(spec_text(level, name=name, done=done))
    directory = place / "runs" / submitted.name
    shutil.copytree(submitted, directory, symlinks=True)
    run = RunFiles(RunLayout(directory))
    target = None if by_file else TARGET_STEP
    story = _Story(run.layout, level, target)
    story.write(state)
    slurm = FakeSlurm()
    job = {
        "waiting": JobRecord(_JOB, state=JobState.PENDING, reason="Priority"),
        "preempted": JobRecord(_JOB, state=JobState.PENDING, reason="BeginTime", restart_count=1),
        "running": JobRecord(_JOB, state=JobState.RUNNING, restart_count=0),
        "resumed": JobRecord(_JOB, state=JobState.RUNNING, restart_count=1),
        "failed": JobRecord(_JOB, state=JobState.FAILED, restart_count=0, exit_code=1),
    }.get(state)
    if job is not None:
        slurm.records[_JOB] = job
    return TrainerRun(run, slurm, level, state, target, story.now)


@functools.cache
def _submitted(text: str) -> Path:
    """Write the directory of a run, once for all tests of this process that copy it."""
    place = Path(tempfile.mkdtemp(prefix="trainer-runs-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    (place / "train.py").write_text("print('step 1 loss 1.0')\n")
    (place / "mine.yaml").write_text(text)
    (place / "runs").mkdir()
    prepared = prepare_any(place / "mine.yaml", "h100x16", runs=place / "runs")
    return write_run_directory(prepared, place / "runs").directory


class _Story:
    """Writes the records of one run, launch by launch."""

    def __init__(self, layout: RunLayout, level: int, target: int | None) -> None:
        self._layout, self._level, self._target = layout, level, target
        self._time, self._epoch = NOW - 3600.0, 0

    def write(self, state: str) -> None:
        self._say(EventKind.SUBMITTED, job_id=_JOB)
        if state == "waiting":
            return
        self._time += 600
        if state in ("preempted", "resumed"):
            self._launch(0, 40)
            self._ends("preempted", "the job is being preempted", "requeue", 40)
        if state == "resumed":
            self._time += 300
            self._launch(40 if self._level else 0, 50)
            self._time += 7
        if state in ("running", "failed", "stopped", "done"):
            self._launch(0, TARGET_STEP if state == "done" else 43)
        if state == "failed":
            self._exits()
            self._ends("crash", "rank 3 on n0 ended with 1", "stop", 43)
        elif state == "stopped":
            self._ends("stopped", "stopped by anna", "stop", 43)
        elif state == "done":
            self._ends("done", "it has reached its end", "finish", TARGET_STEP)
            saved = self._saved(TARGET_STEP)
            name = checkpoint_name(saved) if saved else ""
            step = self._step(TARGET_STEP)
            marker = DoneMarker(step=step, epoch=self._epoch, checkpoint=name, time=self._time)
            write_record(self._layout.done, marker)
        os.utime(self._layout.ledger, (self._time, self._time))

    @property
    def now(self) -> float:
        """Seconds after what has happened last, or hours after the end of the run."""
        return self._time + 5

    def _say(self, kind: EventKind, **fields: object) -> None:
        event = Event.model_validate({"event": kind, "time": self._time, **fields})
        append_line(self._layout.ledger, event.model_dump_json(exclude_defaults=True))

    @property
    def _attempt(self) -> dict[str, object]:
        return {"job_id": _JOB, "restart_count": self._epoch - 1}

    def _saved(self, step: int) -> int:
        return step // SAVE_STEPS * SAVE_STEPS if self._level else 0

    def _step(self, step: int) -> int:
        """The step that is known: the last one reported or saved."""
        reported = step // REPORT_STEPS * REPORT_STEPS if self._level == 3 else 0
        return max(reported, self._saved(step))

    def _launch(self, start: int, end: int) -> None:
        layout, self._epoch = self._layout, self._epoch + 1
        self._say(EventKind.ATTEMPT_STARTED, **self._attempt, nodes="n[0-1]")
        self._time += 20
        self._say(EventKind.LAUNCH_STARTED, **self._attempt, epoch=self._epoch, resume_step=start)
        self._time += 40
        begun = self._time
        for step in range(start + 1, end + 1):
            self._time = begun + STEP_SECONDS * (step - start)
            if self._level == 3 and step % REPORT_STEPS == 0:
                append_metrics(layout, self._row(step))
            if self._level and step % SAVE_STEPS == 0:
                self._save(step)
        write_record(
            layout.progress,
            Progress(
                epoch=self._epoch,
                phase="training",
                step=self._step(end),
                target_step=self._target,
                time=self._time,
                step_seconds=STEP_SECONDS if self._level == 3 else None,
                loss=2.5 if self._level == 3 else None,
                checkpoint_step=self._saved(end) or None,
            ),
        )
        logs = layout.attempt_logs(_JOB, self._epoch - 1)
        logs.mkdir(parents=True)
        for node in range(2):
            replace_text(logs / f"step0-node{node:04d}.log", f"step {end} loss 2.5\n")
        replace_text(layout.job_log(_JOB), f"launch {self._epoch}\n")

    def _row(self, step: int) -> StepMetrics:
        values = dict.fromkeys(StepMetrics.model_fields) | {"schema_version": 1, "profiled": False}
        loss = 3.0 - step / 100
        values |= {"step": step, "epoch": self._epoch, "time": self._time}
        return StepMetrics.model_validate(values | {"loss": loss, "loss_hex": loss.hex()})

    def _save(self, step: int) -> None:
        directory = self._layout.checkpoints / checkpoint_name(step)
        own = directory / f"checkpoint-{step}"
        own.mkdir(parents=True)
        (own / "weights.bin").write_bytes(bytes([step]) * 4096)
        (own / "state.json").write_text(f'{{"step": {step}}}')
        names = [f"{own.name}/{name}" for name in ("state.json", "weights.bin")]
        manifest = Manifest(
            step=step,
            epoch=self._epoch,
            engine="trainer",
            layout="2 nodes x 8 GPUs",
            world_size=16,
            consumed_samples=0,
            time=self._time,
            files=tuple(digest_file(directory, name) for name in names),
        )
        replace_text(directory / MANIFEST_NAME, manifest.sealed().model_dump_json())
        append_save(
            self._layout,
            SaveRecord(
                step=step,
                epoch=self._epoch,
                time=self._time,
                stall_seconds=None,
                publish_seconds=1.5,
                size_bytes=manifest.total_bytes,
            ),
        )

    def _exits(self) -> None:
        record = ExitRecord(
            epoch=self._epoch,
            rank=3,
            node="n0",
            outcome="crash",
            step=self._step(43),
            exit_code=1,
            time=self._time,
            message="ValueError: this is broken",
        )
        write_exit_record(self._layout, 0, record)

    def _ends(self, cause: str, reason: str, action: str, last: int) -> None:
        self._time += 10
        known = self._step(last)
        of_launch = {**self._attempt, "epoch": self._epoch, "cause": cause}
        self._say(
            EventKind.LAUNCH_ENDED,
            **of_launch,
            reason=reason,
            last_step=known,
            checkpoint_step=self._saved(last) or None,
        )
        self._time += 2
        self._say(EventKind.ACTION, **of_launch, action=action, reason=f"it was {cause}")
