"""The directory that an engine writes by itself: fenced off, never taken for a checkpoint."""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoints.publish import fence_off, published_steps
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import partial_name, saving_name, unpublished_epoch
from hpctrain.supervise.evidence.run_dir_snapshot import save_in_flight


def test_a_newer_launch_takes_it_away(tmp_path: Path) -> None:
    for name in (saving_name(1), saving_name(2), partial_name(4, 1)):
        (tmp_path / name / "iter_0000004").mkdir(parents=True)
    assert fence_off(tmp_path, 2) == [saving_name(1), partial_name(4, 1)]
    assert [path.name for path in tmp_path.iterdir()] == [saving_name(2)]
    assert published_steps(tmp_path) == []


def test_names() -> None:
    assert unpublished_epoch(saving_name(12)) == unpublished_epoch(partial_name(4, 12)) == 12
    assert unpublished_epoch("iter_0000004") is None


def test_a_save_is_in_flight_while_a_checkpoint_lies_there(tmp_path: Path) -> None:
    """Not for as long as the directory is there: it is, all the launch."""
    run = RunLayout(tmp_path)
    saving = run.checkpoints / saving_name(3)
    saving.mkdir(parents=True)
    (saving / "latest_checkpointed_iteration.txt").write_text("2")
    assert not save_in_flight(run, 3)
    (saving / "iter_0000004").mkdir()
    assert save_in_flight(run, 3) and not save_in_flight(run, 2)
