"""What every trainer leaves behind, asserted alike of the real ones and of the stand-in.

The contract in words is docs/trainer-contract.md.
"""

from __future__ import annotations

from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest, what_is_wrong
from hpctrain.records.run_records import (
    DoneMarker,
    ExitRecord,
    Progress,
    TrainerExit,
    read_metrics,
    read_record,
    read_saves,
)


def assert_done(run: RunLayout, step: int, epoch: int = 1) -> None:
    """The launch has reached its target: marker, last checkpoint, progress, and one record."""
    done = read_record(run.done, DoneMarker)
    assert done is not None
    assert (done.step, done.epoch, done.checkpoint) == (step, epoch, checkpoint_name(step))
    _assert_left(run, step, epoch, "done", TrainerExit.DONE)


def assert_yielded(run: RunLayout, step: int, epoch: int = 1) -> ExitRecord:
    """The launch has been asked to leave: the last step is saved, and the target not reached."""
    assert not run.done.exists()
    return _assert_left(run, step, epoch, "yielded", TrainerExit.YIELDED)


def _assert_left(run: RunLayout, step: int, epoch: int, outcome: str, code: int) -> ExitRecord:
    (record,) = read_exit_records(run, epoch)
    assert (record.rank, record.outcome, record.exit_code, record.step) == (0, outcome, code, step)
    progress = read_record(run.progress, Progress)
    assert progress is not None
    seen = progress.epoch, progress.phase, progress.step, progress.checkpoint_step
    assert seen == (epoch, "leaving", step, step)
    assert read_metrics(run)[-1].step == step
    assert published_steps(run.checkpoints)[-1] == step
    directory = run.checkpoints / checkpoint_name(step)
    assert what_is_wrong(directory, read_manifest(directory), deep=True) is None
    assert read_saves(run)[-1].step == step
    assert not list(run.checkpoints.glob("*.partial-*")), "a save was left unfinished"
    return record
