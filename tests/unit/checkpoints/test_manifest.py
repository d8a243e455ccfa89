"""What makes a checkpoint good, every way to make it bad, and the one to resume from."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints import discover
from hpctrain.checkpoints.discover import (
    Checkpoint,
    Decisions,
    Verified,
    checkpoints,
    select_for_resume,
    verify_all,
)
from hpctrain.checkpoints.publish import TRACKER_NAME, published_steps
from hpctrain.records.manifest import (
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    read_rank_digests,
    step_of,
    what_is_wrong,
)


def problem(directory: Path, *, deep: bool) -> str | None:
    return what_is_wrong(directory, read_manifest(directory), deep=deep)


def shard(directory: Path) -> Path:
    return directory / "__1_0.distcp"


def truncate(directory: Path) -> None:
    shard(directory).write_bytes(shard(directory).read_bytes()[:-1])


def flip_a_bit(directory: Path) -> None:
    raw = bytearray(shard(directory).read_bytes())
    raw[700] ^= 1
    shard(directory).write_bytes(raw)


def remove(directory: Path) -> None:
    shard(directory).unlink()


def remove_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).unlink()


def tear_manifest(directory: Path) -> None:
    path = directory / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:-20])


def garbage_manifest(directory: Path) -> None:
    (directory / MANIFEST_NAME).write_bytes(b"\xff\x00\xfe")


def list_nothing(directory: Path) -> None:
    manifest = read_manifest(directory)
    assert manifest is not None
    empty = manifest.model_copy(update={"files": ()})
    (directory / MANIFEST_NAME).write_text(empty.model_dump_json())


def change_manifest(directory: Path, **changes: object) -> None:
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def lose_an_entry(directory: Path) -> None:
    files = json.loads((directory / MANIFEST_NAME).read_text())["files"]
    change_manifest(directory, files=files[:1])


def lose_an_entry_and_its_file(directory: Path) -> None:
    lose_an_entry(directory)
    remove(directory)


def count_samples_differently(directory: Path) -> None:
    change_manifest(directory, consumed_samples=7)


def add_a_shard(directory: Path) -> None:
    (directory / "__2_0.distcp").write_bytes(b"")


DAMAGE = [
    (lose_an_entry, "manifest.json lists 1 of 2 files"),
    (lose_an_entry_and_its_file, "manifest.json lists 1 of 2 files"),
    (count_samples_differently, "manifest.json is not as it was written (its own SHA-256 differs)"),
    (add_a_shard, "__2_0.distcp is there, and manifest.json does not list it"),
    (truncate, "__1_0.distcp has 1499 bytes instead of 1500"),
    (remove, "__1_0.distcp cannot be read: No such file or directory"),
    (remove_manifest, "no readable manifest.json: the save did not finish"),
    (tear_manifest, "no readable manifest.json: the save did not finish"),
    (garbage_manifest, "no readable manifest.json: the save did not finish"),
    (list_nothing, "the manifest lists no files"),
]


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_checkpoint_is_good(shelf: Any, deep: bool) -> None:
    assert problem(shelf.save(4), deep=deep) is None


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_damage_is_named(
    shelf: Any, damage: Callable[[Path], None], message: str, deep: bool
) -> None:
    directory = shelf.save(4)
    damage(directory)
    assert problem(directory, deep=deep) == message


def test_a_flipped_bit_is_seen_by_the_deep_check_only(shelf: Any) -> None:
    directory = shelf.save(4)
    flip_a_bit(directory)
    assert problem(directory, deep=False) is None
    expected = "__1_0.distcp has other content than was written (SHA-256 differs)"
    assert problem(directory, deep=True) == expected


def test_a_renamed_checkpoint_is_not_of_that_step(shelf: Any) -> None:
    directory = shelf.save(4)
    moved = directory.rename(directory.with_name("iter_0000009"))
    assert problem(moved, deep=False) == "the manifest is of step 4"


def test_only_published_names_have_a_step() -> None:
    assert step_of("iter_0000012") == 12
    assert step_of("iter_12345678") == 12345678
    for name in ("iter_0000012.partial-e000001", "iter_12", "iter_0000012x", "xiter_0000012"):
        assert step_of(name) is None


def test_digests_of_all_ranks_come_together_by_name(shelf: Any) -> None:
    files = read_rank_digests(shelf.save(4))
    assert [(file.name, file.size_bytes) for file in files] == [
        ("__0_0.distcp", 1500),
        ("__1_0.distcp", 1500),
    ]


def without_seal(directory: Path) -> Path:
    """As older versions wrote it."""
    path = directory / MANIFEST_NAME
    sealed = json.loads(path.read_text())
    for name in ("file_count", "list_sha256", "writers"):
        del sealed[name]
    path.write_text(json.dumps(sealed))
    return directory


def test_a_manifest_of_an_older_version_is_good(shelf: Any) -> None:
    assert problem(without_seal(shelf.save(4)), deep=True) is None


def test_one_of_an_older_version_that_lost_an_entry(shelf: Any) -> None:
    """The shard that the engine would load is still there."""
    directory = without_seal(shelf.save(4))
    lose_an_entry(directory)
    expected = "__1_0.distcp is there, and manifest.json does not list it"
    assert problem(directory, deep=False) == expected


def test_no_line_can_be_lost_unnoticed(shelf: Any) -> None:
    """Any single line of the file: either the check fails, or the list says the same as before."""
    directory = shelf.save(4)
    path = directory / MANIFEST_NAME
    lines = path.read_text().splitlines()
    before = read_manifest(directory)
    assert before is not None and len(lines) > 20
    unnoticed = []
    for number in range(len(lines)):
        path.write_text("\n".join(lines[:number] + lines[number + 1 :]))
        if problem(directory, deep=False) is None:
            found = read_manifest(directory)
            assert found is not None and found.files == before.files
            unnoticed.append(lines[number].split(":")[0].strip(' "'))
    unsealed = {"schema_version", "file_count", "list_sha256", "writers", "library_version"}
    assert set(unnoticed) <= unsealed


def test_what_people_leave_beside_the_files_does_no_harm(shelf: Any) -> None:
    directory = shelf.save(4)
    for name in ("README", ".nfs0001", "universal.log"):
        (directory / name).write_text("")
    assert problem(directory, deep=True) is None


# -- The checkpoint to resume from, what is wrong with others, and reading every byte ----------


def select(shelf: Any, **decisions: Any) -> tuple[Checkpoint, tuple[int, ...]]:
    """The checkpoint that is chosen, and the steps of those that were rejected on the way."""
    selection = select_for_resume(shelf.root, "auto", Decisions(**decisions))
    assert selection.checkpoint is not None
    return selection.checkpoint, tuple(bad.step for bad in selection.rejected)


def test_nothing_saved_is_a_fresh_start(shelf: Any) -> None:
    assert select_for_resume(shelf.root, "auto").checkpoint is None
    shelf.write(4)  # a save that did not finish is no checkpoint
    assert select_for_resume(shelf.root, "auto").checkpoint is None


def test_a_checkpoint_that_was_out_of_reach_for_a_moment_is_not_rejected(
    shelf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf.save(2, 4)
    real, looks = discover.read_manifest, []

    def away_at_first(directory: Path) -> Manifest | None:
        looks.append(directory)
        return None if len(looks) == 1 else real(directory)

    monkeypatch.setattr(discover, "read_manifest", away_at_first)
    chosen, rejected = select(shelf)
    assert (chosen.step, rejected) == (4, ()) and published_steps(shelf.root) == [2, 4]


def test_a_directory_that_is_not_there_is_not_an_empty_one(shelf: Any) -> None:
    """Nor is a link to a file system that is not mounted."""
    with pytest.raises(FileNotFoundError, match="directory of checkpoints is not there"):
        select_for_resume(shelf.root / "absent", "auto")
    link = shelf.root / "link"
    link.symlink_to("/not-mounted/checkpoints")
    with pytest.raises(FileNotFoundError):
        select_for_resume(link, "auto")


def test_what_was_given_up_is_put_aside_and_never_deleted(shelf: Any) -> None:
    shelf.save(2, 4, 6)
    chosen, rejected = select(shelf, rejected={6: "cannot be loaded", 9: "not there any more"})
    assert (chosen.step, rejected) == (4, ())
    assert (shelf.root / "quarantine/iter_0000006.reason").read_text() == "cannot be loaded\n"
    assert (shelf.root / "quarantine/iter_0000006" / MANIFEST_NAME).exists()
    shelf.save(6, epoch=2)  # its steps are trained and saved again
    assert select(shelf)[0].step == 6


def test_a_start_at_step_0_that_a_person_wants_puts_everything_aside(shelf: Any) -> None:
    shelf.save(2, 4)
    wanted = Decisions(from_scratch="ada had the run start at step 0", loss_accepted=True)
    assert select_for_resume(shelf.root, "auto", wanted).checkpoint is None
    assert checkpoints(shelf.root) == [] and not (shelf.root / TRACKER_NAME).exists()
    kept = sorted(path.name for path in (shelf.root / "quarantine").iterdir())
    assert kept == [f"iter_000000{step}{end}" for step in (2, 4) for end in ("", ".reason")]
    # Later launches of the run: what was put aside by then proves nothing, what goes bad now does.
    later = Decisions(loss_accepted=True)
    assert select_for_resume(shelf.root, "auto", later).checkpoint is None
    (shelf.save(2, epoch=3) / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match="would lose work"):
        select_for_resume(shelf.root, "auto", later)


@pytest.mark.parametrize("tracker", ["2", "999", "garbage", "", None])
def test_the_tracker_is_never_trusted(shelf: Any, tracker: str | None) -> None:
    shelf.save(2, 4)
    (shelf.root / TRACKER_NAME).unlink()
    if tracker is not None:
        (shelf.root / TRACKER_NAME).write_text(tracker)
    chosen, rejected = select(shelf)
    assert (chosen.step, rejected) == (4, ())


def test_the_newest_is_by_number_not_by_name(shelf: Any) -> None:
    shelf.save(9_999_999, 10_000_000)  # the names sort the other way round
    assert [one.step for one in checkpoints(shelf.root)] == [10_000_000, 9_999_999]
    assert select(shelf)[0].step == 10_000_000


def test_falls_back_over_bad_ones_and_says_why(shelf: Any) -> None:
    shelf.save(2, 4, 6, 8)
    (shelf.root / "iter_0000008" / MANIFEST_NAME).unlink()
    raw = bytearray((shelf.root / "iter_0000006" / "__0_0.distcp").read_bytes())
    raw[0] ^= 0x80
    (shelf.root / "iter_0000006" / "__0_0.distcp").write_bytes(raw)
    chosen, rejected = select(shelf)
    assert (chosen.step, chosen.deep, rejected) == (4, True, (8, 6))
    quarantine = shelf.root / "quarantine"
    assert "did not finish" in (quarantine / "iter_0000008.reason").read_text()
    assert "SHA-256 differs" in (quarantine / "iter_0000006.reason").read_text()
    assert (quarantine / "iter_0000006" / "__0_0.distcp").read_bytes() == raw  # kept as it was
    assert [one.step for one in checkpoints(shelf.root)] == [4, 2]


def test_looking_moves_nothing(shelf: Any) -> None:
    (shelf.save(2, 4) / MANIFEST_NAME).unlink()
    before = sorted(shelf.root.rglob("*"))
    assert [one.good for one in checkpoints(shelf.root, "sha256")] == [False, True]
    assert sorted(shelf.root.rglob("*")) == before


def test_all_bad_is_an_error_now_and_at_the_next_try(shelf: Any) -> None:
    for step in (2, 4):
        (shelf.save(step) / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step 4: __0_0.distcp cannot be read.*; step 2: "):
        select_for_resume(shelf.root, "auto")
    with pytest.raises(CheckpointError, match="would lose work"):
        select_for_resume(shelf.root, "auto")  # they are in quarantine now


def test_a_tracker_without_checkpoints_is_an_error(shelf: Any) -> None:
    (shelf.root / TRACKER_NAME).write_text("4")
    with pytest.raises(CheckpointError, match="would lose work"):
        select_for_resume(shelf.root, "auto")


def test_rolling_back_moves_the_newer_ones_away(shelf: Any) -> None:
    """So that their steps can be saved again, by the same names."""
    shelf.save(2, 4, 6, 8)
    assert select(shelf, at_most_step=5)[0].step == 4
    assert [one.step for one in checkpoints(shelf.root)] == [4, 2]
    quarantine = shelf.root / "quarantine"
    assert (quarantine / "iter_0000006.reason").read_text() == "rolled back to step 4\n"
    assert (quarantine / "iter_0000006" / MANIFEST_NAME).exists()
    assert (shelf.root / TRACKER_NAME).read_text() == "4"
    shelf.save(6, epoch=2)
    again, _ = select(shelf, at_most_step=6)
    assert again.step == 6 and again.manifest is not None and again.manifest.epoch == 2


def test_rolling_back_over_a_bad_one(shelf: Any) -> None:
    shelf.save(2, 4, 6)
    (shelf.root / "iter_0000004" / "__0_0.distcp").unlink()
    chosen, rejected = select(shelf, at_most_step=4)
    assert (chosen.step, rejected) == (2, (4,))


@pytest.mark.parametrize("at_most_step", [0, 1])
def test_with_nothing_to_roll_back_to_nothing_newer_moves(shelf: Any, at_most_step: int) -> None:
    shelf.save(2, 4)
    (shelf.root / TRACKER_NAME).unlink()
    with pytest.raises(CheckpointError, match=f"of step {at_most_step} or before is left"):
        select_for_resume(shelf.root, "auto", Decisions(at_most_step=at_most_step))
    assert [one.step for one in checkpoints(shelf.root)] == [4, 2]


def test_without_checkpoints_a_roll_back_is_a_fresh_start(shelf: Any) -> None:
    assert select_for_resume(shelf.root, "auto", Decisions(at_most_step=4)).checkpoint is None


# -- Reading all checkpoints on demand: each bad byte is found, nothing is touched --------------


@pytest.mark.parametrize("workers", [1, 4])
def test_every_problem_is_found_and_nothing_moves(shelf: Any, workers: int) -> None:
    shelf.save(2, 4, 6, 8, 10)
    flipped = shelf.root / "iter_0000004" / "__1_0.distcp"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    shorter = shelf.root / "iter_0000006" / "__0_0.distcp"
    shorter.write_bytes(shorter.read_bytes()[:-1])
    (shelf.root / "iter_0000008" / MANIFEST_NAME).unlink()
    (shelf.root / "iter_0000010" / "__0_0.distcp").unlink()
    before = {path: path.stat().st_mtime_ns for path in shelf.root.rglob("*")}
    found = verify_all(shelf.root, workers=workers)
    assert [(one.step, one.good) for one in found] == [
        (10, False),
        (8, False),
        (6, False),
        (4, False),
        (2, True),
    ]
    problems = {one.step: one.problem or "" for one in found}
    assert "__0_0.distcp cannot be read" in problems[10]
    assert "did not finish" in problems[8]
    assert "1499 bytes instead of 1500" in problems[6]
    assert "__1_0.distcp has other content" in problems[4]
    assert {path: path.stat().st_mtime_ns for path in shelf.root.rglob("*")} == before


def test_progress_is_told_by_one_thread_at_a_time(shelf: Any) -> None:
    shelf.save(2, 4, 6)
    told: list[Verified] = []
    inside = threading.Lock()

    def progress(verified: Verified) -> None:
        assert inside.acquire(blocking=False), "two at once"
        told.append(verified)
        time.sleep(0.01)  # lets the other threads come here, if they may
        inside.release()

    assert all(one.good and one.deep for one in verify_all(shelf.root, "sha256", 4, progress))
    assert [one.files for one in told] == [1, 2, 3, 4, 5, 6]
    assert told[-1].read_bytes == told[-1].total_bytes == 6 * 1500
    assert {one.step for one in told} == {2, 4, 6}


def test_levels(shelf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` leaves out the content of large checkpoints, `size` that of all."""
    shelf.save(2)
    flipped = shelf.root / "iter_0000002" / "__1_0.distcp"
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"\xff")
    assert verify_all(shelf.root, "size")[0].good
    assert not verify_all(shelf.root, "auto")[0].good
    monkeypatch.setattr(discover, "AUTO_DEEP_LIMIT_BYTES", 100)
    assert verify_all(shelf.root, "auto")[0].good
    assert not verify_all(shelf.root, "sha256")[0].good
    assert verify_all(shelf.root / "absent") == []
