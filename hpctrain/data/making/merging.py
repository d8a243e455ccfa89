"""Last stage: verify all shards, and merge them into one dataset and its sidecar.

Belongs here: verification, and dispatch by format. Does not belong here: how the rows of a format
are joined.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.data.making.conversations import ASSISTANT_ROLE
from hpctrain.data.making.dataset_plan import DatasetPlan
from hpctrain.data.making.digests import sha256_of_file
from hpctrain.data.making.hugging_face_tokenizer import load_hugging_face, tokenizer_file
from hpctrain.data.making.image_folders import join_images
from hpctrain.data.making.labelled_text import join_examples
from hpctrain.data.making.shard_contents import DocumentCounts
from hpctrain.data.making.shard_directory import ShardDirectory
from hpctrain.data.making.tokenized_text import join_texts
from hpctrain.records.datasets import (
    END_OF_DOCUMENT,
    AnySidecar,
    DatasetSidecar,
    SamplesSidecar,
    npz_path,
    read_heads,
)
from hpctrain.train.datasets.npz_arrays import Pieces, open_archive, write_archive


def join(plan: DatasetPlan, shards: ShardDirectory, prefix: Path) -> AnySidecar:
    """Write the dataset's files beside `prefix`, and return the sidecar that describes them.

    Raises InvalidInputError with the problems of the input where a shard is missing,
    HpctrainError when one was damaged.
    """
    counts = verified_counts(plan, shards)
    if counts.documents == 0:
        if counts.dropped:
            problem = Problem(
                f"none of {counts.dropped} conversations has an answer within "
                f"{plan.recipe.seq_length} tokens",
                hint=f"answers are messages of role `{ASSISTANT_ROLE}`; --seq may be too small",
            )
        else:
            problem = Problem("no documents in the input")
        raise InvalidInputError([problem])
    archives = [shards.archive(shard) for shard in plan.shards]
    if plan.recipe.format == "tokens":
        files = join_texts(plan, archives, counts, prefix)
        return DatasetSidecar(
            **files,
            **_tokenizer_fields(plan),
            sources_sha256=plan.sources_sha256,
            request_sha256=plan.request_sha256,
        )
    sample_format = plan.recipe.format
    path = npz_path(prefix)
    rows = _join_rows(plan, archives, counts, path)
    rows_read = {head.rows for name, head in read_heads(path).items() if name != "names"}
    if rows_read != {rows}:
        raise HpctrainError(f"{path} reads back with {rows_read} rows, but {rows} were written")
    recipe, classes = plan.recipe, plan.recipe.classes
    tokenizer_sha256 = None
    if recipe.tokenizer is not None:
        tokenizer_sha256 = sha256_of_file(tokenizer_file(recipe.tokenizer))
    if recipe.format == "images":
        # the directories are the classes
        names = (source.name for shard in plan.shards for source in shard.sources)
        classes = tuple(dict.fromkeys(Path(name).parts[0] for name in names))
    return SamplesSidecar(
        format=sample_format,
        samples=rows,
        seq_length=recipe.seq_length,
        npz_bytes=path.stat().st_size,
        npz_sha256=sha256_of_file(path),
        classes=classes,
        directory=None if recipe.directory is None else str(recipe.directory),
        sources_sha256=plan.sources_sha256,
        request_sha256=plan.request_sha256,
        **counts.model_dump(exclude={"documents"}),
        vocab_size=None if tokenizer_sha256 is None else recipe.vocab_size,
        tokenizer=None if tokenizer_sha256 is None else plan.tokenizer_reference,
        tokenizer_sha256=tokenizer_sha256,
    )


def verified_counts(plan: DatasetPlan, shards: ShardDirectory) -> DocumentCounts:
    """Compare every shard with its digest, and return the sum of their counts."""
    missing = shards.missing(plan)
    if missing:
        if problems := shards.failure_problems(missing):
            raise InvalidInputError(problems)
        message = f"{len(missing)} of {len(plan.shards)} shards are missing in {shards.directory}"
        raise HpctrainError(message, hint="the same command makes only the missing shards")
    total = DocumentCounts()
    for shard in plan.shards:
        record = shards.intact_record(shard)
        if record is None:
            raise HpctrainError(
                f"shard {shards.archive(shard)} is not what it was when it was written",
                hint="the same command makes it again; check the health of the file system",
            )
        total += record.counts
    return total


def _join_rows(
    plan: DatasetPlan, archives: list[Path], counts: DocumentCounts, target: Path
) -> int:
    recipe = plan.recipe
    if recipe.format == "images":
        assert recipe.directory is not None
        return join_images(recipe.directory, counts.documents, target)
    if recipe.format == "examples":
        return join_examples(archives, target)
    assert recipe.seq_length is not None and recipe.tokenizer is not None
    pad_id = load_hugging_face(recipe.tokenizer).pad_id
    return join_conversations(archives, recipe.seq_length, pad_id, target)


def _tokenizer_fields(plan: DatasetPlan) -> dict[str, Any]:
    recipe = plan.recipe
    assert recipe.tokenizer is not None
    end, end_id = END_OF_DOCUMENT, recipe.vocab_size - 1
    if recipe.hugging_face:
        tokenizer = load_hugging_face(recipe.tokenizer)
        end, end_id = tokenizer.end, tokenizer.end_id
    return dict(
        text_bytes=plan.text_bytes,
        vocab_size=recipe.vocab_size,
        end_of_document=end,
        end_of_document_id=end_id,
        tokenizer=plan.tokenizer_reference,
        tokenizer_sha256=sha256_of_file(tokenizer_file(recipe.tokenizer)),
    )


# -- Format `packed`, second half: pack conversations into sequences of one length --------------
# Best-fit decreasing (Ding et al. 2024, arXiv 2404.10830): each conversation goes whole into the
# fullest sequence with enough free space, the longest conversation first.


_COLUMNS = ("tokens", "learned", "lengths")
_SEQUENCES_AT_ONCE = 256


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Assign conversations to sequences; returns the conversation numbers of each sequence.

    All `lengths` are at most `capacity`. Deterministic; time n log n.
    """
    sequences: list[list[int]] = []
    free_sizes: list[int] = []  # distinct free spaces, sorted
    by_free: dict[int, list[int]] = {}  # the sequences with that free space
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        index = bisect_left(free_sizes, length)
        if index == len(free_sizes):
            sequence, free = len(sequences), capacity
            sequences.append([])
        else:
            free = free_sizes[index]
            sequence = by_free[free].pop()
            if not by_free[free]:
                del by_free[free], free_sizes[index]
        sequences[sequence].append(number)
        left = free - length
        if left:
            if left not in by_free:
                insort(free_sizes, left)
            by_free.setdefault(left, []).append(sequence)
    return sequences


@dataclass(frozen=True)
class _Shard:
    """The conversations of one shard; `begins` are their offsets in its token columns."""

    columns: dict[str, np.ndarray]
    begins: np.ndarray


def join_conversations(archives: Sequence[Path], capacity: int, pad_id: int, target: Path) -> int:
    """Pack the conversations of all shards; returns the number of sequences.

    The bytes do not depend on how the input was cut into shards.
    """
    shards = []
    for path in archives:
        columns = open_archive(path, _COLUMNS)
        shards.append(_Shard(columns, np.cumsum(columns["lengths"]) - columns["lengths"]))
    lengths = np.concatenate([shard.columns["lengths"] for shard in shards])
    # conversation number -> (its shard, its number within the shard)
    places = [(s, number) for s, shard in enumerate(shards) for number in range(len(shard.begins))]
    sequences = best_fit(lengths, capacity)
    packer = _Packer(shards, places, sequences, capacity, pad_id)
    shape = (len(sequences), capacity)
    dtypes = {name: shards[0].columns[name].dtype for name in ("tokens", "learned")}
    dtypes["positions"] = np.dtype(np.uint16 if capacity <= 2**16 else np.int32)
    write_archive(target, {name: Pieces(dtypes[name], shape, packer.rows(name)) for name in dtypes})
    return len(sequences)


@dataclass(frozen=True)
class _Packer:
    shards: list[_Shard]
    places: list[tuple[int, int]]
    sequences: list[list[int]]
    capacity: int
    pad_id: int

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """Yield blocks of sequences of one column.

        Padding has positions from 0 like a text of its own, and no loss.
        """
        for first in range(0, len(self.sequences), _SEQUENCES_AT_ONCE):
            chosen = self.sequences[first : first + _SEQUENCES_AT_ONCE]
            yield np.stack([self._row(name, numbers) for numbers in chosen])

    def _row(self, name: str, numbers: list[int]) -> np.ndarray:
        values = []
        for shard_number, number in map(self.places.__getitem__, numbers):
            shard = self.shards[shard_number]
            length, begin = int(shard.columns["lengths"][number]), int(shard.begins[number])
            if name == "positions":
                values.append(np.arange(length))
            else:
                values.append(shard.columns[name][begin : begin + length])
        padding = self.capacity - sum(map(len, values))
        fill = self.pad_id if name == "tokens" else 0
        filler = np.arange(padding) if name == "positions" else np.full(padding, fill)
        return np.concatenate([*values, filler])
