"""Format `examples`: lines `{"text": ..., "label": ...}` to token rows of one length with a class.

Belongs here: labels and their names, shards, and joining them. Does not belong here: tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.corpus import Line, Source, batches, read_lines
from hpctrain.data.making.shards import DocumentCounts, Recipe, ShardContents, token_type
from hpctrain.data.making.text_tokenizers import load_hugging_face
from hpctrain.data.making.tokenized_text import BATCH_CHARACTERS
from hpctrain.train.datasets.npz_arrays import Pieces, open_archive, write_archive

LABEL_FIELD = "label"
_COLUMNS = ("tokens", "lengths", "labels")


def find_classes(sources: Sequence[Source]) -> tuple[str, ...]:
    """Find the class names by number: numbers up to the largest, or words in sorted order.

    Raises InvalidInputError for a line without a label, or when words and numbers are mixed.
    """
    words: set[str] = set()
    largest, first = -1, None
    for line in read_lines(sources):
        label = _label_of(line)
        if first is not None and type(label) is not type(first.fields[LABEL_FIELD]):
            place = f"{first.file}:{first.number}"
            raise line.error(f"label {label!r} is of another kind than that of {place}")
        first = first or line
        if isinstance(label, int):
            largest = max(largest, label)
        else:
            words.add(label)
    if first is None:
        raise InvalidInputError([Problem("no lines in the input")])
    return tuple(sorted(words)) or tuple(map(str, range(largest + 1)))


def _label_of(line: Line) -> int | str:
    label = line.fields.get(LABEL_FIELD)
    if isinstance(label, bool) or not isinstance(label, int | str) or label == "":
        hint = f'lines are {{"text": ..., "{LABEL_FIELD}": word or number}}'
        raise line.error(f"has no word or number in field `{LABEL_FIELD}`", hint)
    if isinstance(label, int) and label < 0:
        raise line.error(f"label {label} is below 0")
    return label


def tokenize_examples(recipe: Recipe, sources: Sequence[Source]) -> ShardContents:
    """Tokenize with the tokenizer's special tokens; truncate and pad to `seq_length`."""
    assert recipe.tokenizer is not None and recipe.seq_length is not None
    tokenizer, length = load_hugging_face(recipe.tokenizer), recipe.seq_length
    tokenizer.inner.backend_tokenizer.encode_special_tokens = True
    labels, texts = [], []
    for line in read_lines(sources):
        name = str(_label_of(line))
        if name not in recipe.classes:
            known = ", ".join(recipe.classes[:10])
            raise line.error(f"label {name!r} is none of the classes {known}")
        labels.append(recipe.classes.index(name))
        texts.append(line.text(recipe.field))
    tokens = np.full((len(texts), length), tokenizer.pad_id, token_type(recipe.vocab_size))
    lengths, shortened = np.zeros(len(texts), np.int32), 0
    row = 0
    for batch in batches(texts, BATCH_CHARACTERS):
        full = tokenizer.inner(batch, return_length=True, return_attention_mask=False)["length"]
        shortened += sum(full_length > length for full_length in full)
        for ids in tokenizer.inner(batch, truncation=True, max_length=length)["input_ids"]:
            tokens[row, : len(ids)] = ids
            lengths[row] = len(ids)
            row += 1
    columns = {"tokens": tokens, "lengths": lengths, "labels": np.array(labels, np.int32)}
    counts = DocumentCounts(
        documents=len(texts),
        tokens=int(lengths.sum()),
        learned=len(texts),
        shortened=shortened,
    )
    return ShardContents(columns, counts)


def join_examples(archives: Sequence[Path], target: Path) -> int:
    """Concatenate the rows of all shards in `target`; returns their number."""
    parts = [open_archive(path, _COLUMNS) for path in archives]
    rows = sum(len(part["labels"]) for part in parts)
    arrays = {}
    for name in _COLUMNS:
        pieces = [part[name] for part in parts]
        arrays[name] = Pieces(pieces[0].dtype, (rows, *pieces[0].shape[1:]), pieces)
    write_archive(target, arrays)
    return rows
