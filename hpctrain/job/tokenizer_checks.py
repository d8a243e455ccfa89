"""Look at the tokenizer of a spec before submission: readable, and with ids that the model has.

Belongs here: `data.tokenizer`, as JSON. Does not belong here: tokens that were made by it
(`token_checks`), tokenizing (`hpctrain.data.making`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.base.errors import Problem
from hpctrain.spec.loader import Loaded
from hpctrain.spec.run import RunSpec

_FIELD = "data.tokenizer"
_NAME = "tokenizer.json"
_MISSING = "`hpctrain data prepare` makes one from text; paths count from here"
_OTHER_VOCABULARY = "`model.vocab` is the size of the vocabulary that the data was made with"


def tokenizer_problems(spec: Loaded[RunSpec]) -> Iterator[Problem]:
    """Yield why the tokenizer cannot be read, or what it has that the model has not."""
    tokenizer, vocab = spec.document.data.tokenizer, spec.document.model.vocab
    if not tokenizer:
        return
    path = Path(os.path.abspath(tokenizer))
    hint = None
    try:
        message = _unusable(path, vocab)
    except FileNotFoundError:
        message, hint = f"{path} does not exist", _MISSING
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
    except ValueError as error:
        message = f"{path} is no tokenizer: {error}"
    if message is not None:
        hint = _OTHER_VOCABULARY if hint is None and "vocabulary" in message else hint
        yield spec.problem(_FIELD, f"`{_FIELD}`: {message}", hint)


def _unusable(path: Path, vocab: int) -> str | None:
    """Describe why a model of `vocab` ids cannot use it. Raises OSError, ValueError."""
    file = path
    if path.is_dir():
        file = path / _NAME
        if not file.exists():
            return None  # of another library
    if file.suffix != ".json":
        with file.open("rb"):
            return None
    size = _vocabulary_size(json.loads(file.read_bytes()))
    if size is None or size <= vocab:
        return None
    return f"{file} has a vocabulary of {size:,} tokens, the model has {vocab:,}"


def _vocabulary_size(document: Any) -> int | None:
    """Return the number above all ids of a file of `tokenizers`; None for one of other libraries.

    A vocabulary is a mapping to ids (BPE, WordPiece, WordLevel) or a list by id (Unigram).
    """
    try:
        tokens = document["model"]["vocab"]
        added = [int(token["id"]) for token in document.get("added_tokens") or ()]
        ids = tokens.values() if isinstance(tokens, dict) else range(len(tokens))
        return 1 + max([*map(int, ids), *added], default=-1)
    except (AttributeError, KeyError, TypeError):
        return None
