"""A tokenizer of transformers, from a local directory or a tokenizer.json. Nothing is downloaded.

Belongs here: loading it, and what ends and pads a text. Does not belong here: our own tokenizer
(see `tokens`), what is tokenized.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.prepare.tokens import missing
from hpctrain.store.datasets import END_OF_DOCUMENT
from hpctrain.train.engines.models.transformers_library import class_named, hide_optional_packages

TOKENIZER_NAME = "tokenizer.json"
# What decides about ids and chats beside tokenizer.json, where it is there.
_MORE_FILES = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """`inner` is a fast tokenizer; `vocab_size` is above all of its ids."""

    inner: Any
    vocab_size: int
    end: str
    end_id: int
    pad_id: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without special tokens of the tokenizer's own."""
        ids = self.inner(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [list(one) for one in ids]


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json of a directory, or the file itself."""
    return path / TOKENIZER_NAME if path.is_dir() else path


def digest_of(path: Path) -> str:
    """SHA-256 over everything that decides about its ids and chats. Raises InvalidInputError."""
    files = [tokenizer_file(path)]
    if path.is_dir():
        files += [path / name for name in _MORE_FILES]
    digest = hashlib.sha256()
    for file in files:
        if file == files[0] or file.exists():
            digest.update(f"{file.name}\n{hashlib.sha256(_bytes_of(file)).hexdigest()}\n".encode())
    return digest.hexdigest()


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        hint = None
        if not file.exists():
            hint = (
                "stage the tokenizer before, on a node with internet: "
                "`AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)` in Python; "
                "nothing is downloaded here"
            )
        problem = Problem(f"cannot be read: {error.strerror}", file=str(file), hint=hint)
        raise InvalidInputError([problem]) from error


def load_hugging_face(path: Path) -> HuggingFaceTokenizer:
    """A directory with tokenizer.json and its settings, or the file alone.

    Raises InvalidInputError when it is no fast tokenizer, or has no token that ends a text.
    """
    _bytes_of(tokenizer_file(path))
    inner = _load(path)
    end = inner.eos_token or inner.sep_token
    if end is None and END_OF_DOCUMENT in inner.get_vocab():
        end = END_OF_DOCUMENT
    if end is None:
        hint = "set eos_token in tokenizer_config.json, and give the directory"
        problem = Problem("has no token that ends a text", file=str(path), hint=hint)
        raise InvalidInputError([problem])
    end_id = int(inner.convert_tokens_to_ids(end))
    pad_id = inner.pad_token_id if inner.pad_token_id is not None else end_id
    # the highest id counts, not the number of tokens: ids may have gaps
    highest = max(inner.get_vocab().values())
    return HuggingFaceTokenizer(inner, 1 + highest, end, end_id, int(pad_id))


def _load(path: Path) -> Any:
    try:
        automatic, fast = class_named("AutoTokenizer"), class_named("PreTrainedTokenizerFast")
    except ImportError as error:
        raise missing(error, "data") from error
    try:
        if path.is_dir():
            # a model's config.json beside it makes the library import its module
            with hide_optional_packages():
                inner = automatic.from_pretrained(str(path), local_files_only=True, use_fast=True)
        else:
            inner = fast(tokenizer_file=str(path))
    except Exception as error:  # the library raises bare Exception, and much else
        words = f"is no tokenizer that transformers can load: {error}"
        raise InvalidInputError([Problem(words, file=str(path))]) from error
    if not inner.is_fast:
        problem = Problem("is no fast tokenizer: it cannot be used here", file=str(path))
        raise InvalidInputError([problem])
    inner.model_max_length = 10**9  # lengths are ours to decide
    return inner
