"""What makes a checkpoint directory good, and every way to make it bad."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoints.manifest import (
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


DAMAGE = [
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
