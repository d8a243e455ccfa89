"""Checks before submission that weights and data of a spec exist and fit its model.

Belongs here: which files a spec names, and reporting problems at their place in the spec. Does not
belong here: which properties of data are checked (`hpctrain.records.datasets`), loading
weights (`hpctrain.train.engines.models`), which imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import open_staged, require_kind
from hpctrain.engines.described import disagreements
from hpctrain.engines.hugging_face import classes_of
from hpctrain.job.token_checks import token_problems
from hpctrain.records.datasets import (
    COLUMNS,
    DatasetSidecar,
    Expected,
    SamplesSidecar,
    npz_path,
    problems_of,
    read_heads,
    sidecar_path,
)
from hpctrain.records.shares import parts_without_rows, split_hint
from hpctrain.spec.loader import Loaded
from hpctrain.spec.run import RunSpec


def check_inputs(spec: Loaded[RunSpec]) -> None:
    """Raise InvalidInputError for everything that would end the job as soon as it starts."""
    check_pretrained(spec)
    check_samples(spec)


def check_pretrained(spec: Loaded[RunSpec]) -> None:
    """Raise InvalidInputError if `model.pretrained` does not hold the model of the spec."""
    model, field = spec.document.model, "model.pretrained"
    if model.pretrained is None:
        return
    try:
        staged = open_staged(Path(os.path.abspath(model.pretrained)))
        require_kind(staged, spec.document.engine.abilities.weights)
        problems = [Problem(message) for message in disagreements(model, staged.config)]
    except InvalidInputError as error:
        problems = list(error.problems)
    if problems:
        raise InvalidInputError(
            [spec.problem(field, f"`{field}`: {one.message}", one.hint) for one in problems]
        ) from None


def check_samples(spec: Loaded[RunSpec]) -> None:
    """Raise InvalidInputError if data files are missing or do not fit the model."""
    data, model = spec.document.data, spec.document.model
    if data.format == "tokens":
        problems = list(token_problems(spec))
    else:
        expected = Expected(
            format=data.format,
            seq_length=model.seq,
            vocab_size=model.vocab,
            classes=classes_of(model),
            side=model.image,
        )
        named = [(f"data.sources[{n}].path", one.path) for n, one in enumerate(data.sources)]
        named += [("data.validation", data.validation)] if data.validation is not None else []
        problems = [
            spec.problem(field, f"`{field}`: {problem}", problem.hint)
            for field, path in named
            for problem in problems_of(Path(os.path.abspath(path)), expected)
        ] or list(_empty_rows(spec))
    problems += tokenizer_problems(spec)
    if problems:
        raise InvalidInputError(problems)


def sidecar_notes(spec: Loaded[RunSpec]) -> Iterator[str]:
    """Yield what lies where `data prepare` writes a sidecar, and is none.

    It is no problem: files of text are often named so, and data of others have no sidecar.
    """
    tokens = spec.document.data.format == "tokens"
    for source in spec.document.data.sources:
        file = sidecar_path(Path(os.path.abspath(source.path)))
        try:
            content = file.read_bytes()
            (DatasetSidecar if tokens else SamplesSidecar).model_validate_json(content)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            yield f"{file} cannot be read: {error.strerror}"
        except ValidationError:
            yield f"{file} is not as `data prepare` writes it, and was not compared with the data"


def _empty_rows(spec: Loaded[RunSpec]) -> Iterator[Problem]:
    """Report parts that are read but get no sample; image folders are not counted here."""
    data = spec.document.data
    files = [npz_path(Path(os.path.abspath(source.path))) for source in data.sources]
    if data.validation is not None or not files or not all(file.is_file() for file in files):
        return
    column = next(iter(COLUMNS[data.format]))
    count = sum(read_heads(file)[column].rows for file in files)
    read = ("training", "validation") if spec.document.evaluation.every_steps else ("training",)
    for part in parts_without_rows(data.split, count):
        if part in read:
            message = f"leaves none of {count} samples for {part}"
            yield spec.problem(
                "data.split", f"`data.split` {data.split} {message}", split_hint(count)
            )


# ----------------------------------------------------------------------------------------------
# Look at the tokenizer of a spec before submission: readable, and with ids that the model has.


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
