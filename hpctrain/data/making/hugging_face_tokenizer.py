"""Load a transformers tokenizer from a local directory or a tokenizer.json; never download one.

Belongs here: loading it, and the tokens that end and pad a text. Does not belong here: byte-level
tokenizers (see `byte_tokenizer`), what is tokenized.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.optional_packages import missing_package
from hpctrain.records.datasets import END_OF_DOCUMENT
from hpctrain.train.engines.models.transformers_library import class_named, hide_optional_packages

TOKENIZER_NAME = "tokenizer.json"
# Optional files that affect token ids and chat templates as well.
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
        """Tokenize each text, without the tokenizer's own special tokens."""
        ids = self.inner(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [list(text_ids) for text_ids in ids]


def tokenizer_file(path: Path) -> Path:
    """Return the tokenizer.json of a directory, or the file itself."""
    return path / TOKENIZER_NAME if path.is_dir() else path


def tokenizer_digest(path: Path) -> str:
    """Digest (SHA-256) every file that affects ids and chat texts. Raises InvalidInputError."""
    files = [tokenizer_file(path)]
    if path.is_dir():
        files += [path / name for name in _MORE_FILES]
    digest = hashlib.sha256()
    for file in files:
        if file == files[0] or file.exists():
            file_digest = hashlib.sha256(_read_bytes(file)).hexdigest()
            digest.update(f"{file.name}\n{file_digest}\n".encode())
    return digest.hexdigest()


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        hint = None
        if not file.exists():
            hint = (
                "download the tokenizer beforehand, on a node with internet access: "
                "`AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIRECTORY)` in Python; "
                "nothing is downloaded here"
            )
        problem = Problem(f"cannot be read: {error.strerror}", file=str(file), hint=hint)
        raise InvalidInputError([problem]) from error


def load_hugging_face(path: Path) -> HuggingFaceTokenizer:
    """Load a directory with tokenizer.json and its settings, or the file alone.

    Raises InvalidInputError when it is not a fast tokenizer, or has no token that ends a text.
    """
    _read_bytes(tokenizer_file(path))
    try:
        automatic, fast = class_named("AutoTokenizer"), class_named("PreTrainedTokenizerFast")
    except ImportError as error:
        raise missing_package(error, "data") from error
    try:
        if path.is_dir():
            # otherwise a config.json in the directory imports the model's module
            with hide_optional_packages():
                inner = automatic.from_pretrained(str(path), local_files_only=True, use_fast=True)
        else:
            inner = fast(tokenizer_file=str(path))
    except Exception as error:  # the library raises bare Exception, and much else
        message = f"is not a tokenizer that transformers can load: {error}"
        raise InvalidInputError([Problem(message, file=str(path))]) from error
    if not inner.is_fast:
        problem = Problem("is not a fast tokenizer, which is required here", file=str(path))
        raise InvalidInputError([problem])
    inner.model_max_length = 10**9  # no truncation unless the caller asks for it
    end = inner.eos_token or inner.sep_token
    if end is None and END_OF_DOCUMENT in inner.get_vocab():
        end = END_OF_DOCUMENT
    if end is None:
        hint = "set eos_token in tokenizer_config.json, and give the directory"
        problem = Problem("has no token that ends a text", file=str(path), hint=hint)
        raise InvalidInputError([problem])
    end_id = int(inner.convert_tokens_to_ids(end))
    pad_id = inner.pad_token_id if inner.pad_token_id is not None else end_id
    # the highest id matters, not the number of tokens: ids may have gaps
    highest = max(inner.get_vocab().values())
    return HuggingFaceTokenizer(inner, 1 + highest, end, end_id, int(pad_id))
