"""What makes a checkpoint directory good, and every way to make it bad."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.records.manifest import (
    MANIFEST_NAME,
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
