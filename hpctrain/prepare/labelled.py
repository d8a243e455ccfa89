"""Texts with a class: lines `{"text": ..., "label": ...}` to tokens of one length.

Belongs here: labels and their names, shards, and joining them. Does not belong here: tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from hpctrain.errors import InvalidInputError, Problem
from hpctrain.prepare.contents import Contents, Counts, token_type
from hpctrain.prepare.corpus import Source, batches
from hpctrain.prepare.hugging_face import load_hugging_face
from hpctrain.prepare.lines import Line, read_lines
from hpctrain.prepare.plan import Recipe
from hpctrain.prepare.texts import BATCH_CHARACTERS
from hpctrain.train.datasets.archive import Pieces, open_archive, write_archive

LABEL_FIELD = "label"
_COLUMNS = ("tokens", "lengths", "labels")


def find_classes(sources: Sequence[Source]) -> tuple[str, ...]:
    """Names of the classes by number: numbers up to the largest, or the words in sorted order.

    Raises InvalidInputError for a line without a label, or when words and numbers are mixed.
    """
    words: set[str] = set()
    largest, first = -1, None
    for line in _all_lines(sources):
        label = _label_of(line)
        if first is not None and type(label) is not type(first.fields[LABEL_FIELD]):
            place = f"{first.file}:{first.number}"
            raise line.wrong(f"label {label!r} is of another kind than that of {place}")
        first = first or line
        if isinstance(label, int):
            largest = max(largest, label)
        else:
            words.add(label)
    if first is None:
        raise InvalidInputError([Problem("no lines in the input")])
    return tuple(sorted(words)) or tuple(map(str, range(largest + 1)))


def _all_lines(sources: Sequence[Source]) -> Iterator[Line]:
    for source in sources:
        yield from read_lines(source)


def _label_of(line: Line) -> int | str:
    label = line.fields.get(LABEL_FIELD)
    if isinstance(label, bool) or not isinstance(label, int | str) or label == "":
        hint = f'lines are {{"text": ..., "{LABEL_FIELD}": word or number}}'
        raise line.wrong(f"has no word or number in field `{LABEL_FIELD}`", hint)
    if isinstance(label, int) and label < 0:
        raise line.wrong(f"label {label} is below 0")
    return label


def _number_of(line: Line, classes: tuple[str, ...]) -> int:
    name = str(_label_of(line))
    if name not in classes:
        known = ", ".join(classes[:10])
        raise line.wrong(f"label {name!r} is none of the classes {known}")
    return classes.index(name)


def tokenize_examples(recipe: Recipe, sources: Sequence[Source]) -> Contents:
    """Tokens with the tokenizer's special ones, cut off and padded to `seq_length`."""
    assert recipe.tokenizer is not None and recipe.seq_length is not None
    tokenizer, length = load_hugging_face(recipe.tokenizer), recipe.seq_length
    tokenizer.inner.backend_tokenizer.encode_special_tokens = True
    labels, texts = [], []
    for line in _all_lines(sources):
        labels.append(_number_of(line, recipe.classes))
        texts.append(line.text(recipe.field))
    tokens = np.full((len(texts), length), tokenizer.pad_id, token_type(recipe.vocab_size))
    lengths, shortened = np.zeros(len(texts), np.int32), 0
    row = 0
    for batch in batches(texts, BATCH_CHARACTERS):
        whole = tokenizer.inner(batch, return_length=True, return_attention_mask=False)["length"]
        shortened += sum(one > length for one in whole)
        cut = tokenizer.inner(batch, truncation=True, max_length=length)["input_ids"]
        for ids in cut:
            tokens[row, : len(ids)] = ids
            lengths[row] = len(ids)
            row += 1
    columns = {"tokens": tokens, "lengths": lengths, "labels": np.array(labels, np.int32)}
    counts = Counts(
        documents=len(texts),
        tokens=int(lengths.sum()),
        learned=len(texts),
        shortened=shortened,
    )
    return Contents(columns, counts)


def join_examples(archives: Sequence[Path], target: Path) -> int:
    """Write the rows of all shards one behind the other; returns their number."""
    parts = [open_archive(path, _COLUMNS) for path in archives]
    rows = sum(len(part["labels"]) for part in parts)
    arrays = {}
    for name in _COLUMNS:
        pieces = [part[name] for part in parts]
        arrays[name] = Pieces(pieces[0].dtype, (rows, *pieces[0].shape[1:]), pieces)
    write_archive(target, arrays)
    return rows
