"""What is made of conversations, labelled texts, digits and files of MNIST's format."""

from __future__ import annotations

import gzip
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dataset_specimens import DISTILBERT, PACKED, VIT, config_of, opened, write_folder
from prepared_specimens import (
    TEMPLATE,
    made,
    review,
    talk,
    write_lines,
    write_tokenizer,
    wrong,
)

from hpctrain.data.making import __main__
from hpctrain.data.making.hugging_face_tokenizer import tokenizer_digest
from hpctrain.data.making.merging import best_fit
from hpctrain.records.datasets import Expected, problems_of


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
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks = [talk(n) for n in range(20)]
    path = write_lines(tmp_path / "talks.jsonl", talks)
    options = ("--format", "packed", "--tokenizer", tokenizer, "--seq", 200)
    report = made(capsys, path, *options, "--output", tmp_path / "packed")["dataset"]
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


def test_prompts_with_completions_need_no_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_tokenizer(tmp_path / "plain", template=None)
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "the cat ", "completion": "sat"}] * 3)
    options = ("--format", "packed", "--tokenizer", plain, "--seq", 32)
    made(capsys, path, *options, "--output", tmp_path / "packed")
    archive, words = np.load(tmp_path / "packed.npz"), loaded(plain)
    ((tokens, marks), *_) = texts_of(0, archive)
    assert words.decode(tokens) == "the cat sat<|im_end|>"
    assert words.decode(learned_of(tokens, marks)) == " sat<|im_end|>"
    talks = write_lines(tmp_path / "t.jsonl", [talk(1)])
    refused = (talks, *options, "--output", tmp_path / "chat")
    problem = wrong(capsys, 3, *refused)
    assert "the tokenizer has no chat template" in problem["message"]
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    made(capsys, *refused, "--chat-template", tmp_path / "template.jinja", "--seq", 256)


def test_long_conversations_are_cut_and_those_without_answers_dropped(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = {"messages": [{"role": "user", "content": "the cat"}]}
    path = write_lines(tmp_path / "t.jsonl", [talk(6, 4), silent, talk(1)])
    options = ("--format", "packed", "--tokenizer", tokenizer, "--output", tmp_path / "packed")
    report = made(capsys, path, *options, "--seq", 90)["dataset"]
    assert (report["shortened"], report["dropped"]) == (1, 1)
    problem = wrong(capsys, 3, path, *options, "--seq", 4, "--force")
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_lines(tmp_path / "t.jsonl", [talk(1), line])
    options = ("--format", "packed", "--tokenizer", tokenizer, "--seq", 64)
    problem = wrong(capsys, 3, path, *options, "--output", tmp_path / "out" / "x")
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


def test_labelled_texts(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reviews = [review(n) for n in range(30)]
    path = write_lines(tmp_path / "r.jsonl", reviews)
    options = ("--format", "examples", "--tokenizer", tokenizer, "--seq", 12)
    report = made(capsys, path, *options, "--output", tmp_path / "r")["dataset"]
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
    assert made(capsys, held, *options, *named)["dataset"]["classes"] == ["bad", "good"]
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
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_lines(tmp_path / "r.jsonl", lines)
    wanted = ("--format", "examples", "--tokenizer", tokenizer, "--seq", 12, *options)
    problem = wrong(capsys, 3, path, *wanted, "--output", tmp_path / "x")
    assert words in problem["message"] and problem["line"] == 2


def test_what_was_prepared_can_be_trained_on(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sidecars, heads and rows, from the program to a batch."""
    talks = write_lines(tmp_path / "t.jsonl", [talk(n) for n in range(20)])
    reviews = write_lines(tmp_path / "r.jsonl", [review(n) for n in range(20)])
    root = write_folder(tmp_path / "photos")
    options = ("--tokenizer", tokenizer, "--seq", 128)
    made(capsys, talks, "--format", "packed", *options, "--output", tmp_path / "packed")
    made(capsys, reviews, "--format", "examples", *options, "--output", tmp_path / "examples")
    made(capsys, root, "--format", "images", "--output", tmp_path / "images")
    made(capsys, "--builtin", "digits", "--output", tmp_path / "arrays")
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
        batch = next(iter(opened(config, tmp_path / "cache").training.microbatches(0)))
        assert len(batch.labels) == 2


def test_digits_are_the_real_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sklearn.datasets import load_digits

    report = made(capsys, "--builtin", "digits", "--output", tmp_path / "digits")
    assert report["status"] == "written" and report["dataset"]["samples"] == 1797
    archive, real = np.load(tmp_path / "digits.npz"), load_digits()
    assert np.array_equal(archive["x"] * 16, real.images) and archive["x"].max() == 1
    assert np.array_equal(archive["y"], real.target)
    again = made(capsys, "--builtin", "digits", "--output", tmp_path / "digits")
    assert again["status"] == "unchanged"


def idx(path: Path, array: np.ndarray) -> Path:
    head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    raw = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


def test_files_of_mnist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = np.arange(3 * 28 * 28).reshape(3, 28, 28) % 256, np.array([7, 2, 1])
    pictures, labels = idx(tmp_path / "x.gz", x), idx(tmp_path / "y", y)
    options = ("--format", "arrays", "--output", tmp_path / "mnist")
    report = made(capsys, labels, pictures, *options)["dataset"]
    archive = np.load(tmp_path / "mnist.npz")
    assert np.array_equal(archive["x"], x) and archive["y"].tolist() == [7, 2, 1]
    assert report["classes"] == list("01234567")
    force = (*options, "--force")
    assert "give two files" in wrong(capsys, 3, pictures, pictures, *force)["message"]
    labels.write_bytes(labels.read_bytes()[:-1])
    assert "has 2 numbers instead of 3" in wrong(capsys, 3, pictures, labels, *force)["message"]
    labels.write_bytes(b"text")
    assert "is not a file in MNIST's format" in wrong(capsys, 3, labels, *force)["message"]


def test_a_tokenizer_that_is_not_there(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "t.jsonl", [talk(1)])
    options = ("--format", "packed", "--seq", 64, "--output", tmp_path / "out" / "x")
    (tmp_path / "empty").mkdir()
    problem = wrong(capsys, 3, path, *options, "--tokenizer", tmp_path / "empty")
    assert problem["file"].endswith("empty/tokenizer.json")
    assert "nothing is downloaded" in problem["hint"]
    problem = wrong(capsys, 3, path, *options, "--tokenizer", tmp_path / "nowhere")
    assert problem["file"].endswith("nowhere") and "nothing is downloaded" in problem["hint"]
    (tmp_path / "tokenizer.json").write_text("{")
    problem = wrong(capsys, 3, path, *options, "--tokenizer", tmp_path / "tokenizer.json")
    assert "is not a tokenizer that transformers can load" in problem["message"]
    alone = tokenizer / "tokenizer.json"  # without what says which token ends a text
    problem = wrong(capsys, 3, path, *options, "--tokenizer", alone)
    assert "has no token that ends a text" in problem["message"]


# torchvision as it is where it was built for another torch.
BESIDE_A_MODEL = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from hpctrain.data.making.hugging_face_tokenizer import tokenizer_digest, load_hugging_face
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
def test_options_that_make_no_sense(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = [] if "--shards" in argv else ["--output", "data/x"]
    assert __main__.main([*argv, *output]) == 2
    assert words in capsys.readouterr().err
