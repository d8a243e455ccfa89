"""What `data.split` leaves of the data is looked at before the queue, at its place in the spec."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from token_files import write_pair

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.input_checks import check_samples
from hpctrain.records.shares import parts_without_documents, parts_without_rows, split_hint
from hpctrain.spec.loader import load_run_spec

WORDS = """\
name: read
model: {{family: {family}, layers: 2, hidden: 64, heads: 4, vocab: 10, {shape}}}
batch: {{global: 8, micro: 2}}
budget: {{steps: 4}}
optimizer: {{lr: 1e-3}}
checkpoint: {{every_steps: 2}}
engine: {engine}
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
    """Documents of two tokens."""
    write_pair(Path(name), [2] * documents)


def complaints(kind: str, split: str, every: str = "2", engine: str = "{name: ddp}") -> list[str]:
    family, shape = ("vit", "image: 8, patch: 4") if kind == "arrays" else ("gpt", "seq: 16")
    words = f"split: {split}" if split else ""
    text = WORDS.format(
        family=family, shape=shape, every=every, format=kind, split=words, engine=engine
    )
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
    assert len(complaints("tokens", '"99.9,0,0.1"', every="null")) == 2, (
        "also of a part that nobody reads"
    )
    assert len(complaints("tokens", "")) == 1, "the default share, too"


FORK = "{name: megatron-lm, checkout: megatron}"


def test_an_index_of_another_kind_is_left_to_who_reads_it() -> None:
    for name in ("one", "other"):
        Path(f"{name}.bin").touch()
        Path(f"{name}.idx").write_bytes(b"a fork's own")
    assert complaints("tokens", '"98,2,0"', engine=FORK) == []
    said = complaints("tokens", '"98,2,0"')
    assert [one.partition(": `")[0] for one in said] == ["spec.yaml:11:20", "spec.yaml:11:33"]
    assert all("is not a Megatron index" in one for one in said), said
    Path("other.idx").unlink()
    (said_of_fork,) = complaints("tokens", '"98,2,0"', engine=FORK)
    assert "does not exist" in said_of_fork


def cut(name: str) -> None:
    Path(name).write_bytes(Path(name).read_bytes()[:-4])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda: Path("one.bin").write_bytes(b""), "one.bin: has 0 bytes, but the .idx is of 1200"),
        (lambda: cut("one.bin"), "one.bin: has 1196 bytes, but the .idx is of 1200 bytes"),
        (lambda: cut("one.idx"), "one.idx: has 6038 bytes instead of 6042: it is cut off"),
        (lambda: Path("one.idx").write_bytes(bytes(500)), "is not a Megatron index"),
        (lambda: pair("one", 0), "one.bin has no tokens"),
        (lambda: (Path("one.bin").unlink(), Path("one.bin").mkdir()), "one.bin is not a file"),
        (lambda: Path("one.bin").write_bytes(b"\0\0\n\0" * 300), "one.bin has token id 10, and"),
    ],
)
def test_damaged_tokens_are_refused(damage: Callable[[], object], words: str) -> None:
    pair("one", 300)
    pair("other", 300)
    assert complaints("tokens", "") == []
    damage()
    (said,) = complaints("tokens", "")
    assert said.startswith("spec.yaml:11:20: `data.sources[0].path`: "), said
    assert words in said


def test_one_wrong_id_at_the_end_of_a_large_file_is_found() -> None:
    pair("one", 300)
    pair("other", 1_000_000)
    with Path("other.bin").open("r+b") as stream:
        stream.seek(-2, 2)
        stream.write(b"\x39\x30")
    (said,) = complaints("tokens", "")
    assert "other.bin has token id 12,345, and the model has 0 to 9" in said


@pytest.mark.parametrize(("count", "split"), [(300, "90,10,0"), (4, "80,20,0"), (2, "50,50,0")])
def test_a_hint_names_what_helps(count: int, split: str) -> None:
    assert f"`data.split: {split}`" in split_hint(count)
    assert parts_without_documents(split, count) == []


def test_one_document_cannot_be_divided() -> None:
    pair("one", 1)
    pair("other", 300)
    (said,) = complaints("tokens", '"98,2,0"')
    assert "`data.split: 100,0,0` gives all to training" in said and "at least two" in said
    assert complaints("tokens", '"100,0,0"', every="null") == []
    (said,) = complaints("tokens", '"100,0,0"')
    assert "nothing for the evaluation of every 2 steps" in said


def test_a_share_of_samples_that_is_rounded_to_none() -> None:
    for name in ("one", "other"):
        np.savez(f"{name}.npz", x=np.zeros((10, 8, 8), np.uint8), y=np.zeros(10, np.int64))
    assert complaints("arrays", '"95,5,0"') == []
    (said,) = complaints("arrays", '"98,2,0"')
    assert said.startswith("spec.yaml:12:10: ") and "none of 20 samples for validation" in said
    assert complaints("arrays", '"98,2,0"', every="null") == [], "nobody evaluates"
    (said,) = complaints("arrays", '"0,100,0"')
    assert "that of training, and nothing is left for it" in said


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
    program = "import hpctrain.job.input_checks, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
