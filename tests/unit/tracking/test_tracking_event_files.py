"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from fabricated_runs import fabricate
from tracked_runs import evaluation, follow, loss_of, row, shown, tracked, train
from waiting import wait_until

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import append_metrics
from hpctrain.records.tracking import position_file
from hpctrain.tracking.event_files import EventFiles
from hpctrain.tracking.writer_lock import TrackingInUseError


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    return fabricate(tmp_path).layout


def write(run: RunLayout) -> None:
    """One process from its start to its end."""
    files = EventFiles(run, run.tensorboard)
    files.write()
    files.close()


def losses(*parts: tuple[range, int]) -> dict[int, float]:
    """What TensorBoard is to show: float32, as it stores them."""
    return {step: float(numpy.float32(loss_of(step, by))) for steps, by in parts for step in steps}


def records(run: RunLayout) -> Iterator[int]:
    """The steps of all records with values, also of those that no longer count."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    for path in sorted(run.tensorboard.glob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            if event.HasField("summary"):
                yield event.step


def test_a_rewind_leaves_only_the_values_that_count(run: RunLayout) -> None:
    train(run, range(1, 48))
    write(run)
    train(run, range(41, 51), epoch=2)
    write(run)
    assert shown(run.tensorboard) == losses((range(1, 41), 1), (range(41, 51), 2))
    assert shown(run.tensorboard, "run/launch") == {s: 1 + (s > 40) for s in range(1, 51)}


def test_a_rewind_while_the_process_lives(run: RunLayout) -> None:
    """A relaunch within one attempt; TensorBoard reads the same file on."""
    files = EventFiles(run, run.tensorboard)
    for steps, epoch in ((range(1, 48), 1), (range(41, 44), 2), (range(31, 36), 3)):
        train(run, steps, epoch)
        files.write()
    files.close()
    expected = losses((range(1, 31), 1), (range(31, 36), 3))
    assert shown(run.tensorboard) == expected


def test_a_late_evaluation_is_beside_the_others(run: RunLayout) -> None:
    append_metrics(run, row(5, eval_loss=4.0))
    append_metrics(run, row(10))
    write(run)
    append_metrics(run, evaluation(10, 2, 3.0))
    train(run, [11], epoch=2)
    write(run)
    assert shown(run.tensorboard, "eval/loss") == {5: 4.0, 10: 3.0}
    assert list(shown(run.tensorboard)) == [5, 10, 11]


def test_nothing_is_written_twice(run: RunLayout) -> None:
    train(run, range(1, 6))
    for _ in range(3):
        write(run)
    train(run, range(6, 9))
    write(run)
    assert list(records(run)) == list(range(1, 9))
    assert len(list(run.tensorboard.glob("events.*"))) == 2, "no rows, no file"


def test_what_a_killed_process_did_not_record_is_written_again(run: RunLayout) -> None:
    train(run, range(1, 6))
    write(run)
    before = position_file(run.tensorboard).read_bytes()
    train(run, range(6, 9))
    write(run)
    # as if it had been killed before it recorded the new position, within a record
    position_file(run.tensorboard).write_bytes(before)
    newest = max(run.tensorboard.glob("events.*"))
    os.truncate(newest, newest.stat().st_size - 10)
    write(run)
    assert shown(run.tensorboard) == losses((range(1, 9), 1))


def test_what_is_behind_the_recorded_end_of_a_file_is_cut_off(run: RunLayout) -> None:
    files = EventFiles(run, run.tensorboard)
    train(run, range(1, 6))
    files.write()
    before = position_file(run.tensorboard).read_bytes()
    train(run, range(6, 9))
    files.write()
    files.close()
    position_file(run.tensorboard).write_bytes(before)
    write(run)
    assert list(records(run)) == list(range(1, 9))


def test_files_are_as_private_as_the_run(run: RunLayout) -> None:
    train(run, [1])
    write(run)
    modes = {path.name: path.stat().st_mode & 0o077 for path in run.tracking.rglob("*")}
    assert len(modes) > 3 and not any(modes.values()), modes


def test_two_processes_do_not_write_the_same_files(run: RunLayout) -> None:
    tracked(run, tensorboard=True)
    train(run, [1])
    process = follow(run)
    try:
        wait_for_steps(run, 1)
        with pytest.raises(TrackingInUseError):
            EventFiles(run, run.tensorboard)
    finally:
        process.communicate()
    assert process.returncode == 0
    write(run)


def test_a_follower_that_is_killed_is_continued(run: RunLayout) -> None:
    tracked(run, tensorboard=True)
    train(run, range(1, 48))
    first = follow(run)
    try:
        wait_for_steps(run, 47)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            first.send_signal(number)  # Slurm's are ignored: the supervisor says when it is over
        train(run, [48])
        wait_for_steps(run, 48)
    finally:
        first.kill()
        first.communicate()
    train(run, range(41, 51), epoch=2)
    second = follow(run)
    second.communicate()  # closes stdin
    assert second.returncode == 0
    assert shown(run.tensorboard) == losses((range(1, 41), 1), (range(41, 51), 2))


def wait_for_steps(run: RunLayout, count: int) -> None:
    def written() -> bool:
        return position_file(run.tensorboard).exists() and len(shown(run.tensorboard)) >= count

    wait_until(written, "written by the follower")
