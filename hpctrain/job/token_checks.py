"""Look at files of tokens before submission: readable, of one dataset, with ids that the model has.

Heads, sizes and samples are read, so that a terabyte takes as long as a megabyte. Belongs here:
`.bin` and `.idx` of a spec. Does not belong here: describing a dataset (`hpctrain.job.datasets`),
other formats (`hpctrain.records.datasets`).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.job.datasets import DatasetDescription, describe_dataset
from hpctrain.records.datasets import bin_path, idx_path
from hpctrain.records.shares import parts_without_documents, split_hint
from hpctrain.spec.loader import Loaded
from hpctrain.spec.run import RunSpec

_MISSING = "`hpctrain data prepare` makes them from text; paths count from here"
CLOSED = "whoever submits reads it, and so do the nodes: `namei -l FILE` shows who may"
_OTHER_VOCABULARY = "`model.vocab` is the size of the vocabulary that the data was made with"
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
            if (state := _unusable(path)) is not None
        ]
        if missing:
            for path, state in missing:
                hint = CLOSED if state.startswith("cannot") else _MISSING
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


def _unusable(path: Path) -> str | None:
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
    ids = _sampled_ids(path, found)
    wrong = next((one for one in (max(ids), min(ids)) if not 0 <= one < vocab), None)
    if wrong is None:
        return None
    return f"{path} has token id {wrong:,}, and the model has 0 to {vocab - 1:,}"


def _sampled_ids(path: Path, found: DatasetDescription) -> array[int]:
    """Read tokens from all over the file: all of a small one."""
    ids: array[int] = array(_TYPE_CODES[found.dtype])
    last = max(0, found.tokens - _TOKENS_EACH)
    starts = sorted({last * place // (_PLACES - 1) for place in range(_PLACES)})
    with path.open("rb") as stream:
        for start in starts:
            stream.seek(start * ids.itemsize)
            raw = stream.read(min(_TOKENS_EACH, found.tokens) * ids.itemsize)
            ids.frombytes(raw[: len(raw) - len(raw) % ids.itemsize])
    return ids
