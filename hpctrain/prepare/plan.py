"""The plan of a dataset: what is made, of which pieces, in which shards.

A shard's key is a digest of everything that its content depends on, so a finished one is good for
ever: after a restart, with other processes, also when some other piece of the input was changed.
Belongs here: these documents and cutting the input up. Does not belong here: making shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.durable import replace_text
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.prepare.corpus import Source
from hpctrain.store.datasets import SkippedFile

_PLAN_NAME = "plan.json"
_VERSION = 1  # of what shards hold: another one makes all of them anew

ShardedFormat = Literal["tokens", "packed", "examples", "images"]


class PlanDocument(BaseModel):
    """Base of the documents of a plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Recipe(PlanDocument):
    """How documents become samples.

    `tokenizer` is a tokenizer.json of our own kind, or (`hugging_face`) a directory or a file
    that transformers loads. `classes` are the names of labels by number, `directory` is where
    the names of images begin.
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
    """One shard and the pieces of the input that it is made of, in order."""

    key: str
    sources: tuple[Source, ...]

    @property
    def size_bytes(self) -> int:
        return sum(source.size_bytes for source in self.sources)


class Plan(PlanDocument):
    """Everything that making shards and putting them together takes."""

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
    """Shards of about `shard_bytes`, whatever the number of processes that make them."""
    shards: list[ShardPlan] = []
    held: list[Source] = []
    held_bytes = 0
    for source in sources:
        held.append(source)
        held_bytes += source.size_bytes
        if held_bytes >= shard_bytes:
            shards.append(ShardPlan(key=_key(recipe, held), sources=tuple(held)))
            held, held_bytes = [], 0
    if held:
        shards.append(ShardPlan(key=_key(recipe, held), sources=tuple(held)))
    return tuple(shards)


def _key(recipe: Recipe, sources: Sequence[Source]) -> str:
    # where a tokenizer lies says nothing about it; its digest does
    made_by = recipe.model_copy(update={"tokenizer": None}).model_dump_json()
    pieces = [f"{source.first_line is not None} {source.sha256}" for source in sources]
    text = "\n".join([str(_VERSION), made_by, *pieces])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def write_plan(directory: Path, plan: Plan) -> None:
    """Put it where the processes that make shards look for it."""
    replace_text(directory / _PLAN_NAME, plan.model_dump_json() + "\n")


def read_plan(directory: Path) -> Plan | None:
    """The plan in a directory of shards; None if there is none of this version."""
    try:
        return Plan.model_validate_json((directory / _PLAN_NAME).read_bytes())
    except (OSError, ValidationError):
        return None


def need_plan(directory: Path) -> Plan:
    """As `read_plan`. Raises InvalidInputError when there is none."""
    plan = read_plan(directory)
    if plan is None:
        hint = "the first stage makes it: --stage plan"
        problem = Problem("has no plan of a dataset", file=str(directory), hint=hint)
        raise InvalidInputError([problem])
    return plan
