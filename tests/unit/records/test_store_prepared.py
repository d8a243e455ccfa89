"""What is found out about arrays and image folders without reading them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.datasets import (
    Expected,
    SamplesSidecar,
    problems_of,
    read_heads,
    sidecar_path,
)

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
