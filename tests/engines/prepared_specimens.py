"""A tiny tokenizer of transformers, conversations and labelled texts, and the data program."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.data.making import __main__

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


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, dict[str, Any]]:
    """Exit code and what was printed as JSON."""
    code = __main__.main([*map(str, argv), "--json"])
    return code, json.loads(capsys.readouterr().out)


def made(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code, report = run(capsys, *argv)
    assert code == 0, report
    return report


def digests(directory: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
        if path.is_file()
    }


def wrong(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> dict[str, Any]:
    """The first problem."""
    found, failure = run(capsys, *argv)
    assert found == code, failure
    problem: dict[str, Any] = failure["problems"][0]
    return problem
