"""Event files, and which rows are written when."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy
import pytest
from fabricated_runs import fabricate
from tracked_runs import evaluation, follow, loss_of, row, save, shown, tracked, train
from waiting import wait_until

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import EvaluationMetrics, StepMetrics, append_metrics, lineage
from hpctrain.records.step_times import PlacedRow, rows_from
from hpctrain.records.tracking import position_file
from hpctrain.tracking.continuous import Settled, continuation, scalars, settled
from hpctrain.tracking.event_files import EventFiles
from hpctrain.tracking.follower import TrackingInUseError


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


# -- One continuous curve from rows with rewinds: what TensorBoard gets at once, and W&B when ---

Row = StepMetrics | EvaluationMetrics


def placed(rows: Iterable[Row]) -> list[PlacedRow]:
    """Rows with places 0, 1, 2, ..."""
    return [PlacedRow(one, offset) for offset, one in enumerate(rows)]


def launch(epoch: int, first: int, last: int) -> list[Row]:
    return [row(step, epoch) for step in range(first, last + 1)]


REWOUND = (*launch(1, 1, 47), *launch(2, 41, 50))


# -- at once -------------------------------------------------------------------------------------
def test_a_rewind_within_a_batch_needs_no_word() -> None:
    found = continuation(placed(REWOUND), epoch=0, step=0)
    assert [one.row for one in found.rows] == lineage([one for one in REWOUND])  # type: ignore[misc]
    assert found.rewound_to is None


def test_a_rewind_behind_written_rows_names_the_first_step() -> None:
    found = continuation(placed(launch(2, 41, 50)), epoch=1, step=47)
    assert found.rewound_to == 41
    assert [one.row.step for one in found.rows] == list(range(41, 51))


def test_rows_of_a_launch_that_was_replaced_are_left_out() -> None:
    """A rank that outlives its launch still writes what it has buffered."""
    found = continuation(placed([*launch(2, 41, 43), row(48, 1)]), epoch=2, step=40)
    assert [(one.row.step, one.row.epoch) for one in found.rows] == [(41, 2), (42, 2), (43, 2)]


def test_a_late_evaluation_completes_its_row_or_stands_alone() -> None:
    here = continuation(placed([row(9), row(10), evaluation(10, 2, 3.5)]), epoch=0, step=0)
    assert [one.row.eval_loss for one in here.rows] == [None, 3.5] and not here.late
    alone = continuation(placed([evaluation(10, 2, 3.5), row(11, 2)]), epoch=1, step=10)
    assert [late.step for late in alone.late] == [10] and alone.rewound_to is None


def test_a_loss_that_is_not_finite_is_shown() -> None:
    value = scalars(row(3, loss=float("inf")).model_copy(update={"loss": None}))["train/loss"]
    assert value == float("inf")


# -- when it is settled --------------------------------------------------------------------------
def behind(
    rows: Iterable[Row],
    saves: Iterable[tuple[int, int]] = (),
    *,
    epoch: int = 0,
    step: int = 0,
    over: bool = False,
) -> Settled:
    lines = placed(rows)
    records = [save(saved, by) for saved, by in saves]
    return settled(lines, records, epoch=epoch, step=step, end=len(lines), over=over)


def steps(found: Settled) -> list[tuple[int, int]]:
    return [(one.step, one.epoch) for one in found.rows]


def test_nothing_is_settled_before_the_first_checkpoint() -> None:
    found = behind(launch(1, 1, 9))
    assert found.rows == () and found.offset == 0


def test_rows_behind_a_checkpoint_are_settled_and_the_others_read_again() -> None:
    found = behind(launch(1, 1, 47), [(40, 1)])
    assert steps(found) == [(step, 1) for step in range(1, 41)]
    assert found.offset == 40


def test_a_checkpoint_of_a_replaced_launch_settles_nothing() -> None:
    """The second launch resumed from 20: the save at 40 is not in its past."""
    found = behind([*launch(1, 1, 47), *launch(2, 21, 30)], [(20, 1), (40, 1)])
    assert steps(found) == [(step, 1) for step in range(1, 21)]
    assert found.offset == 47, "the next look begins with the row of step 21 of the second launch"


def test_the_newest_row_waits_for_its_evaluation() -> None:
    """A launch that was asked to stop saves at 10 and leaves; the next one evaluates step 10."""
    before = behind(launch(1, 1, 10), [(10, 1)])
    assert steps(before)[-1] == (9, 1)
    after = behind([row(10, 1), evaluation(10, 2, 3.5), row(11, 2)], [(10, 1)], epoch=1, step=9)
    assert [(one.step, one.eval_loss) for one in after.rows] == [(10, 3.5)]


def test_of_a_run_that_is_over_all_rows_count() -> None:
    found = behind(REWOUND, over=True)
    assert steps(found) == [(s, 1) for s in range(1, 41)] + [(s, 2) for s in range(41, 51)]
    assert found.offset == len(REWOUND)


def test_steps_that_are_trained_again_after_they_were_written_are_counted() -> None:
    """A rollback to an older checkpoint than the newest: W&B cannot take rows back."""
    found = behind(launch(2, 21, 50), [(50, 2)], epoch=1, step=40)
    assert steps(found) == [(step, 2) for step in range(41, 50)]
    assert found.kept_first == 20


@pytest.mark.parametrize("cut", [1, 7, 40, 41, 47, 48, 56])
def test_looking_more_often_settles_the_same(cut: int) -> None:
    """Whenever the process is restarted, each step is written once, with the value that counts."""
    lines, saves = placed(REWOUND), [save(20, 1), save(40, 1), save(49, 2)]
    written: list[tuple[int, int]] = []
    offset = epoch = step = 0
    for end in (cut, len(lines)):
        seen = {(one.row.step, one.row.epoch) for one in lines[:end]}
        known = [one for one in saves if (one.step, one.epoch) in seen]
        while True:
            part = lines[offset:end]
            found = settled(part, known, epoch=epoch, step=step, end=end, over=False)
            offset = found.offset
            if not found.rows:
                break
            written += steps(found)
            epoch, step = found.epoch, found.rows[-1].step
    expected = [(s, 1) for s in range(1, 41)] + [(s, 2) for s in range(41, 50)]
    assert written == expected


# -- reading -------------------------------------------------------------------------------------
def test_a_torn_last_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    run = fabricate(tmp_path).layout
    train(run, range(1, 4))
    whole = run.metrics.read_bytes()
    run.metrics.write_bytes(whole[:-20])
    rows, offset = rows_from(run, 0)
    assert [one.row.step for one in rows] == [1, 2]
    run.metrics.write_bytes(whole)
    more, end = rows_from(run, offset)
    assert [one.row.step for one in more] == [3] and end == len(whole)
    assert rows_from(run, end) == ([], end)


def test_a_line_that_a_crash_has_cut_off_is_left_out(tmp_path: Path) -> None:
    run = fabricate(tmp_path).layout
    train(run, range(1, 4))
    run.metrics.write_bytes(run.metrics.read_bytes()[:-20])
    append_metrics(run, row(3, 2))  # ends the torn line first
    rows, end = rows_from(run, 0)
    assert [(one.row.step, one.row.epoch) for one in rows] == [(1, 1), (2, 1), (3, 2)]
    assert end == run.metrics.stat().st_size
    again, _ = rows_from(run, rows[-1].offset)
    assert again == rows[-1:], "an offset leads to its line"
