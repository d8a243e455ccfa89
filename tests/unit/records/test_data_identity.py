"""Data: what is found out by reading little, and telling changed data from copied ones."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.base.errors import HpctrainError, InvalidInputError
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
from hpctrain.records.datasets import (
    Expected,
    SamplesSidecar,
    problems_of,
    read_heads,
    sidecar_path,
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


# -- What is found out about arrays and image folders without reading them ---------------------


PICTURES = Expected("arrays", seq_length=5, vocab_size=10, classes=10, side=8)
TEXTS = Expected("examples", seq_length=16, vocab_size=50, classes=3, side=224)
PACKED = Expected("packed", seq_length=16, vocab_size=50, classes=None, side=224)
FOLDER = replace(PICTURES, format="images")

X, Y = np.zeros((6, 8, 8), np.float32), np.zeros(6, np.int64)
TOKENS = np.zeros((4, 12), np.uint16)
LABELLED: dict[str, Any] = dict(tokens=TOKENS, lengths=TOKENS[:, 0], labels=TOKENS[:, 0])
SEQUENCES: dict[str, Any] = dict(tokens=TOKENS, learned=TOKENS, positions=TOKENS)


def sidecar(file: Path, **fields: Any) -> None:
    made = SamplesSidecar(
        samples=6, sources_sha256="", request_sha256="", npz_bytes=file.stat().st_size,
        npz_sha256="", **fields
    )  # fmt: skip
    sidecar_path(file).write_text(made.model_dump_json())


def found(path: Path, expected: Expected) -> str:
    problems = problems_of(path, expected)
    assert all(str(path.parent) in str(problem.file) for problem in problems)
    return "; ".join(problem.message for problem in problems)


@pytest.mark.parametrize(
    ("expected", "arrays", "words"),
    [
        (PICTURES, dict(x=X, y=Y), ""),
        (PICTURES, dict(x=np.zeros((6, 3, 8, 8), np.uint8), y=Y, more=Y), ""),
        (PICTURES, dict(x=X), "needs arrays x, y; found: x"),
        (PICTURES, dict(x=X, y=Y[:5]), "different numbers of samples: x 6, y 5"),
        (PICTURES, dict(x=X[:0], y=Y[:0]), "has no samples"),
        (PICTURES, dict(x=X, y=X), "array y has type <f4"),
        (PICTURES, dict(x=X[0], y=Y), "array x has 2 axes instead of 3 or 4"),
        (PICTURES, dict(x=np.zeros((6, 8, 8, 3)), y=Y), "8 colors instead of 1 or 3"),
        (PICTURES, dict(x=X[:, :7], y=Y), "7 x 8 pixels, the model reads 8 x 8 (`model.image`)"),
        (PICTURES, dict(x=X.astype(np.uint16), y=Y), "integers from 0 to 255 are uint8"),
        (TEXTS, LABELLED, ""),
        (replace(TEXTS, seq_length=8), LABELLED, "12 tokens, the model reads 8 at most"),
        (PACKED, SEQUENCES, ""),
        (PACKED, {**SEQUENCES, "learned": TOKENS[:, 1:]}, "learned has shape (4, 11), tokens"),
        (FOLDER, dict(labels=Y, ends=Y, names=np.zeros(9, np.uint8)), "no a.json beside it"),
    ],
)
def test_heads_tell(expected: Expected, arrays: Any, words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    for path in (tmp_path / "a.npz", tmp_path / "a"):
        message = found(path, expected)
        assert words in message if words else message == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(format="examples", vocab_size=50, classes=("a", "b", "c")), ""),
        (dict(format="packed"), "was made as packed, not as examples"),
        (dict(format="examples", vocab_size=51), "vocabulary of 51 tokens, the model has 50"),
        (dict(format="examples", classes=("a",) * 4), "has 4 classes, the model 3"),
        (dict(format="examples", directory="/nowhere/at/all"), "/nowhere/at/all, which is not"),
    ],
)
def test_the_sidecar_tells(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **LABELLED)
    sidecar(path, **fields)
    message = found(path, TEXTS)
    assert words in message if words else message == ""
    with path.open("ab") as stream:  # a zip archive may have anything behind it
        stream.write(b"\0")
    assert "it was changed" in found(path, TEXTS)


def test_what_is_no_archive(tmp_path: Path) -> None:
    assert found(tmp_path / "none", PICTURES) == "does not exist"
    np.savez(tmp_path / "whole.npz", x=X, y=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    for name, content in (
        ("short.npz", whole[:-30]),
        ("text.npz", b"x"),
        ("empty.npz", b""),
        ("npy.npz", whole.replace(b"\x93NUMPY", b"\x93NUMPI")),
    ):
        (tmp_path / name).write_bytes(content)
        assert "is no .npz file, or cut off" in found(tmp_path / name, PICTURES)
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        read_heads(tmp_path / "none.npz")


def test_structured_arrays_and_pickles_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3, [("a", "i4"), ("b", "f4")]), y=Y)
    assert "elements of several parts" in found(tmp_path / "a.npz", PICTURES)
    np.savez(tmp_path / "b.npz", x=np.array([{}], object), y=Y)
    assert "array x has type |O" in found(tmp_path / "b.npz", PICTURES)


def test_heads_say_where_the_numbers_are(tmp_path: Path) -> None:
    path, x = tmp_path / "a.npz", np.arange(6, dtype="<u2").reshape(2, 3)
    np.savez(path, **{"a name longer than others": x, "x": x})
    for head in read_heads(path).values():
        assert (head.dtype, head.shape, head.kind, head.rows) == ("<u2", (2, 3), "u", 2)
        assert head.offset is not None
        assert path.read_bytes()[head.offset :][: x.nbytes] == x.tobytes()
    np.savez_compressed(path, x=x)
    assert read_heads(path)["x"].offset is None


def test_folders(tmp_path: Path) -> None:
    assert found(tmp_path, FOLDER) == "has no directories for classes"
    for number in range(11):
        (tmp_path / str(number)).mkdir()
    (tmp_path / ".git").mkdir()
    assert found(tmp_path, FOLDER) == "has 11 classes, the model 10"
    assert found(tmp_path, replace(FOLDER, classes=11)) == ""


def test_this_needs_no_numpy() -> None:
    code = "import sys, hpctrain.records.datasets; print('numpy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "False\n", ended.stderr
