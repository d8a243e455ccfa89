"""Checks before submission that weights and data of a spec exist and fit its model.

Belongs here: which files a spec names, and reporting problems at their place in the spec. Does not
belong here: which properties of data are checked (`hpctrain.records.datasets`), loading
weights (`hpctrain.train.engines.models`), which imports torch.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import open_staged, require_kind
from hpctrain.job.datasets import DatasetDescription, describe_dataset
from hpctrain.records.datasets import (
    COLUMNS,
    DatasetSidecar,
    Expected,
    SamplesSidecar,
    bin_path,
    idx_path,
    npz_path,
    problems_of,
    read_heads,
    sidecar_path,
)
from hpctrain.records.shares import parts_without_documents, parts_without_rows, split_hint
from hpctrain.spec.families.remote_code import unchanged_code
from hpctrain.spec.families.settings import classes_of, disagreements
from hpctrain.spec.loader import Loaded
from hpctrain.spec.run import RunSpec


def check_inputs(spec: Loaded[RunSpec]) -> None:
    """Raise InvalidInputError for everything that would end the job as soon as it starts."""
    check_pretrained(spec)
    check_code(spec)
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


def check_code(spec: Loaded[RunSpec]) -> None:
    """Raise InvalidInputError if a model's own code is not what was allowed to run."""
    counted = spec.document.model.counted
    if counted is None or counted.remote_code is None:
        return
    try:
        unchanged_code(Path(counted.remote_code.directory), counted.remote_code.digest)
    except InvalidInputError as error:
        field = "model.counted.remote_code"
        raise InvalidInputError(
            [spec.problem(field, f"`{field}`: {one}", one.hint) for one in error.problems]
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


# ----------------------------------------------------------------------------------------------
# Look at files of tokens before submission: readable, of one dataset, with ids that the model has.
# Heads, sizes and samples are read, so that a terabyte takes as long as a megabyte.


_NO_TOKENS = "`hpctrain data prepare` makes them from text; paths count from here"
CLOSED = "whoever submits reads it, and so do the nodes: `namei -l FILE` shows who may"
# So many places of a file, evenly spread, and so many tokens at each.
_PLACES, _TOKENS_EACH = 64, 4096
# Of array(3), by the names of megatron-core's DType; floating-point numbers are no ids.
_TYPE_CODES = {"uint8": "B", "int8": "b", "int16": "h", "uint16": "H", "int32": "i", "int64": "q"}


def token_problems(spec: Loaded[RunSpec]) -> Iterator[Problem]:
    """Yield what is wrong with each source, and then with how `data.split` divides them."""
    document = spec.document
    undivided: list[Problem] = []
    for number, source in enumerate(document.data.sources):
        prefix, field = Path(os.path.abspath(source.path)), f"data.sources[{number}].path"
        missing = [
            (path, state)
            for path in (bin_path(prefix), idx_path(prefix))
            if (state := _unopened(path)) is not None
        ]
        if missing:
            for path, state in missing:
                hint = CLOSED if state.startswith("cannot") else _NO_TOKENS
                yield spec.problem(field, f"`{field}`: {path} {state}", hint)
            continue
        try:
            found = describe_dataset(prefix)
        except InvalidInputError as error:
            # Forks of Megatron, whose own programs read it, have other indexes.
            if document.engine.abilities.assembly is not None:
                for one in error.problems:
                    yield spec.problem(field, f"`{field}`: {one}", one.hint)
            continue
        assert isinstance(found, DatasetDescription), "arrays have no index"
        if found.tokens == 0:
            yield spec.problem(field, f"`{field}`: {bin_path(prefix)} has no tokens")
            continue
        try:
            message = _foreign_ids(bin_path(prefix), found, document.model.vocab)
        except OSError as error:
            message = f"{bin_path(prefix)} cannot be read: {error.strerror}"
            yield spec.problem(field, f"`{field}`: {message}")
            continue
        if message is not None:
            yield spec.problem(field, f"`{field}`: {message}", _OTHER_VOCABULARY)
        undivided += _undivided(spec, source.path, found.sequences)
    yield from undivided


def _unopened(path: Path) -> str | None:
    """Describe why a file cannot be opened; None if it can."""
    try:
        if not path.is_file():
            return "is not a file" if path.exists() else "does not exist"
        with path.open("rb"):
            return None
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _undivided(spec: Loaded[RunSpec], source: str, count: int) -> Iterator[Problem]:
    """Report shares of `data.split` that are rounded to no document; Megatron counts sequences."""
    split = spec.document.data.split
    for part in parts_without_documents(split, count):
        message = f"leaves none of the {count} documents of {source} for {part}"
        yield spec.problem("data.split", f"`data.split` {split} {message}", split_hint(count))


def _foreign_ids(path: Path, found: DatasetDescription, vocab: int) -> str | None:
    """Describe token ids outside of a vocabulary; None if the samples have none.

    The sidecar tells of all tokens, and says nothing of a file that was replaced since.
    """
    if found.dtype not in _TYPE_CODES:
        return f"{path} has numbers of type {found.dtype}, which are no token ids"
    if found.sidecar is not None and found.sidecar.vocab_size > vocab:
        return (
            f"{path} was made with a vocabulary of {found.sidecar.vocab_size:,} tokens, the model "
            f"has {vocab:,}"
        )
    # Read tokens from all over the file: all of a small one
    ids: array[int] = array(_TYPE_CODES[found.dtype])
    last = max(0, found.tokens - _TOKENS_EACH)
    starts = sorted({last * place // (_PLACES - 1) for place in range(_PLACES)})
    with path.open("rb") as stream:
        for start in starts:
            stream.seek(start * ids.itemsize)
            raw = stream.read(min(_TOKENS_EACH, found.tokens) * ids.itemsize)
            ids.frombytes(raw[: len(raw) - len(raw) % ids.itemsize])
    wrong = next((one for one in (max(ids), min(ids)) if not 0 <= one < vocab), None)
    if wrong is None:
        return None
    return f"{path} has token id {wrong:,}, and the model has 0 to {vocab - 1:,}"
