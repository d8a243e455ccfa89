"""One continuous curve from rows with rewinds: what TensorBoard gets at once, and W&B when."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from fabricated_runs import fabricate
from tracked_runs import evaluation, row, save, train

from hpctrain.records.run_records import EvaluationMetrics, StepMetrics, append_metrics, lineage
from hpctrain.records.step_times import PlacedRow, rows_from
from hpctrain.tracking.continuous import Settled, continuation, settled
from hpctrain.tracking.scalars import scalars

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
