"""Starting the data program, and reading Megatron's .idx without Megatron."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
from token_files import write_pair

from hpctrain.base.errors import HpctrainError, InvalidInputError, UsageError
from hpctrain.job import datasets as data
from hpctrain.job.datasets import (
    DatasetDescription,
    SamplesDescription,
    dataset_command,
    describe_dataset,
    prepare_dataset,
    run_program,
    verify_dataset,
)
from hpctrain.records.datasets import DatasetRequest, SamplesSidecar, bin_path


@pytest.mark.parametrize(("dtype", "name", "token_bytes"), [(8, "uint16", 2), (4, "int32", 4)])
def test_the_head_says_documents_sequences_tokens_and_type(
    tmp_path: Path, dtype: int, name: str, token_bytes: int
) -> None:
    prefix = tmp_path / "text.v1"
    write_pair(prefix, [3, 5, 70000], [0, 1, 3], dtype=dtype)
    assert describe_dataset(prefix) == DatasetDescription(
        prefix=str(prefix),
        documents=2,
        sequences=3,
        tokens=70008,
        dtype=name,
        bin_bytes=70008 * token_bytes,
        idx_bytes=34 + 3 * 12 + 3 * 8,
        sidecar=None,
    )


def test_a_dataset_without_sequences_and_a_multimodal_one_can_be_described(tmp_path: Path) -> None:
    write_pair(tmp_path / "none", [], [0])
    none = describe_dataset(tmp_path / "none")
    assert isinstance(none, DatasetDescription) and none.tokens == 0
    write_pair(tmp_path / "both", [4, 4], [0, 2])
    with (tmp_path / "both.idx").open("ab") as stream:
        stream.write(b"\0\1")  # one mode per sequence
    both = describe_dataset(tmp_path / "both")
    assert isinstance(both, DatasetDescription) and both.tokens == 8


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        (".idx", lambda raw: raw[:-1], "bytes instead of 74: it is cut off"),
        (".idx", lambda raw: raw[:20], "is not a Megatron index"),
        (".idx", lambda raw: b"PK" + raw[2:], "is not a Megatron index"),
        (".idx", lambda raw: raw[:9] + b"\2" + raw[10:], "unknown version 2 or type code 8"),
        (".idx", lambda raw: raw[:17] + b"\x63" + raw[18:], "unknown version 1 or type code 99"),
        (".idx", lambda raw: b"", "is not a Megatron index"),
        (".bin", lambda raw: raw[:-2], "has 14 bytes, but the .idx is of 16 bytes"),
        (".bin", lambda raw: raw + b"\0\0", "has 18 bytes, but the .idx is of 16 bytes"),
    ],
)
def test_damage_is_an_error_of_the_input(
    tmp_path: Path, suffix: str, change: object, message: str
) -> None:
    write_pair(tmp_path / "text", [3, 5], [0, 2])
    whole = describe_dataset(tmp_path / "text")
    assert isinstance(whole, DatasetDescription) and whole.documents == 1
    path = tmp_path / f"text{suffix}"
    assert callable(change)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InvalidInputError) as caught:
        describe_dataset(tmp_path / "text")
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write_pair(tmp_path / "text", [3, 5], [0, 2])
    (tmp_path / f"text{missing}").unlink()
    with pytest.raises(InvalidInputError, match=f"text{missing}: cannot be read: No such file"):
        describe_dataset(tmp_path / "text")


def test_a_directory_is_not_a_file(tmp_path: Path) -> None:
    write_pair(tmp_path / "data", [3, 5])
    bin_path(tmp_path / "data").unlink()
    bin_path(tmp_path / "data").mkdir()
    with pytest.raises(InvalidInputError, match=r"data\.bin: is not a file"):
        describe_dataset(tmp_path / "data")


def test_a_prefix_with_suffix_gets_a_hint(tmp_path: Path) -> None:
    write_pair(tmp_path / "text", [3], [0, 1])
    with pytest.raises(InvalidInputError) as caught:
        describe_dataset(tmp_path / "text.bin")
    assert caught.value.problems[0].hint == "give the path without .bin or .idx"


def test_names_that_look_like_options_stay_names(tmp_path: Path) -> None:
    request = DatasetRequest(
        output=Path("-o $(id)"),
        inputs=(Path("--force"), Path("a b\n")),
        suffixes=(".c",),
        vocab_size=300,
    )
    command = dataset_command(request)
    assert command[:5] == [
        sys.executable, "-P", "-m", "hpctrain.data.making", "--json"
    ]  # fmt: skip
    assert command[5:] == [
        "--output=-o $(id)", "--suffix=.c", "--vocab-size=300", "--", "--force", "a b\n"
    ]  # fmt: skip


def test_problems_of_the_program_arrive_as_our_exceptions(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    missing = (tmp_path / "--force", tmp_path / "b c")
    with pytest.raises(InvalidInputError) as caught:
        prepare_dataset(DatasetRequest(output=tmp_path / "text", inputs=missing))
    assert [problem.file for problem in caught.value.problems] == list(map(str, missing))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InvalidInputError, match="no text in the input"):
        prepare_dataset(DatasetRequest(output=tmp_path / "text", inputs=(tmp_path,)))
    out, err = capfd.readouterr()
    assert "skipped 1 files" in err  # its progress passes through
    assert out == ""
    with pytest.raises(UsageError, match="or --builtin"):
        prepare_dataset(DatasetRequest(output=tmp_path / "text"))


def test_a_program_that_takes_too_long_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "dataset_command", lambda request: ["sleep", "600"])
    request = DatasetRequest(output=tmp_path / "text", builtin="stdlib")
    with pytest.raises(HpctrainError, match=r"stopped after 0\.05 seconds"):
        prepare_dataset(request, timeout_seconds=0.05)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_without_output_is_reported() -> None:
    with pytest.raises(HpctrainError, match="killed by SIGKILL"):
        run_program(["sh", "-c", "kill -9 $$"], Path("data"), 60.0)
    message = "data preparation ended with exit code 1; its messages are above"
    with pytest.raises(HpctrainError, match=message) as caught:
        run_program(["sh", "-c", "exit 1"], Path("data"), 60.0)
    assert caught.value.exit_code == 1


def test_this_room_is_light() -> None:
    code = (
        "import sys, hpctrain.job.datasets; "
        "print(sorted({'torch', 'megatron', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-P", "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("[]\n", "")


def samples(directory: Path) -> Path:
    """An archive with its sidecar."""
    import numpy as np

    path = directory / "digits.npz"
    np.savez(path, x=np.zeros((3, 8, 8), np.float32), y=np.zeros(3, np.int64))
    sidecar = SamplesSidecar(
        format="arrays",
        samples=3,
        sources_sha256="",
        request_sha256="",
        npz_bytes=path.stat().st_size,
        npz_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
    )
    (directory / "digits.json").write_text(sidecar.model_dump_json())
    return path


def test_arrays_are_described_by_their_heads(tmp_path: Path) -> None:
    path = samples(tmp_path)
    for prefix in (path, tmp_path / "digits"):
        found = describe_dataset(prefix)
        assert isinstance(found, SamplesDescription)
        assert found.arrays == {"x": "<f4 3 x 8 x 8", "y": "<i8 3"}
        assert found.sidecar is not None and found.npz_bytes == path.stat().st_size


def test_a_dataset_that_is_not_there_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="books: does not exist") as caught:
        verify_dataset(tmp_path / "books")
    assert caught.value.problems[0].hint == "neither books.idx nor books.npz is there"
    write_pair(tmp_path / "books", [2], [0, 1])
    with pytest.raises(InvalidInputError, match="has no digests to compare with"):
        verify_dataset(tmp_path / "books")


def test_what_was_changed_is_found_by_its_digest(tmp_path: Path) -> None:
    path = samples(tmp_path)
    assert verify_dataset(tmp_path / "digits").files == ("digits.npz",)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(InvalidInputError, match=r"digits\.npz: has changed since"):
        verify_dataset(path)
    path.unlink()
    with pytest.raises(InvalidInputError, match="cannot be read: No such file"):
        verify_dataset(path)
    write_pair(tmp_path / "foreign", [3], [0, 1])
    with pytest.raises(InvalidInputError, match="no digests to compare with"):
        verify_dataset(tmp_path / "foreign")
