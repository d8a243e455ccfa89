"""From finished shards to one dataset and its sidecar.

Belongs here: the last stage: verifying every shard, and dispatch by format. Does not belong here:
how the rows of a format are put together.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from hpctrain.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.prepare.contents import Counts
from hpctrain.prepare.conversations import ANSWERER
from hpctrain.prepare.hugging_face import load_hugging_face, tokenizer_file
from hpctrain.prepare.labelled import join_examples
from hpctrain.prepare.packing import join_conversations
from hpctrain.prepare.pictures import join_pictures
from hpctrain.prepare.plan import Plan
from hpctrain.prepare.shards import Shards, sha256_of_file
from hpctrain.prepare.texts import join_texts
from hpctrain.store.archives import read_heads
from hpctrain.store.datasets import (
    END_OF_DOCUMENT,
    AnySidecar,
    DatasetSidecar,
    SamplesSidecar,
    npz_path,
)


def join(plan: Plan, shards: Shards, prefix: Path) -> AnySidecar:
    """Write the dataset's files beside `prefix`, and say what is in them.

    Raises InvalidInputError with what was wrong in the input where a shard is missing,
    HpctrainError when one was damaged.
    """
    counts = verified(plan, shards)
    if counts.documents == 0:
        raise InvalidInputError([_nothing(plan, counts)])
    archives = [shards.archive(shard) for shard in plan.shards]
    if plan.recipe.format == "tokens":
        return DatasetSidecar(
            **join_texts(plan, archives, counts, prefix), **_of_tokens(plan), **_of_input(plan)
        )
    rows = _join_rows(plan, archives, counts, prefix)
    path = npz_path(prefix)
    _read_back(path, rows)
    return SamplesSidecar(
        format=plan.recipe.format,
        samples=rows,
        seq_length=plan.recipe.seq_length,
        npz_bytes=path.stat().st_size,
        npz_sha256=sha256_of_file(path),
        classes=_classes(plan),
        directory=None if plan.recipe.directory is None else str(plan.recipe.directory),
        **_of_samples(plan, counts),
    )


def verified(plan: Plan, shards: Shards) -> Counts:
    """What all shards hold; every one of them is read and compared with its digest."""
    missing = shards.missing(plan)
    if missing:
        told = shards.why_missing(missing)
        words = f"{len(missing)} of {len(plan.shards)} shards are missing"
        hint = "the same command goes on with what is missing"
        if told:
            raise InvalidInputError(told)
        raise HpctrainError(f"{words} in {shards.directory}", hint=hint)
    total = Counts()
    for shard in plan.shards:
        record = shards.finished(shard)
        if record is None:
            raise HpctrainError(
                f"shard {shards.archive(shard)} is not what it was when it was written",
                hint="the same command makes it again; look at the file system's health",
            )
        total += record.counts
    return total


def _join_rows(plan: Plan, archives: list[Path], counts: Counts, prefix: Path) -> int:
    recipe, target = plan.recipe, npz_path(prefix)
    if recipe.format == "images":
        assert recipe.directory is not None
        return join_pictures(recipe.directory, counts.documents, target)
    if recipe.format == "examples":
        return join_examples(archives, target)
    assert recipe.seq_length is not None and recipe.tokenizer is not None
    pad_id = load_hugging_face(recipe.tokenizer).pad_id
    return join_conversations(archives, recipe.seq_length, pad_id, target)


def _read_back(path: Path, rows: int) -> None:
    """The heads that a trainer will read."""
    found = {head.rows for name, head in read_heads(path).items() if name != "names"}
    if found != {rows}:
        raise HpctrainError(f"{path} reads back with {found} rows, but {rows} were written")


def _nothing(plan: Plan, counts: Counts) -> Problem:
    if counts.dropped:
        return Problem(
            f"none of {counts.dropped} conversations has an answer within "
            f"{plan.recipe.seq_length} tokens",
            hint=f"answers are messages of role `{ANSWERER}`; --seq may be too small",
        )
    return Problem("no documents in the input")


def _of_input(plan: Plan) -> dict[str, Any]:
    return dict(sources_sha256=plan.sources_sha256, request_sha256=plan.request_sha256)


def _of_tokens(plan: Plan) -> dict[str, Any]:
    recipe = plan.recipe
    assert recipe.tokenizer is not None
    end, end_id = END_OF_DOCUMENT, recipe.vocab_size - 1
    if recipe.hugging_face:
        theirs = load_hugging_face(recipe.tokenizer)
        end, end_id = theirs.end, theirs.end_id
    return dict(
        text_bytes=plan.text_bytes,
        vocab_size=recipe.vocab_size,
        end_of_document=end,
        end_of_document_id=end_id,
        tokenizer=plan.tokenizer_reference,
        tokenizer_sha256=_tokenizer_digest(recipe.tokenizer),
    )


def _tokenizer_digest(path: Path) -> str:
    return hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()


def _of_samples(plan: Plan, counts: Counts) -> dict[str, Any]:
    recipe = plan.recipe
    fields = dict(**_of_input(plan), **counts.model_dump(exclude={"documents"}))
    if recipe.tokenizer is not None:
        fields.update(
            vocab_size=recipe.vocab_size,
            tokenizer=plan.tokenizer_reference,
            tokenizer_sha256=_tokenizer_digest(recipe.tokenizer),
        )
    return fields


def _classes(plan: Plan) -> tuple[str, ...]:
    """Of images their directories are the classes."""
    if plan.recipe.format != "images":
        return plan.recipe.classes
    names = (source.name for shard in plan.shards for source in shard.sources)
    return tuple(dict.fromkeys(Path(name).parts[0] for name in names))
