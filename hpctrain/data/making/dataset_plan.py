"""The plan of a dataset: the recipe, the pieces of input, and their distribution over shards.

A shard's key is a digest of everything that its content depends on. A finished shard therefore
stays valid after a restart, with other processes, or when other input changes. Belongs here:
these documents and cutting the input into shards. Does not belong here: making shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.data.making.corpus import Source
from hpctrain.records.datasets import SkippedFile

_PLAN_NAME = "plan.json"
_VERSION = 1  # of the content of shards; a new one invalidates all of them

ShardedFormat = Literal["tokens", "packed", "examples", "images"]


class PlanDocument(BaseModel):
    """Base of the documents of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Recipe(PlanDocument):
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


class ShardPlan(PlanDocument):
    """One shard and its pieces of the input, in order."""

    key: str
    sources: tuple[Source, ...]

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)


class DatasetPlan(PlanDocument):
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
    shards: list[ShardPlan] = []
    group: list[Source] = []
    group_bytes = 0
    for source in sources:
        group.append(source)
        group_bytes += source.size_bytes
        if group_bytes >= shard_bytes:
            shards.append(ShardPlan(key=_key(recipe, group), sources=tuple(group)))
            group, group_bytes = [], 0
    if group:
        shards.append(ShardPlan(key=_key(recipe, group), sources=tuple(group)))
    return tuple(shards)


def _key(recipe: Recipe, sources: Sequence[Source]) -> str:
    # the path of a tokenizer is irrelevant, its digest is part of the recipe
    recipe_json = recipe.model_copy(update={"tokenizer": None}).model_dump_json()
    pieces = [f"{source.first_line is not None} {source.sha256}" for source in sources]
    text = "\n".join([str(_VERSION), recipe_json, *pieces])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


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
