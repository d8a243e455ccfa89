"""A checkpoint counts once it is renamed under its fence; engines' own saves; retention."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from file_system_calls import FileSystemCalls

from hpctrain.base.errors import CheckpointError, StorageError
from hpctrain.checkpoints.publish import (
    TRACKER_NAME,
    Fence,
    Retention,
    StaleEpochError,
    fence_off,
    publish,
    published_steps,
    quarantine,
)
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    MANIFEST_NAME,
    partial_name,
    read_manifest,
    saving_name,
    unpublished_epoch,
)
from hpctrain.supervise.evidence.run_dir_snapshot import save_in_flight


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_appears_with_its_manifest_and_the_tracker(shelf: Any) -> None:
    manifest = shelf.write(4)
    assert published_steps(shelf.root) == []
    directory = publish(shelf.root, manifest, Fence(1, lambda: 1))
    assert read_manifest(directory) == manifest.sealed()
    assert (shelf.root / TRACKER_NAME).read_text() == "4"
    assert names(shelf.root) == ["iter_0000004", TRACKER_NAME]


def test_a_stale_launch_cannot_publish(shelf: Any) -> None:
    manifest = shelf.write(4, epoch=1)
    with pytest.raises(StaleEpochError, match="epoch 1 is stale: epoch 2 owns the run"):
        publish(shelf.root, manifest, Fence(1, lambda: 2))
    assert published_steps(shelf.root) == []
    assert not (shelf.root / TRACKER_NAME).exists()


@pytest.mark.parametrize("passed_checks", [1, 2])
def test_a_newer_launch_that_comes_in_between_wins(shelf: Any, passed_checks: int) -> None:
    """The stale writer passes one or both of its checks, then the newer launch fences it off."""
    manifest = shelf.write(4, epoch=1)
    asked = 0

    def current_epoch() -> int:
        nonlocal asked
        asked += 1
        if asked == passed_checks:
            assert fence_off(shelf.root, 2) == [partial_name(4, 1)]
        return 1 if asked <= passed_checks else 2

    with pytest.raises(StaleEpochError, match="epoch 2 owns the run"):
        publish(shelf.root, manifest, Fence(1, current_epoch))
    assert names(shelf.root) == []


def test_epochs_that_do_not_reach_up_to_this_launch_are_a_fault_of_storage(shelf: Any) -> None:
    """A directory that is away, an older one at its place: no word about who owns the run."""
    manifest = shelf.write(4, epoch=2)

    def away() -> int:
        raise FileNotFoundError(2, "No such file or directory", "epochs")

    for current_epoch, error in ((lambda: 1, StorageError), (away, FileNotFoundError)):
        with pytest.raises(error) as caught:
            publish(shelf.root, manifest, Fence(2, current_epoch))
        assert not isinstance(caught.value, StaleEpochError)
    assert publish(shelf.root, manifest, Fence(2, lambda: 2)).name == "iter_0000004"


@pytest.mark.parametrize("name", ["fsync_file", "fsync_directory", "point_tracker_to", "os.rename"])
def test_publishing_goes_on_where_a_fault_of_storage_has_ended_it(
    shelf: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    manifest = shelf.write(4)
    with monkeypatch.context() as broken:

        def fail(*_: object) -> None:
            raise OSError(116, "Stale file handle")

        broken.setattr(f"hpctrain.checkpoints.publish.{name}", fail)
        with pytest.raises(OSError, match="Stale file handle"):
            publish(shelf.root, manifest, Fence(1, lambda: 1))
    publish(shelf.root, manifest, Fence(1, lambda: 1))
    assert names(shelf.root) == ["iter_0000004", TRACKER_NAME]
    assert (shelf.root / TRACKER_NAME).read_text() == "4"


def test_files_that_are_gone_with_the_whole_directory_were_taken_by_nobody(shelf: Any) -> None:
    manifest = shelf.write(4)
    away = shelf.root.with_name("away")

    def taken() -> int:
        if shelf.root.exists():
            shelf.root.rename(away)
            return 1
        raise FileNotFoundError(2, "No such file or directory", "epochs")

    with pytest.raises(FileNotFoundError):
        publish(shelf.root, manifest, Fence(1, taken))
    assert not shelf.root.exists()
    away.rename(shelf.root)
    publish(shelf.root, manifest, Fence(1, lambda: 1))


def test_fence_off_leaves_published_and_own_ones(shelf: Any) -> None:
    shelf.save(2)
    shelf.write(4, epoch=1)
    shelf.write(6, epoch=2)
    shelf.write(6, epoch=3)
    assert fence_off(shelf.root, 3) == [partial_name(4, 1), partial_name(6, 2)]
    assert names(shelf.root) == ["iter_0000002", partial_name(6, 3), TRACKER_NAME]
    assert fence_off(shelf.root, 3) == []


def test_a_file_that_is_missing_or_short_keeps_it_from_counting(shelf: Any) -> None:
    manifest = shelf.write(4)
    partial = shelf.root / partial_name(4, 1)
    (partial / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="has 5 bytes instead of 1500"):
        publish(shelf.root, manifest, Fence(1, lambda: 1))
    assert not (shelf.root / TRACKER_NAME).exists()
    manifest = shelf.write(6)
    (shelf.root / partial_name(6, 1) / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp") as caught:
        publish(shelf.root, manifest, Fence(1, lambda: 1))
    assert not isinstance(caught.value, StaleEpochError)  # nobody took anything away
    assert 6 not in published_steps(shelf.root)


def test_a_good_checkpoint_of_the_same_step_is_kept(shelf: Any) -> None:
    directory = shelf.save(4, epoch=1)
    before = (directory / "__0_0.distcp").read_bytes()
    assert shelf.save(4, epoch=2) == directory
    assert (directory / "__0_0.distcp").read_bytes() == before
    assert names(shelf.root) == ["iter_0000004", TRACKER_NAME]


def test_a_bad_checkpoint_of_the_same_step_is_replaced(shelf: Any) -> None:
    directory = shelf.save(4, epoch=1)
    (directory / "__0_0.distcp").unlink()
    shelf.save(4, epoch=2)
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.epoch == 2
    assert (shelf.root / "quarantine" / "iter_0000004.reason").exists()


def test_quarantine_keeps_all_and_the_reasons(shelf: Any) -> None:
    for reason in ("first", "second"):
        directory = shelf.save(4)
        quarantine(shelf.root, directory, reason)
    shelf_names = names(shelf.root / "quarantine")
    assert shelf_names == [
        "iter_0000004", "iter_0000004.2", "iter_0000004.2.reason", "iter_0000004.reason"
    ]  # fmt: skip
    assert (shelf.root / "quarantine" / "iter_0000004.2.reason").read_text() == "second\n"


def test_retention_keeps_the_newest_the_pinned_and_the_milestones(shelf: Any) -> None:
    shelf.save(1, 2, 3, 4, 5, 6, 7)
    assert Retention(shelf.root).retire(keep=2, keep_every_steps=3, pinned=[1]) == [2, 4, 5]
    assert published_steps(shelf.root) == [1, 3, 6, 7]
    assert Retention(shelf.root).retire(keep=2, keep_every_steps=None) == [1, 3]


def test_retention_counts_only_good_ones(shelf: Any) -> None:
    """With the two newest damaged, the two newest good ones stay: nothing else can be resumed."""
    shelf.save(1, 2, 3, 4, 5)
    (shelf.root / "iter_0000005" / "__0_0.distcp").unlink()
    (shelf.root / "iter_0000004" / MANIFEST_NAME).unlink()
    assert Retention(shelf.root).retire(keep=2, keep_every_steps=None) == [1]
    assert published_steps(shelf.root) == [2, 3, 4, 5]


def test_a_half_deleted_checkpoint_never_counts(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deletion dies at the first file: the name must be gone by then."""
    shelf.save(1, 2)
    calls = shutil.rmtree

    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        Retention(shelf.root).retire(keep=1, keep_every_steps=None)
    monkeypatch.setattr(shutil, "rmtree", calls)
    assert published_steps(shelf.root) == [2]
    assert (shelf.root / ".discarded-iter_0000001" / "__0_0.distcp").exists()
    fence_off(shelf.root, 2)
    assert [path.name for path in shelf.root.glob("*iter_*")] == ["iter_0000002"]


def test_what_a_deletion_left_does_not_keep_the_next_one_from_working(shelf: Any) -> None:
    """A step is deleted, saved again after a roll back, and deleted again."""
    shelf.save(1, 2)
    left = shelf.root / ".discarded-iter_0000001"
    left.mkdir()
    (left / "__0_0.distcp").touch()
    assert Retention(shelf.root).retire(keep=1, keep_every_steps=None) == [1]
    assert [path.name for path in shelf.root.glob("*iter_*")] == ["iter_0000002"]


def test_the_cost_of_retention_does_not_grow_with_what_is_kept(
    shelf: Any, file_system_calls: FileSystemCalls
) -> None:
    """Each save deletes one checkpoint; all those that `keep_every_steps` keeps are left alone."""
    retention, stats = Retention(shelf.root), []
    for step in range(1, 31):
        shelf.save(step)
        with file_system_calls.counted(shelf.root) as calls:
            retention.retire(keep=3, keep_every_steps=2)
        stats.append(calls["stat"])
    assert len(published_steps(shelf.root)) > 15
    assert stats[:3] == [1, 1, 1], "nothing can be deleted yet: no more than the directory itself"
    assert max(stats[25:]) <= max(stats[4:9]), stats


def test_retention_looks_again_at_one_that_was_saved_again(shelf: Any) -> None:
    shelf.save(1, 2, 3, 4)
    retention = Retention(shelf.root)
    assert retention.retire(keep=3, keep_every_steps=None) == [1]
    quarantine(shelf.root, shelf.root / "iter_0000004", "rolled back")
    shelf.save(4, 5, epoch=2)
    (shelf.root / "iter_0000004" / "__0_0.distcp").unlink()
    assert retention.retire(keep=3, keep_every_steps=None) == []


# -- The directory that an engine writes by itself: fenced off, never taken for a checkpoint ----


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
