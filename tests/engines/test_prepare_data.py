"""The data program with the real tokenizers library and megatron-core's own reader."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs the megatron extra")

from hpctrain.base.errors import InvalidInputError
from hpctrain.data.making import __main__, stages
from hpctrain.data.making.publication import staging_directory
from hpctrain.job.datasets import describe_dataset, prepare_dataset
from hpctrain.records.datasets import DatasetReport, DatasetRequest
from hpctrain.train.engines.megatron.core_versions.supported import current

VOCAB_SIZE = 300
HOSTILE_TEXT = "naïve \u2028 日本語 \U0001f600 <|endoftext|> tab\there\r\nlast line without end"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Text with everything in it that a tokenizer could lose."""
    directory = tmp_path / "text $(id) \n"
    (directory / "deeper").mkdir(parents=True)
    (directory / "b.md").write_text("the cat sat on the mat and the rat sat on the hat\n" * 40)
    (directory / "a.txt").write_bytes(HOSTILE_TEXT.encode())
    (directory / "deeper" / "c.py").write_text("for number in range(10):\n    print(number)\n" * 40)
    (directory / "image.png").write_bytes(b"\x89PNG")
    return directory


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    """Exit code and what was printed as JSON."""
    code = __main__.main([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def prepare(capsys: pytest.CaptureFixture[str], corpus: Path, output: Path) -> DatasetReport:
    code, report = run(capsys, corpus, "--output", output, "--vocab-size", VOCAB_SIZE)
    assert code == 0, report
    return DatasetReport.model_validate(report)


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }


def documents(prefix: Path) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    dataset = IndexedDataset(str(prefix), mmap=True)
    return [dataset[index].tolist() for index in range(len(dataset))]


def test_every_document_is_there_exactly_and_ends_once(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    report = prepare(capsys, corpus, tmp_path / "out.v1" / "text.v2")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out.v1" / "tokenizer.json"))
    rows = documents(tmp_path / "out.v1" / "text.v2")
    assert tokenizer.token_to_id("<|endoftext|>") == VOCAB_SIZE - 1
    assert report.dataset.end_of_document_id == VOCAB_SIZE - 1
    texts = [tokenizer.decode(row[:-1], skip_special_tokens=False) for row in rows]
    names = ("a.txt", "b.md", "deeper/c.py")
    assert texts == [(corpus / name).read_bytes().decode() for name in names]
    assert [row.count(VOCAB_SIZE - 1) for row in rows] == [1, 1, 1]
    assert [row[-1] for row in rows] == [VOCAB_SIZE - 1] * 3
    assert report.dataset.tokens == sum(map(len, rows))


def test_our_reader_agrees_with_megatron(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    report = prepare(capsys, corpus, tmp_path / "text")
    described = describe_dataset(tmp_path / "text")
    rows = documents(tmp_path / "text")
    assert (described.documents, described.sequences) == (len(rows), len(rows))
    assert (described.tokens, described.dtype) == (sum(map(len, rows)), "uint16")
    assert described.sidecar == report.dataset


def test_the_end_of_document_is_that_of_megatrons_null_tokenizer(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    report = prepare(capsys, corpus, tmp_path / "text")
    null = current().null_tokenizer(report.dataset.vocab_size)
    assert null.eod == report.dataset.end_of_document_id
    assert null.vocab_size == report.dataset.vocab_size


@pytest.mark.variant("test_many_processes_make_the_same_bytes")
def test_two_processes_make_the_same_bytes(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    prepare(capsys, corpus, tmp_path / "one" / "text")
    # the other process starts in a directory that would break it if it imported from there
    (tmp_path / "two" / "torch.py").write_text("raise SystemExit('imported from the cwd')")
    request = DatasetRequest(
        output=tmp_path / "two" / "text", inputs=(corpus,), vocab_size=VOCAB_SIZE
    )
    before = Path.cwd()
    os.chdir(tmp_path / "two")
    try:
        report = prepare_dataset(request, timeout_seconds=300)
    finally:
        os.chdir(before)
    (tmp_path / "two" / "torch.py").unlink()
    assert report.status == "written"
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert sorted(digests(tmp_path / "one")) == [
        "text.bin", "text.idx", "text.json", "tokenizer.json"
    ]  # fmt: skip


def test_the_same_request_does_nothing_and_force_writes_again(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "text"
    prepare(capsys, corpus, output)
    first = (output.parent / "text.bin").stat().st_ino
    assert prepare(capsys, corpus, output).status == "unchanged"
    assert (output.parent / "text.bin").stat().st_ino == first
    code, report = run(capsys, corpus, "--output", output, "--vocab-size", VOCAB_SIZE, "--force")
    assert (code, report["status"]) == (0, "written")
    assert (output.parent / "text.bin").stat().st_ino != first


def test_a_damaged_dataset_of_the_same_text_is_made_again(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    prepare(capsys, corpus, tmp_path / "text")
    whole = (tmp_path / "text.bin").read_bytes()
    (tmp_path / "text.bin").write_bytes(whole[:-2])
    assert prepare(capsys, corpus, tmp_path / "text").status == "written"
    assert (tmp_path / "text.bin").read_bytes() == whole


def test_another_dataset_or_tokenizer_is_never_replaced_silently(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    prepare(capsys, corpus, tmp_path / "out" / "text")
    before = digests(tmp_path / "out")
    (corpus / "d.txt").write_text("one more document\n")
    for name, message in (("text", "holds another dataset"), ("other", "is another tokenizer")):
        options = ("--output", tmp_path / "out" / name, "--vocab-size", VOCAB_SIZE)
        code, failure = run(capsys, corpus, *options)
        assert code == 3
        assert message in failure["problems"][0]["message"]
        assert "--force" in failure["problems"][0]["hint"]
    assert digests(tmp_path / "out") == before
    (tmp_path / "out" / "text.json").unlink()  # now it looks like Megatron's own preprocess_data
    code, failure = run(capsys, corpus, "--output", tmp_path / "out" / "text")
    assert (code, failure["problems"][0]["message"]) == (
        3, "holds another dataset already (text.bin, text.idx)"
    )  # fmt: skip


def test_a_tokenizer_is_reused_and_not_copied(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    first = prepare(capsys, corpus, tmp_path / "one" / "text")
    tokenizer = tmp_path / "one" / "tokenizer.json"
    options = ("--output", tmp_path / "two" / "text", "--tokenizer", tokenizer)
    code, report = run(capsys, corpus / "b.md", *options)
    assert code == 0
    assert report["dataset"]["vocab_size"] == VOCAB_SIZE
    assert report["dataset"]["tokenizer"] == str(tokenizer)
    assert report["dataset"]["tokenizer_sha256"] == first.dataset.tokenizer_sha256
    assert documents(tmp_path / "two" / "text") == documents(tmp_path / "one" / "text")[1:2]
    assert not (tmp_path / "two" / "tokenizer.json").exists()
    code, failure = run(capsys, corpus, *options, "--vocab-size", 301, "--force")
    message = failure["problems"][0]["message"]
    assert (code, message) == (3, "has 300 tokens, but --vocab-size is 301")


@pytest.mark.parametrize("change", ["lowercase", "end_in_front", "no_end", "not_json"])
def test_a_tokenizer_that_would_spoil_the_data_is_refused(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path, change: str
) -> None:
    prepare(capsys, corpus, tmp_path / "one" / "text")
    path = tmp_path / "one" / "tokenizer.json"
    content = json.loads(path.read_text())
    if change == "lowercase":
        content["normalizer"] = {"type": "Lowercase"}
    elif change == "end_in_front":
        content["added_tokens"][0]["content"] = "<|pad|>"
        content["added_tokens"].append(
            {**content["added_tokens"][0], "content": "<|end|>", "id": VOCAB_SIZE}
        )
    elif change == "no_end":
        content["added_tokens"] = []
    path.write_text("{" if change == "not_json" else json.dumps(content))
    (corpus / "b.md").write_text("Capital Letters\n")
    options = ("--output", tmp_path / "two" / "text", "--tokenizer", path)
    code, failure = run(capsys, corpus, *options)
    expected = {
        "lowercase": "does not give the text back: 'c",
        "end_in_front": f"has id None, but must have the last one, {VOCAB_SIZE}",
        "no_end": f"has id None, but must have the last one, {VOCAB_SIZE - 2}",
        "not_json": "is not a tokenizer of the tokenizers library",
    }
    assert code == 3
    assert expected[change] in failure["problems"][0]["message"]
    assert list((tmp_path / "two").iterdir()) == []


def test_skipped_files_are_counted_and_named(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    (corpus / "zero.txt").write_bytes(b"a\0b")
    (corpus / "empty.txt").write_bytes(b"")
    report = prepare(capsys, corpus, tmp_path / "out" / "text")
    assert {Path(entry.name).name: entry.reason for entry in report.skipped} == {
        "latin.txt": "not UTF-8 at byte 3",
        "zero.txt": "binary: holds a zero byte",
        "empty.txt": "empty",
    }
    assert report.dataset.documents == 3


def test_max_bytes_takes_whole_files_and_counts_the_rest(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    first_bytes = len(HOSTILE_TEXT.encode())
    second_bytes = (corpus / "b.md").stat().st_size
    for budget_bytes, expected in ((first_bytes + second_bytes, 2), (10**9, 3)):
        output = tmp_path / str(expected) / "text"
        options = ("--vocab-size", VOCAB_SIZE - 30, "--max-bytes", budget_bytes)
        code, report = run(capsys, corpus, "--output", output, *options)
        assert code == 0
        assert report["dataset"]["documents"] == expected
        assert report["over_budget_files"] == 3 - expected
    code, failure = run(capsys, corpus, "--output", tmp_path / "none", "--max-bytes", 5)
    message = failure["problems"][0]["message"]
    assert (code, message) == (3, "no text in the input (0 skipped, 3 beyond --max-bytes)")


def test_too_little_text_says_how_many_tokens_it_gives(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "text"
    code, failure = run(capsys, corpus, "--output", output, "--vocab-size", 5000)
    assert code == 3
    problem = failure["problems"][0]
    reached = int(problem["message"].split("gives ")[1].split()[0])
    assert 257 < reached < 5000
    assert str(reached) in problem["hint"]
    code, _ = run(capsys, corpus, "--output", output, "--vocab-size", reached)
    assert code == 0  # the hint is right
    code, failure = run(capsys, corpus, "--output", tmp_path / "x", "--vocab-size", 256)
    assert "is below 257" in failure["problems"][0]["message"]


def test_an_input_that_changes_meanwhile_is_noticed(
    capsys: pytest.CaptureFixture[str],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def change_then_write(*arguments: Any) -> Any:
        (corpus / "b.md").write_text("something else")
        return original(*arguments)

    original = stages.make_shards
    monkeypatch.setattr(stages, "make_shards", change_then_write)
    options = ("--output", tmp_path / "out" / "text", "--vocab-size", VOCAB_SIZE)
    code, failure = run(capsys, corpus, *options)
    assert code == 3
    assert failure["problems"][0]["message"] == "changed while the dataset was made"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_kill_between_the_renames_leaves_nothing_half_valid(
    capsys: pytest.CaptureFixture[str],
    corpus: Path,
    tmp_path: Path,
) -> None:
    """A forked writer replaces another dataset and gets SIGKILL after each of its renames."""
    output = tmp_path / "out" / "text"
    prepare(capsys, corpus, output)
    (corpus / "d.txt").write_text("one more document\n")
    argv = [str(corpus), "--output", str(output), "--vocab-size", str(VOCAB_SIZE)]
    for allowed in range(4):
        child = os.fork()
        if child == 0:
            _die_after_renames_to(output.parent, allowed)
            os._exit(__main__.main([*argv, "--force"]))
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert not (output.parent / "text.json").exists()
        if allowed < 3:  # tokenizer, .bin, .idx
            with pytest.raises(InvalidInputError):
                describe_dataset(output)
        else:
            assert describe_dataset(output).documents == 4
    assert prepare(capsys, corpus, output).dataset.documents == 4  # no --force for our own rubble
    assert describe_dataset(output).documents == 4
    assert sorted(digests(output.parent)) == [
        "text.bin", "text.idx", "text.json", "tokenizer.json"
    ]  # fmt: skip


def _die_after_renames_to(directory: Path, allowed: int) -> None:
    """SIGKILL for this process instead of the rename after the `allowed`th into `directory`."""
    original = os.replace
    seen = 0

    def replace(source: Any, target: Any) -> None:
        nonlocal seen
        if Path(target).parent == directory:
            if seen == allowed:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
        original(source, target)

    setattr(os, "replace", replace)  # noqa: B010


def test_the_trained_tokenizer_can_go_elsewhere(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere" / "bpe.json"
    options = ("--output", tmp_path / "out" / "text", "--tokenizer-output", target)
    for status in ("written", "unchanged"):
        code, report = run(capsys, corpus, *options, "--vocab-size", VOCAB_SIZE)
        assert (code, report["status"]) == (0, status)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    assert report["dataset"]["tokenizer"] == str(target)
    assert report["dataset"]["tokenizer_sha256"] == digest
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_second_writer_is_refused(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    with staging_directory(tmp_path / "text"):
        code, failure = run(
            capsys, corpus, "--output", tmp_path / "text", "--vocab-size", VOCAB_SIZE
        )
    assert code == 3
    assert failure["problems"][0]["message"] == "another process is making this dataset"
    assert prepare(capsys, corpus, tmp_path / "text").status == "written"


def test_errors_of_the_user_are_one_message_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "hpctrain.data.making"]
    missing = str(tmp_path / "missing")
    for argv, code, message in (
        ([missing, "--output", "x"], 3, f"error: {missing}: no such file or directory"),
        (["--output", "x"], 2, "error: give either files and directories, or --builtin"),
        (["--builtin", "--output", "/proc/x/y", "--max-bytes", "99999"], 3, "nothing can be"),
    ):
        ended = subprocess.run([*command, *argv], capture_output=True, text=True, timeout=300)
        assert ended.returncode == code, ended.stderr
        assert message in ended.stderr
        assert "Traceback" not in ended.stderr
        assert ended.stdout == ""


def test_builtin_is_source_of_the_standard_library_without_tests() -> None:
    from hpctrain.data.making.corpus import find_stdlib, read_corpus

    candidates = find_stdlib()
    corpus = read_corpus(candidates, 1_000_000, 10**6)
    assert 500_000 < corpus.text_bytes <= 1_000_000
    names = [candidate.name for candidate in candidates]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert "argparse.py" in names
    assert not [
        name for name in names if {"test", "tests", "site-packages"} & set(Path(name).parts)
    ]
