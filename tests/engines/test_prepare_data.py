"""The data program with the real tokenizers library and megatron-core's own reader."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_specimens import DISTILBERT, PACKED, VIT, config_of, opened, write_folder

from hpctrain.base.errors import InvalidInputError
from hpctrain.data.making import __main__, stages
from hpctrain.data.making.conversations import best_fit
from hpctrain.data.making.publication import staging_directory
from hpctrain.data.making.shards import read_plan
from hpctrain.data.making.text_tokenizers import tokenizer_digest
from hpctrain.job.datasets import describe_dataset, prepare_dataset
from hpctrain.records.datasets import DatasetReport, DatasetRequest, Expected, problems_of
from hpctrain.train.engines.megatron.core_versions.supported import current

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [
    *("the", "cat", "sat", "on", "a", "mat", "and", "saw", "the", "rat", "run", "from", "hat"),
    *("to", "house", "under", "the", "old", "red", "moon"),
]


def write_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    wrapped.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    wrapped.chat_template = template
    wrapped.save_pretrained(str(directory))
    return directory


def talk(number: int, turns: int = 2) -> dict[str, Any]:
    """A conversation whose answers begin with `Answer`."""
    messages = []
    for turn in range(turns):
        words = [WORDS[(number * 3 + turn + k) % len(WORDS)] for k in range(1 + number % 7)]
        messages.append({"role": "user", "content": "say " + " ".join(words)})
        messages.append({"role": "assistant", "content": f"Answer {number}: " + " ".join(words)})
    return {"messages": messages}


def review(number: int) -> dict[str, Any]:
    words = [WORDS[(number + k) % len(WORDS)] for k in range(3 + number % 9)]
    return {"text": " ".join(words), "label": ("bad", "good")[number % 2]}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Program:
    """`python -m hpctrain.data.making` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *argv: object) -> tuple[int, dict[str, Any]]:
        """Exit code and what was printed as JSON."""
        code = __main__.main([*map(str, argv), "--json"])
        return code, json.loads(self.capsys.readouterr().out)

    def made(self, *argv: object) -> dict[str, Any]:
        code, report = self.run(*argv)
        assert code == 0, report
        return report

    def wrong(self, code: int, *argv: object) -> dict[str, Any]:
        """The first problem."""
        found, failure = self.run(*argv)
        assert found == code, failure
        problem: dict[str, Any] = failure["problems"][0]
        return problem

    def prepare(self, corpus: Path, output: Path) -> DatasetReport:
        report = self.made(corpus, "--output", output, "--vocab-size", VOCAB_SIZE)
        return DatasetReport.model_validate(report)


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str]) -> Program:
    return Program(capsys)


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.is_file()
    }


# -- The data program with the real tokenizers library and megatron-core's own reader -----------

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


def documents(prefix: Path) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    dataset = IndexedDataset(str(prefix), mmap=True)
    return [dataset[index].tolist() for index in range(len(dataset))]


def test_every_document_is_there_exactly_and_ends_once(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    from tokenizers import Tokenizer

    report = program.prepare(corpus, tmp_path / "out.v1" / "text.v2")
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


def test_our_reader_agrees_with_megatron(program: Program, corpus: Path, tmp_path: Path) -> None:
    report = program.prepare(corpus, tmp_path / "text")
    described = describe_dataset(tmp_path / "text")
    rows = documents(tmp_path / "text")
    assert (described.documents, described.sequences) == (len(rows), len(rows))
    assert (described.tokens, described.dtype) == (sum(map(len, rows)), "uint16")
    assert described.sidecar == report.dataset


def test_the_end_of_document_is_that_of_megatrons_null_tokenizer(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    report = program.prepare(corpus, tmp_path / "text")
    null = current().null_tokenizer(report.dataset.vocab_size)
    assert null.eod == report.dataset.end_of_document_id
    assert null.vocab_size == report.dataset.vocab_size


@pytest.mark.variant("test_many_processes_make_the_same_bytes")
def test_two_processes_make_the_same_bytes(program: Program, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    program.prepare(corpus, tmp_path / "one" / "text")
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
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "text"
    program.prepare(corpus, output)
    first = (output.parent / "text.bin").stat().st_ino
    assert program.prepare(corpus, output).status == "unchanged"
    assert (output.parent / "text.bin").stat().st_ino == first
    code, report = program.run(corpus, "--output", output, "--vocab-size", VOCAB_SIZE, "--force")
    assert (code, report["status"]) == (0, "written")
    assert (output.parent / "text.bin").stat().st_ino != first


def test_a_damaged_dataset_of_the_same_text_is_made_again(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    program.prepare(corpus, tmp_path / "text")
    whole = (tmp_path / "text.bin").read_bytes()
    (tmp_path / "text.bin").write_bytes(whole[:-2])
    assert program.prepare(corpus, tmp_path / "text").status == "written"
    assert (tmp_path / "text.bin").read_bytes() == whole


def test_another_dataset_or_tokenizer_is_never_replaced_silently(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    program.prepare(corpus, tmp_path / "out" / "text")
    before = digests(tmp_path / "out")
    (corpus / "d.txt").write_text("one more document\n")
    for name, message in (("text", "holds another dataset"), ("other", "is another tokenizer")):
        options = ("--output", tmp_path / "out" / name, "--vocab-size", VOCAB_SIZE)
        problem = program.wrong(3, corpus, *options)
        assert message in problem["message"]
        assert "--force" in problem["hint"]
    assert digests(tmp_path / "out") == before
    (tmp_path / "out" / "text.json").unlink()  # now it looks like Megatron's own preprocess_data
    problem = program.wrong(3, corpus, "--output", tmp_path / "out" / "text")
    assert problem["message"] == "holds another dataset already (text.bin, text.idx)"


def test_a_tokenizer_is_reused_and_not_copied(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    first = program.prepare(corpus, tmp_path / "one" / "text")
    tokenizer = tmp_path / "one" / "tokenizer.json"
    options = ("--output", tmp_path / "two" / "text", "--tokenizer", tokenizer)
    report = program.made(corpus / "b.md", *options)
    assert report["dataset"]["vocab_size"] == VOCAB_SIZE
    assert report["dataset"]["tokenizer"] == str(tokenizer)
    assert report["dataset"]["tokenizer_sha256"] == first.dataset.tokenizer_sha256
    assert documents(tmp_path / "two" / "text") == documents(tmp_path / "one" / "text")[1:2]
    assert not (tmp_path / "two" / "tokenizer.json").exists()
    problem = program.wrong(3, corpus, *options, "--vocab-size", 301, "--force")
    assert problem["message"] == "has 300 tokens, but --vocab-size is 301"


@pytest.mark.parametrize("change", ["lowercase", "end_in_front", "no_end", "not_json"])
def test_a_tokenizer_that_would_spoil_the_data_is_refused(
    program: Program, corpus: Path, tmp_path: Path, change: str
) -> None:
    program.prepare(corpus, tmp_path / "one" / "text")
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
    expected = {
        "lowercase": "does not give the text back: 'c",
        "end_in_front": f"has id None, but must have the last one, {VOCAB_SIZE}",
        "no_end": f"has id None, but must have the last one, {VOCAB_SIZE - 2}",
        "not_json": "is not a tokenizer of the tokenizers library",
    }
    assert expected[change] in program.wrong(3, corpus, *options)["message"]
    assert list((tmp_path / "two").iterdir()) == []


def test_skipped_files_are_counted_and_named(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    (corpus / "zero.txt").write_bytes(b"a\0b")
    (corpus / "empty.txt").write_bytes(b"")
    report = program.prepare(corpus, tmp_path / "out" / "text")
    assert {Path(entry.name).name: entry.reason for entry in report.skipped} == {
        "latin.txt": "not UTF-8 at byte 3",
        "zero.txt": "binary: holds a zero byte",
        "empty.txt": "empty",
    }
    assert report.dataset.documents == 3


def test_max_bytes_takes_whole_files_and_counts_the_rest(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    first_bytes = len(HOSTILE_TEXT.encode())
    second_bytes = (corpus / "b.md").stat().st_size
    for budget_bytes, expected in ((first_bytes + second_bytes, 2), (10**9, 3)):
        output = tmp_path / str(expected) / "text"
        options = ("--vocab-size", VOCAB_SIZE - 30, "--max-bytes", budget_bytes)
        report = program.made(corpus, "--output", output, *options)
        assert report["dataset"]["documents"] == expected
        assert report["over_budget_files"] == 3 - expected
    problem = program.wrong(3, corpus, "--output", tmp_path / "none", "--max-bytes", 5)
    assert problem["message"] == "no text in the input (0 skipped, 3 beyond --max-bytes)"


def test_too_little_text_says_how_many_tokens_it_gives(
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out" / "text"
    problem = program.wrong(3, corpus, "--output", output, "--vocab-size", 5000)
    reached = int(problem["message"].split("gives ")[1].split()[0])
    assert 257 < reached < 5000
    assert str(reached) in problem["hint"]
    program.made(corpus, "--output", output, "--vocab-size", reached)  # the hint is right
    problem = program.wrong(3, corpus, "--output", tmp_path / "x", "--vocab-size", 256)
    assert "is below 257" in problem["message"]


def test_an_input_that_changes_meanwhile_is_noticed(
    program: Program,
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
    problem = program.wrong(3, corpus, *options)
    assert problem["message"] == "changed while the dataset was made"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_kill_between_the_renames_leaves_nothing_half_valid(
    program: Program,
    corpus: Path,
    tmp_path: Path,
) -> None:
    """A forked writer replaces another dataset and gets SIGKILL after each of its renames."""
    output = tmp_path / "out" / "text"
    program.prepare(corpus, output)
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
    assert program.prepare(corpus, output).dataset.documents == 4  # no --force for our own rubble
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
    program: Program, corpus: Path, tmp_path: Path
) -> None:
    target = tmp_path / "elsewhere" / "bpe.json"
    options = ("--output", tmp_path / "out" / "text", "--tokenizer-output", target)
    for status in ("written", "unchanged"):
        code, report = program.run(corpus, *options, "--vocab-size", VOCAB_SIZE)
        assert (code, report["status"]) == (0, status)
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    assert report["dataset"]["tokenizer"] == str(target)
    assert report["dataset"]["tokenizer_sha256"] == digest
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_a_second_writer_is_refused(program: Program, corpus: Path, tmp_path: Path) -> None:
    with staging_directory(tmp_path / "text"):
        problem = program.wrong(
            3, corpus, "--output", tmp_path / "text", "--vocab-size", VOCAB_SIZE
        )
    assert problem["message"] == "another process is making this dataset"
    assert program.prepare(corpus, tmp_path / "text").status == "written"


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


# -- What is made of conversations, labelled texts, digits and files of MNIST's format ----------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def loaded(tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer), local_files_only=True)


def texts_of(row: int, archive: Any) -> list[tuple[list[int], list[int]]]:
    """(tokens, learned) of each text in a sequence; the last one may be padding."""
    starts = np.flatnonzero(archive["positions"][row] == 0).tolist()
    ends = [*starts[1:], len(archive["tokens"][row])]
    return [
        (archive["tokens"][row][a:b].tolist(), archive["learned"][row][a:b].tolist())
        for a, b in zip(starts, ends, strict=True)
    ]


def learned_of(tokens: list[int], marks: list[int]) -> list[int]:
    return [token for token, mark in zip(tokens[1:], marks[:-1], strict=True) if mark]


def test_answers_alone_are_learned_and_no_conversation_is_cut(
    tmp_path: Path, tokenizer: Path, program: Program
) -> None:
    talks = [talk(n) for n in range(20)]
    path = write_lines(tmp_path / "talks.jsonl", talks)
    options = ("--format", "packed", "--tokenizer", tokenizer, "--seq", 200)
    report = program.made(path, *options, "--output", tmp_path / "packed")["dataset"]
    archive, words = np.load(tmp_path / "packed.npz"), loaded(tokenizer)
    seen, learned = [], 0
    for row in range(report["samples"]):
        for tokens, marks in texts_of(row, archive):
            if not any(marks):
                assert set(tokens) == {words.pad_token_id}
                continue
            learned += sum(marks)
            seen.append(words.decode(tokens))
            answers = words.decode(
                [token for token, mark in zip(tokens[1:], marks[:-1], strict=True) if mark]
            )
            number = int(seen[-1].split("Answer ")[1].split(":")[0])
            said = [m["content"] for m in talks[number]["messages"] if m["role"] == "assistant"]
            assert answers == "".join(f"{content}<|im_end|>\n" for content in said)
    expected = [words.apply_chat_template(one["messages"], tokenize=False) for one in talks]
    assert sorted(seen) == sorted(expected)
    assert report["learned"] == learned and report["shortened"] == report["dropped"] == 0
    assert report["tokens"] > 0.75 * report["samples"] * 200


def test_prompts_with_completions_need_no_template(tmp_path: Path, program: Program) -> None:
    plain = write_tokenizer(tmp_path / "plain", template=None)
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "the cat ", "completion": "sat"}] * 3)
    options = ("--format", "packed", "--tokenizer", plain, "--seq", 32)
    program.made(path, *options, "--output", tmp_path / "packed")
    archive, words = np.load(tmp_path / "packed.npz"), loaded(plain)
    ((tokens, marks), *_) = texts_of(0, archive)
    assert words.decode(tokens) == "the cat sat<|im_end|>"
    assert words.decode(learned_of(tokens, marks)) == " sat<|im_end|>"
    talks = write_lines(tmp_path / "t.jsonl", [talk(1)])
    refused = (talks, *options, "--output", tmp_path / "chat")
    problem = program.wrong(3, *refused)
    assert "the tokenizer has no chat template" in problem["message"]
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    program.made(*refused, "--chat-template", tmp_path / "template.jinja", "--seq", 256)


def test_long_conversations_are_cut_and_those_without_answers_dropped(
    tmp_path: Path, tokenizer: Path, program: Program
) -> None:
    silent = {"messages": [{"role": "user", "content": "the cat"}]}
    path = write_lines(tmp_path / "t.jsonl", [talk(6, 4), silent, talk(1)])
    options = ("--format", "packed", "--tokenizer", tokenizer, "--output", tmp_path / "packed")
    report = program.made(path, *options, "--seq", 90)["dataset"]
    assert (report["shortened"], report["dropped"]) == (1, 1)
    problem = program.wrong(3, path, *options, "--seq", 4, "--force")
    assert "none of 3 conversations has an answer within 4 tokens" in problem["message"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"text": "x"}, "is not a conversation: it has text"),
        ({"messages": []}, "`messages` is not a list of messages"),
        ({"messages": [{"role": "user", "content": "a <|im_end|> b"}]}, "spells the control token"),
        ({"prompt": "", "completion": "b"}, "field `prompt` is empty"),
        ({"prompt": "a", "completion": "\ud800"}, "half of a surrogate pair"),
    ],
)
def test_lines_that_are_no_conversations(
    line: dict[str, Any],
    words: str,
    tmp_path: Path,
    tokenizer: Path,
    program: Program,
) -> None:
    path = write_lines(tmp_path / "t.jsonl", [talk(1), line])
    options = ("--format", "packed", "--tokenizer", tokenizer, "--seq", 64)
    problem = program.wrong(3, path, *options, "--output", tmp_path / "out" / "x")
    assert words in problem["message"] and problem["line"] == 2
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_a_packing_and_wastes_little(seed: int) -> None:
    lengths = np.random.RandomState(seed).geometric(0.02, size=400).clip(1, 128)
    sequences = best_fit(lengths, 128)
    assert sorted(number for one in sequences for number in one) == [*range(400)]
    assert max(sum(lengths[number] for number in one) for one in sequences) <= 128
    assert len(sequences) <= 1 + 1.03 * lengths.sum() / 128
    assert best_fit(np.array([3, 3, 2, 2, 2]), 6) == [[0, 1], [2, 3, 4]]


def test_labelled_texts(tmp_path: Path, tokenizer: Path, program: Program) -> None:
    reviews = [review(n) for n in range(30)]
    path = write_lines(tmp_path / "r.jsonl", reviews)
    options = ("--format", "examples", "--tokenizer", tokenizer, "--seq", 12)
    report = program.made(path, *options, "--output", tmp_path / "r")["dataset"]
    archive, words = np.load(tmp_path / "r.npz"), loaded(tokenizer)
    assert report["classes"] == ["bad", "good"] and report["samples"] == 30
    assert archive["tokens"].dtype == np.uint16 and archive["tokens"].shape == (30, 12)
    cut = 0
    for row, one in enumerate(reviews):
        ids, length = words(one["text"])["input_ids"], int(archive["lengths"][row])
        cut += len(ids) > 12
        assert archive["tokens"][row].tolist() == [*ids[:12], *[words.pad_token_id] * (12 - length)]
        assert report["classes"][archive["labels"][row]] == one["label"]
    assert report["shortened"] == cut > 0
    held = write_lines(tmp_path / "v.jsonl", [{"text": "the cat", "label": "good"}])
    named = ("--output", tmp_path / "v", "--classes", "bad,good")
    assert program.made(held, *options, *named)["dataset"]["classes"] == ["bad", "good"]
    assert np.load(tmp_path / "v.npz")["labels"].tolist() == [1]


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        ([{"text": "a", "label": "x"}, {"text": "b", "label": 1}], (), "of another kind than that"),
        ([{"text": "a", "label": 0}, {"text": "b"}], (), "no word or number in field `label`"),
        ([{"text": "a", "label": 0}, {"text": "b", "label": -1}], (), "label -1 is below 0"),
        ([{"text": "a", "label": 0}, {"text": "b", "label": True}], (), "no word or number"),
        ([{"text": "a", "label": "x"}, {"text": "b", "label": "z"}], ("--classes", "x,y"),
         "label 'z' is none of the classes x, y"),
        ([{"text": "a", "label": 0}, {"t": "b", "label": 1}], (), "no text in field `text`"),
    ],
)  # fmt: skip
def test_labels_that_make_no_sense(
    lines: list[dict[str, Any]],
    options: tuple[str, ...],
    words: str,
    tmp_path: Path,
    tokenizer: Path,
    program: Program,
) -> None:
    path = write_lines(tmp_path / "r.jsonl", lines)
    wanted = ("--format", "examples", "--tokenizer", tokenizer, "--seq", 12, *options)
    problem = program.wrong(3, path, *wanted, "--output", tmp_path / "x")
    assert words in problem["message"] and problem["line"] == 2


def test_what_was_prepared_can_be_trained_on(
    tmp_path: Path, tokenizer: Path, program: Program
) -> None:
    """Sidecars, heads and rows, from the program to a batch."""
    talks = write_lines(tmp_path / "t.jsonl", [talk(n) for n in range(20)])
    reviews = write_lines(tmp_path / "r.jsonl", [review(n) for n in range(20)])
    root = write_folder(tmp_path / "photos")
    options = ("--tokenizer", tokenizer, "--seq", 128)
    program.made(talks, "--format", "packed", *options, "--output", tmp_path / "packed")
    program.made(reviews, "--format", "examples", *options, "--output", tmp_path / "examples")
    program.made(root, "--format", "images", "--output", tmp_path / "images")
    program.made("--builtin", "digits", "--output", tmp_path / "arrays")
    larger = dict(vocab_size=300, seq_length=128)
    for base, changes in (
        (PACKED, dict(larger, model={**PACKED["model"], "vocab": 300, "seq": 128})),
        (DISTILBERT, dict(larger, model={**DISTILBERT["model"], "vocab": 300, "seq": 128})),
        ({**VIT, "data_format": "images"}, {}),
        (VIT, {}),
    ):
        config = config_of(base, tmp_path / base["data_format"], **changes)
        model = config.model
        classes = model.vocab if model.reads_images else model.classes
        expected = Expected(
            config.data_format, config.seq_length, config.vocab_size, classes, model.image
        )
        assert problems_of(tmp_path / base["data_format"], expected) == []
        batch = next(iter(opened(config, tmp_path / "cache").training.microbatches(range(8))))
        assert len(batch.labels) == 2


def test_digits_are_the_real_ones(tmp_path: Path, program: Program) -> None:
    from sklearn.datasets import load_digits

    report = program.made("--builtin", "digits", "--output", tmp_path / "digits")
    assert report["status"] == "written" and report["dataset"]["samples"] == 1797
    archive, real = np.load(tmp_path / "digits.npz"), load_digits()
    assert np.array_equal(archive["x"] * 16, real.images) and archive["x"].max() == 1
    assert np.array_equal(archive["y"], real.target)
    again = program.made("--builtin", "digits", "--output", tmp_path / "digits")
    assert again["status"] == "unchanged"


def idx(path: Path, array: np.ndarray) -> Path:
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def test_files_of_mnist(tmp_path: Path, program: Program) -> None:
    x, y = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256, np.array([7, 2, 1])
    pictures, labels = idx(tmp_path / "x.gz", x), idx(tmp_path / "y", y)
    options = ("--format", "arrays", "--output", tmp_path / "mnist")
    report = program.made(labels, pictures, *options)["dataset"]
    archive = np.load(tmp_path / "mnist.npz")
    assert np.array_equal(archive["x"], x) and archive["y"].tolist() == [7, 2, 1]
    assert report["classes"] == list("01234567")
    force = (*options, "--force")
    assert "give two files" in program.wrong(3, pictures, pictures, *force)["message"]
    labels.write_bytes(labels.read_bytes()[:-1])
    assert "has 2 numbers instead of 3" in program.wrong(3, pictures, labels, *force)["message"]
    labels.write_bytes(b"text")
    assert "is not a file in MNIST's format" in program.wrong(3, labels, *force)["message"]


def test_a_tokenizer_that_is_not_there(tmp_path: Path, tokenizer: Path, program: Program) -> None:
    path = write_lines(tmp_path / "t.jsonl", [talk(1)])
    options = ("--format", "packed", "--seq", 64, "--output", tmp_path / "out" / "x")
    (tmp_path / "empty").mkdir()
    problem = program.wrong(3, path, *options, "--tokenizer", tmp_path / "empty")
    assert problem["file"].endswith("empty/tokenizer.json")
    assert "nothing is downloaded" in problem["hint"]
    problem = program.wrong(3, path, *options, "--tokenizer", tmp_path / "nowhere")
    assert problem["file"].endswith("nowhere") and "nothing is downloaded" in problem["hint"]
    (tmp_path / "tokenizer.json").write_text("{")
    problem = program.wrong(3, path, *options, "--tokenizer", tmp_path / "tokenizer.json")
    assert "is not a tokenizer that transformers can load" in problem["message"]
    alone = tokenizer / "tokenizer.json"  # without what says which token ends a text
    problem = program.wrong(3, path, *options, "--tokenizer", alone)
    assert "has no token that ends a text" in problem["message"]


# torchvision as it is where it was built for another torch.
BESIDE_A_MODEL = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from hpctrain.data.making.text_tokenizers import tokenizer_digest, load_hugging_face
found = load_hugging_face(Path(sys.argv[1]))
loaded = sorted(name for name in sys.modules if name.startswith("transformers.models.llama"))
print(json.dumps([found.encode(["some words", "more"]), found.vocab_size, found.end, loaded]))
"""


@pytest.mark.variant("test_errors_of_the_user_are_one_message_and_no_traceback")
def test_a_tokenizer_beside_a_model(tmp_path: Path, tokenizer: Path) -> None:
    """config.json makes transformers import the model's module, and packages along with it."""
    whole = tmp_path / "model"
    shutil.copytree(tokenizer, whole)
    shape = dict(model_type="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    config = dict(shape, architectures=["LlamaForCausalLM"], vocab_size=999)
    (whole / "config.json").write_text(json.dumps(config))
    (tmp_path / "broken" / "torchvision").mkdir(parents=True)
    (tmp_path / "broken" / "torchvision" / "__init__.py").write_text("raise RuntimeError('ABI')")
    command = [sys.executable, "-c", BESIDE_A_MODEL, str(whole), str(tmp_path / "broken")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    ids, vocab_size, end, modules = json.loads(done.stdout)
    words = loaded(tokenizer)
    expected = [
        words(text, add_special_tokens=False)["input_ids"] for text in ("some words", "more")
    ]
    assert (ids, vocab_size, end) == (expected, len(words), words.eos_token)
    assert modules, "the case that is meant: the model's module was imported"
    expected_digest = tokenizer_digest(tokenizer)
    assert tokenizer_digest(whole) == expected_digest, "the model decides about no token"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["x", "--format", "packed"], "--format packed needs --tokenizer"),
        (["x", "--format", "examples", "--tokenizer", "t"], "needs --seq"),
        (["--builtin", "digits", "--format", "tokens"], "digits is for --format arrays"),
        (["x", "--seq", "3"], "--seq is for --format packed and examples"),
        (["x", "--format", "images"], "needs one directory"),
        (["x", "--format", "images", "--tokenizer", "t"], "--tokenizer is for --format tokens"),
        (["x", "--workers", "0"], "must be at least 1"),
        (["--shards", "d", "--share", "2/2"], "I/N with I below N"),
    ],
)
def test_options_that_make_no_sense(argv: list[str], words: str, program: Program) -> None:
    output = [] if "--shards" in argv else ["--output", "data/x"]
    assert __main__.main([*argv, *output]) == 2
    assert words in program.capsys.readouterr().err


# -- Many processes make what one makes; what is finished stays, and is looked at before use ----

SMALL = ("--shard-bytes", 700)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_lines(tmp_path / "in" / "a.jsonl", [talk(n) for n in range(23)])
    write_lines(tmp_path / "in" / "b.jsonl", [talk(n, 1) for n in range(40, 50)])
    write_lines(tmp_path / "reviews.jsonl", [review(n) for n in range(60)])
    write_lines(tmp_path / "texts" / "c.jsonl", [review(n) for n in range(60)])
    (tmp_path / "texts" / "d.txt").write_text("one whole document <|im_end|>\n" * 20)
    return tmp_path


def request(kind: str, place: Path, tokenizer: Path) -> tuple[object, ...]:
    if kind == "packed":
        return (place / "in", "--format", kind, "--tokenizer", tokenizer, "--seq", 128)
    if kind == "examples":
        options = ("--format", kind, "--tokenizer", tokenizer, "--seq", 12)
        return (place / "reviews.jsonl", *options)
    if kind == "tokens":
        return (place / "texts", "--tokenizer", tokenizer)
    return (place / "texts", "--vocab-size", 280)


@pytest.mark.parametrize("kind", ["tokens", "own tokens", "packed", "examples"])
def test_many_processes_make_the_same_bytes(
    kind: str, place: Path, tokenizer: Path, program: Program
) -> None:
    wanted = request(kind, place, tokenizer)
    whole = program.made(*wanted, "--output", place / "one" / "data")
    cut = program.made(*wanted, "--output", place / "two" / "data", *SMALL, "--workers", 3)
    assert digests(place / "one") == digests(place / "two")
    assert whole["dataset"] == cut["dataset"]
    assert not list(place.glob("*/.*")), "no staging directory is left"


def killed_at_shard(number: int, argv: list[str]) -> None:
    """The program in another process, which gets SIGKILL when it begins with that shard."""
    child = os.fork()
    if child == 0:
        original, begun = stages.build_shard, []

        def counted(*arguments: Any) -> Any:
            begun.append(1)
            if len(begun) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments)

        stages.build_shard = counted
        os._exit(__main__.main(argv))
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_what_is_finished_is_not_made_again(place: Path, tokenizer: Path, program: Program) -> None:
    output = place / "out" / "data"
    argv = [*map(str, request("packed", place, tokenizer)), "--output", str(output)]
    argv += map(str, SMALL)
    killed_at_shard(4, argv)
    directory = place / "out" / ".data.partial" / "shards"
    plan = read_plan(directory)
    assert plan is not None and len(plan.shards) > 6
    first, second, third = (directory / f"{one.key}.npz" for one in plan.shards[:3])
    assert not (directory / f"{plan.shards[3].key}.npz").exists()
    raw = bytearray(second.read_bytes())
    raw[len(raw) // 2] ^= 1
    second.write_bytes(raw)
    third.with_suffix(".json").write_text("{")
    code = __main__.main(argv)
    said = program.capsys.readouterr().err
    assert code == 0
    assert (
        said.count("was there") == 1
        and said.count(f"of {len(plan.shards)} made\n") == len(plan.shards) - 1
    )
    assert not directory.exists() and not first.exists()
    program.made(*argv[:-2], "--output", place / "again" / "data")
    assert digests(place / "again")["data.npz"] == digests(place / "out")["data.npz"]


def test_a_wrong_line_has_its_place_and_costs_one_shard(
    place: Path, tokenizer: Path, program: Program
) -> None:
    path, lines = place / "in" / "a.jsonl", [talk(n) for n in range(23)]
    broken = [*lines[:20], {"messages": [{"role": "user"}]}, *lines[21:]]
    write_lines(path, broken)
    wanted = (*request("packed", place, tokenizer), "--output", place / "out" / "data", *SMALL)
    problem = program.wrong(3, *wanted, "--workers", 2)
    assert (problem["file"], problem["line"]) == (str(path), 21)
    assert "message 1 has no `role` or no `content`" in problem["message"]
    assert __main__.main([*map(str, wanted)]) == 3
    assert f"error: {path}:21: message 1" in program.capsys.readouterr().err
    write_lines(path, lines)
    code = __main__.main([*map(str, wanted)])
    said = program.capsys.readouterr().err
    assert code == 0 and said.count(" made\n") <= 2 < said.count("was there")


def test_shares_are_made_elsewhere_and_merged(
    place: Path, tokenizer: Path, program: Program
) -> None:
    wanted = (*request("tokens", place, tokenizer), *SMALL, "--output", place / "two" / "data")
    program.made(*request("tokens", place, tokenizer), "--output", place / "one" / "data")
    plan = program.made(*wanted, "--stage", "plan")
    assert plan["missing"] == plan["shards"] > 4
    directory = plan["directory"]
    first = program.made("--shards", directory, "--share", "0/2")
    assert 0 < first["missing"] < plan["missing"]
    problem = program.wrong(1, *wanted, "--stage", "merge")
    assert f"{first['missing']} of {plan['shards']} shards are missing" in problem["message"]
    assert program.made(*wanted, "--stage", "plan")["missing"] == first["missing"]
    assert program.made("--shards", directory, "--share", "1/2")["missing"] == 0
    program.made(*wanted, "--stage", "merge")
    same, other = digests(place / "one"), digests(place / "two")
    assert {**same, "data.json": ""} == {**other, "data.json": ""}
    assert program.made(*wanted, "--stage", "plan")["status"] == "unchanged"


def test_whoever_merges_hears_why_a_share_failed(
    place: Path, tokenizer: Path, program: Program
) -> None:
    path = place / "texts" / "c.jsonl"
    path.write_text(path.read_text() + '{"text": 3}\n')
    wanted = (*request("tokens", place, tokenizer), *SMALL, "--output", place / "out" / "data")
    directory = program.made(*wanted, "--stage", "plan")["directory"]
    share = program.wrong(3, "--shards", directory)
    merge = program.wrong(3, *wanted, "--stage", "merge")
    assert share == merge
    assert (merge["file"], merge["line"]) == (str(path), 61)
    assert "has no text in field `text`" in merge["message"]


def test_a_damaged_shard_is_found_when_merging(
    place: Path, tokenizer: Path, program: Program
) -> None:
    wanted = (*request("examples", place, tokenizer), *SMALL, "--output", place / "out" / "data")
    directory = Path(program.made(*wanted, "--stage", "plan")["directory"])
    program.made("--shards", directory)
    victim = sorted(directory.glob("*.npz"))[1]
    raw = bytearray(victim.read_bytes())
    raw[-200] ^= 1
    victim.write_bytes(raw)
    problem = program.wrong(1, *wanted, "--stage", "merge")
    assert f"{victim} is not what it was" in problem["message"]
    assert program.made(*wanted)["status"] == "written", "and is made again"


def test_an_input_that_changes_between_plan_and_shards_is_noticed(
    place: Path, tokenizer: Path, program: Program
) -> None:
    wanted = (*request("examples", place, tokenizer), "--output", place / "out" / "data")
    directory = program.made(*wanted, "--stage", "plan")["directory"]
    path = place / "reviews.jsonl"
    path.write_text(path.read_text().replace("good", "Good"))
    assert program.wrong(3, "--shards", directory)["message"] == (
        "changed while the dataset was made"
    )


def test_a_process_that_dies_is_told(
    place: Path,
    tokenizer: Path,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent, original = os.getpid(), stages.build_shard

    def dies(recipe: Any, sources: Any) -> Any:
        if os.getpid() != parent and sources[0].start == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(recipe, sources)

    monkeypatch.setattr(stages, "build_shard", dies)
    wanted = (*request("examples", place, tokenizer), "--output", place / "out" / "data", *SMALL)
    problem = program.wrong(1, *wanted, "--workers", 2)
    assert "was killed" in problem["message"] and "out of memory" in problem["hint"]


def test_images_are_all_looked_at(tmp_path: Path, program: Program) -> None:
    root = write_folder(tmp_path / "photos", per_class=4)
    wanted = (root, "--format", "images", "--output", tmp_path / "out" / "photos")
    options = ("--shard-bytes", 2000, "--workers", 2)
    victim = root / "class-1" / "ä2.png"
    whole = victim.read_bytes()
    victim.write_bytes(whole[:100])
    problem = program.wrong(3, *wanted, *options)
    assert problem["file"] == str(victim) and "cannot be decoded" in problem["message"]
    victim.write_bytes(whole)
    report = program.made(*wanted, *options)["dataset"]
    assert (report["samples"], report["directory"]) == (12, str(root))
    assert report["classes"] == ["class-0", "class-1", "class-2"]


def test_plans_of_old_versions_are_not_gone_on_with(
    place: Path, tokenizer: Path, program: Program
) -> None:
    wanted = (*request("tokens", place, tokenizer), *SMALL, "--output", place / "out" / "data")
    directory = Path(program.made(*wanted, "--stage", "plan")["directory"])
    plan = json.loads((directory / "plan.json").read_text())
    (directory / "plan.json").write_text(json.dumps({**plan, "unknown": 1}))
    assert "has no plan" in program.wrong(3, "--shards", directory)["message"]
    assert program.made(*wanted)["status"] == "written"
