"""The plan of a dataset, and its shards: what they are made of, and their files.

A shard's key is a digest of everything that its content depends on. A finished shard therefore
stays valid after a restart, with other processes, or when other input changes. It is an archive
`KEY.npz` and a record `KEY.json`, which is written last. For a shard that could not be made,
`KEY.failed` holds the reason for the process that merges them. Belongs here: these documents and
files, and cutting the input into shards. Does not belong here: making shards (see `stages`), any
format.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.corpus import Source
from hpctrain.records.datasets import DatasetDocument, ReportedProblem, SkippedFile
from hpctrain.train.datasets.npz_arrays import write_archive

_PLAN_NAME = "plan.json"
_VERSION = 1  # of the content of shards; a new one invalidates all of them
# megatron/core/datasets/indexed_dataset.py
_UINT16_VOCABULARY = 65500

ShardedFormat = Literal["tokens", "packed", "examples", "images"]


class Recipe(DatasetDocument):
    """How documents become samples.

    `tokenizer` is a byte-level tokenizer.json, or (`hugging_face`) a directory or a file that
    transformers loads. `classes` are the names of labels by number. `directory` is what the names
    of images are relative to.
    """

    format: ShardedFormat
    tokenizer: Path | None = None
    tokenizer_sha256: str | None = None
    hugging_face: bool = False
    vocab_size: int = 0
    field: str = "text"
    seq_length: int | None = None
    chat_template: str | None = None
    classes: tuple[str, ...] = ()
    directory: Path | None = None


class ShardPlan(DatasetDocument):
    """One shard and its pieces of the input, in order."""

    key: str
    sources: tuple[Source, ...]

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)


class DatasetPlan(DatasetDocument):
    """Everything that is needed to make the shards and to merge them."""

    recipe: Recipe
    shards: tuple[ShardPlan, ...]
    request_sha256: str
    sources_sha256: str
    text_bytes: int
    skipped: tuple[SkippedFile, ...]
    over_budget_files: int
    # as the sidecar names the tokenizer, and where a trained one has to go
    tokenizer_reference: str | None = None
    tokenizer_target: Path | None = None


def cut_into_shards(
    recipe: Recipe, sources: Sequence[Source], shard_bytes: int
) -> tuple[ShardPlan, ...]:
    """Group sources into shards of about `shard_bytes`, independent of the number of processes."""
    # the path of a tokenizer is irrelevant, its digest is part of the recipe
    recipe_json = recipe.model_copy(update={"tokenizer": None}).model_dump_json()
    shards: list[ShardPlan] = []
    group: list[Source] = []
    group_bytes = 0
    for source in sources:
        group.append(source)
        group_bytes += source.size_bytes
        if group_bytes >= shard_bytes or source is sources[-1]:
            pieces = [f"{one.first_line is not None} {one.sha256}" for one in group]
            text = "\n".join([str(_VERSION), recipe_json, *pieces])
            key = hashlib.sha256(text.encode()).hexdigest()[:24]
            shards.append(ShardPlan(key=key, sources=tuple(group)))
            group, group_bytes = [], 0
    return tuple(shards)


def write_plan(directory: Path, plan: DatasetPlan) -> None:
    """Write the plan into the directory of its shards, where the other processes read it."""
    replace_text(directory / _PLAN_NAME, plan.model_dump_json() + "\n")


def read_plan(directory: Path) -> DatasetPlan | None:
    """Read the plan in a directory of shards; None if there is none of this version."""
    try:
        return DatasetPlan.model_validate_json((directory / _PLAN_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def need_plan(directory: Path) -> DatasetPlan:
    """Read the plan in a directory of shards. Raises InvalidInputError when there is none."""
    plan = read_plan(directory)
    if plan is None:
        hint = "the first stage makes it: --stage plan"
        problem = Problem("has no plan of a dataset", file=str(directory), hint=hint)
        raise InvalidInputError([problem])
    return plan


# -- Shards and their files ---------------------------------------------------------------------


class DocumentCounts(DatasetDocument):
    """Counts over the documents of a shard or dataset; the fields are those of `SamplesSidecar`."""

    documents: int = 0
    tokens: int = 0
    learned: int = 0
    shortened: int = 0
    dropped: int = 0

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        mine, theirs = self.model_dump(), other.model_dump()
        return DocumentCounts(**{name: mine[name] + theirs[name] for name in mine})


@dataclass(frozen=True)
class ShardContents:
    """The arrays of a shard by name."""

    columns: Mapping[str, np.ndarray]
    counts: DocumentCounts = field(default_factory=DocumentCounts)


def token_type(vocab_size: int) -> type[np.generic]:
    """Return the smallest type for token ids, as megatron-core does (DType.optimal_dtype)."""
    return np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32


def sha256_of_file(path: Path) -> str:
    """Read a file in blocks and return its SHA-256 in hexadecimal. Raises OSError."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class ShardRecord(DatasetDocument):
    """A finished shard: its digest and counts."""

    key: str
    npz_sha256: str
    npz_bytes: int
    counts: DocumentCounts


class ShardFailure(DatasetDocument):
    """Why a shard could not be made."""

    problems: tuple[ReportedProblem, ...]


@dataclass(frozen=True)
class ShardDirectory:
    """The directory in which the shards of a plan are made."""

    directory: Path

    def archive(self, shard: ShardPlan) -> Path:
        return self.directory / f"{shard.key}.npz"

    def _record(self, shard: ShardPlan) -> Path:
        return self.directory / f"{shard.key}.json"

    def _failure(self, shard: ShardPlan) -> Path:
        return self.directory / f"{shard.key}.failed"

    def intact_record(self, shard: ShardPlan) -> ShardRecord | None:
        """Return the record of a finished shard, or None; reads and digests the whole archive."""
        try:
            record = ShardRecord.model_validate_json(self._record(shard).read_bytes())
            intact = sha256_of_file(self.archive(shard)) == record.npz_sha256
        except (OSError, ValidationError):
            return None
        return record if intact and record.key == shard.key else None

    def missing(self, plan: DatasetPlan) -> list[ShardPlan]:
        """List the shards without a record; reads no archive."""
        return [shard for shard in plan.shards if not self._record(shard).exists()]

    def failure_problems(self, shards: Sequence[ShardPlan]) -> list[Problem]:
        """Collect the problems that were recorded for shards that could not be made."""
        problems: list[Problem] = []
        for shard in shards:
            try:
                failure = ShardFailure.model_validate_json(self._failure(shard).read_bytes())
            except (OSError, ValidationError):
                continue
            problems += [Problem(p.message, p.file, p.line, hint=p.hint) for p in failure.problems]
        return problems

    def write(self, shard: ShardPlan, contents: ShardContents) -> ShardRecord:
        """Write a shard. Concurrent writers of the same shard write the same bytes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        unfinished = self.directory / f".{shard.key}-{os.uname().nodename}-{os.getpid()}"
        try:
            write_archive(unfinished, contents.columns)
            record = ShardRecord(
                key=shard.key,
                npz_sha256=sha256_of_file(unfinished),
                npz_bytes=unfinished.stat().st_size,
                counts=contents.counts,
            )
            os.replace(unfinished, self.archive(shard))
        finally:
            unfinished.unlink(missing_ok=True)
        replace_text(self._record(shard), record.model_dump_json() + "\n")
        self._failure(shard).unlink(missing_ok=True)
        return record

    def write_failure(self, shard: ShardPlan, problems: Sequence[Problem]) -> None:
        """Record why there is no such shard."""
        self.directory.mkdir(parents=True, exist_ok=True)
        failure = ShardFailure(problems=reported(problems))
        replace_text(self._failure(shard), failure.model_dump_json() + "\n")


def reported(problems: Iterable[Problem]) -> tuple[ReportedProblem, ...]:
    """Problems as documents have them."""
    return tuple(
        ReportedProblem(message=p.message, file=p.file, line=p.line, hint=p.hint) for p in problems
    )
