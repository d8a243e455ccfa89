"""Telling changed data from copied ones, by reading little."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from hpctrain.base.errors import HpctrainError
from hpctrain.records import data_identity
from hpctrain.records.data_identity import (
    DataIdentity,
    InterruptedReadingError,
    compare,
    identify_file,
    identify_folder,
    read_identity,
    recorded_again,
    with_touched,
    write_identity,
)

MIB = 2**20


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """Larger than the sample of a start, and smaller than the denser one."""
    path = tmp_path / "tokens.bin"
    path.write_bytes(os.urandom(6 * MIB))
    return path


def recorded(*paths: Path, sha256: bool = False) -> DataIdentity:
    def of(path: Path) -> str | None:
        return hashlib.sha256(path.read_bytes()).hexdigest() if sha256 else None

    return DataIdentity(files=tuple(identify_file(path, of(path)) for path in paths))


def change(path: Path, place: int = 0, count: int = 1) -> None:
    """Other bytes of the same number."""
    raw = bytearray(path.read_bytes())
    raw[place : place + count] = bytes(one ^ 0xFF for one in raw[place : place + count])
    path.write_bytes(raw)
    touch(path)


def touch(path: Path) -> None:
    """Surely another time, whatever the clock's grain."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))


def test_what_nobody_touched(tokens: Path) -> None:
    found = compare(recorded(tokens))
    assert (found.changed, found.touched, found.unread) == ((), (), ())


def test_little_is_read_as_long_as_the_time_is_the_same(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, asked = recorded(tokens, sha256=True), []
    real = data_identity._sampled

    def sampled(path: Path, size_bytes: int, blocks: int) -> str:
        asked.append(blocks)
        return real(path, size_bytes, blocks)

    monkeypatch.setattr(data_identity, "_sampled", sampled)
    assert not compare(identity).changed
    assert asked == [64]


@pytest.mark.parametrize("sha256", [True, False], ids=["sidecar", "no sidecar"])
@pytest.mark.parametrize("place", [0, 3 * MIB + 17, 6 * MIB - 1])
def test_one_byte_of_a_touched_file(tokens: Path, place: int, sha256: bool) -> None:
    identity = recorded(tokens, sha256=sha256)
    change(tokens, place)
    assert compare(identity).changed == (f"{tokens} has the same size and other content",)


def test_other_content_is_seen_even_with_the_old_time(tokens: Path) -> None:
    """Somebody made the dataset anew and kept its time: a sample is enough."""
    identity, status = recorded(tokens), tokens.stat()
    change(tokens, 0, 6 * MIB)
    os.utime(tokens, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert compare(identity).changed


def test_a_copy_with_equal_bytes_is_the_same(tokens: Path) -> None:
    identity = recorded(tokens, sha256=True)
    touch(tokens)
    found = compare(identity)
    assert not found.changed and len(found.touched) == 1
    renewed = with_touched(identity, found)
    assert compare(renewed) == data_identity.DataComparison(), "the next start reads little again"


def test_another_size(tokens: Path) -> None:
    identity = recorded(tokens)
    with tokens.open("ab") as stream:
        stream.write(b"x")
    size = 6 * MIB
    assert compare(identity).changed == (f"{tokens} has {size + 1} bytes instead of {size}",)


def test_a_file_that_is_not_there_says_nothing_about_its_content(tokens: Path) -> None:
    identity = recorded(tokens)
    tokens.unlink()
    found = compare(identity)
    assert not found.changed
    assert found.unread == (f"{tokens} cannot be read: No such file or directory",)


@pytest.mark.parametrize("size", [0, 1, 65536, 64 * 65536, 64 * 65536 + 1, 700 * MIB])
@pytest.mark.parametrize("blocks", [64, 1024])
def test_the_blocks_of_a_sample_lie_within_the_file(size: int, blocks: int) -> None:
    places = list(data_identity._places(size, blocks))
    assert len(places) <= blocks and places == sorted(set(places))
    assert all(0 <= place < size for place in places)
    if size > blocks * 65536:
        assert len(places) == blocks
        assert places[0] == 0 and places[-1] == size - 65536
        gaps = [after - before for before, after in pairwise(places)]
        assert max(gaps) < 2 * size / blocks + 65536


def test_reading_everything_can_be_interrupted(tokens: Path) -> None:
    identity = recorded(tokens, sha256=True)
    touch(tokens)
    with pytest.raises(InterruptedReadingError):
        compare(identity, lambda: True)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for label in ("cat", "dog"):
        (root / label).mkdir(parents=True)
        for number in range(100):
            (root / label / f"{number:03d}.png").write_bytes(f"{label} {number}".encode())
    return root


def rename(root: Path) -> None:
    (root / "dog/000.png").rename(root / "dog/200.png")


def remove(root: Path) -> None:
    (root / "cat/001.png").unlink()


def overwrite(root: Path) -> None:
    for path in root.rglob("*.png"):
        change(path)


@pytest.mark.parametrize("do", [rename, remove, overwrite])
def test_a_folder_of_images_that_changed(images: Path, do: Callable[[Path], None]) -> None:
    folder, sample = identify_folder(images)
    assert (folder.images, len(sample)) == (200, 64)
    identity = DataIdentity(files=sample, folders=(folder,))
    assert compare(identity) == data_identity.DataComparison()
    do(images)
    for label in ("cat", "dog"):
        touch(images / label)
    assert compare(identity).changed


def test_a_folder_that_was_copied(images: Path) -> None:
    folder, sample = identify_folder(images)
    touch(images / "cat")
    (images / "cat/notes.txt").write_text("no image")
    touch(images / "cat")
    found = compare(DataIdentity(files=sample, folders=(folder,)))
    assert not found.changed and len(found.touched) == 1


def test_the_record_on_disk(tokens: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    assert read_identity(path) is None
    write_identity(path, recorded(tokens))
    assert read_identity(path) == recorded(tokens)
    path.write_text("{")
    with pytest.raises(HpctrainError, match="is damaged"):
        read_identity(path)


def test_recording_again(tokens: Path, images: Path) -> None:
    folder, sample = identify_folder(images)
    identity = DataIdentity(files=(identify_file(tokens), *sample), folders=(folder,))
    change(tokens)
    rename(images)
    assert compare(recorded_again(identity)).changed == ()
