"""What `data.split` leaves of the data is looked at before the queue, at its place in the spec."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hpctrain.actions.input_checks import check_samples
from hpctrain.errors import InvalidInputError
from hpctrain.spec.loader import load_run_spec
from hpctrain.store.shares import parts_without_documents, parts_without_rows

WORDS = """\
name: read
model: {{family: {family}, layers: 2, hidden: 64, heads: 4, vocab: 10, {shape}}}
batch: {{global: 8, micro: 2}}
budget: {{steps: 4}}
optimizer: {{lr: 1e-3}}
checkpoint: {{every_steps: 2}}
engine: {{name: ddp}}
evaluation: {{every_steps: {every}}}
data:
  format: {format}
  sources: [{{path: one}}, {{path: other}}]
  {split}
resources: {{gpus: 2}}
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pair(name: str, documents: int) -> None:
    """Documents of two tokens of two bytes each, as megatron-core writes them."""
    lengths, starts = [2] * documents, range(0, 4 * documents, 4)
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1)
    body = struct.pack(f"={documents}i{documents}q", *lengths, *starts)
    bounds = struct.pack(f"={documents + 1}q", *range(documents + 1))
    Path(f"{name}.idx").write_bytes(head + body + bounds)
    Path(f"{name}.bin").write_bytes(bytes(4 * documents))


def complaints(kind: str, split: str, every: str = "2") -> list[str]:
    family, shape = ("vit", "image: 8, patch: 4") if kind == "arrays" else ("gpt", "seq: 16")
    words = f"split: {split}" if split else ""
    text = WORDS.format(family=family, shape=shape, every=every, format=kind, split=words)
    Path("spec.yaml").write_text(text)
    try:
        check_samples(load_run_spec(Path("spec.yaml")))
    except InvalidInputError as error:
        return [f"{problem} ({problem.hint})" for problem in error.problems]
    return []


def test_a_share_of_documents_that_is_rounded_to_none() -> None:
    pair("one", 300)
    pair("other", 20)
    assert complaints("tokens", '"90,10,0"') == []
    (said,) = complaints("tokens", '"98,2,0"')
    assert said.startswith("spec.yaml:12:10: `data.split` 98,2,0 leaves none of the 20 documents")
    assert "of other for validation" in said and "`data.split: 90,10,0`" in said
    assert len(complaints("tokens", '"99.9,0,0.1"')) == 2, "also of a part that nobody reads"
    assert len(complaints("tokens", "")) == 1, "the default share, too"


def test_an_index_of_another_kind_is_left_to_who_reads_it() -> None:
    for name in ("one", "other"):
        Path(f"{name}.bin").touch()
        Path(f"{name}.idx").write_bytes(b"a fork's own")
    assert complaints("tokens", '"98,2,0"') == []
    Path("other.idx").unlink()
    (said,) = complaints("tokens", '"98,2,0"')
    assert "does not exist" in said


def test_a_share_of_samples_that_is_rounded_to_none() -> None:
    for name in ("one", "other"):
        np.savez(f"{name}.npz", x=np.zeros((10, 8, 8), np.uint8), y=np.zeros(10, np.int64))
    assert complaints("arrays", '"95,5,0"') == []
    (said,) = complaints("arrays", '"98,2,0"')
    assert said.startswith("spec.yaml:12:10: ") and "none of 20 samples for validation" in said
    assert complaints("arrays", '"98,2,0"', every="null") == [], "nobody evaluates"
    (said,) = complaints("arrays", '"0,100,0"')
    assert "for training" in said


@pytest.mark.parametrize(
    ("split", "count", "documents", "rows"),
    [
        ("98,2,0", 24, ["validation"], ["validation", "test"]),
        ("98,2,0", 25, [], ["test"]),  # 24.5 is rounded to 24
        ("100,0,0", 1, [], ["validation", "test"]),
        ("1,1,1", 1, ["training", "test"], ["training", "test"]),
        ("0,0,0", 5, [], ["training", "validation", "test"]),
    ],
)
def test_how_ends_are_rounded(
    split: str, count: int, documents: list[str], rows: list[str]
) -> None:
    assert parts_without_documents(split, count) == documents
    assert parts_without_rows(split, count) == rows


def test_no_torch_is_needed() -> None:
    program = "import hpctrain.actions.input_checks, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
