"""Make the shards of a plan, in this process or in several forked ones.

Belongs here: the choice of the format's function, and the processes. Does not belong here: what a
format does (see `tokenized_text`, `labelled_text`, `conversations`, `image_folders`), files (see
`shard_directory`).
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.data.making.conversations import tokenize_conversations
from hpctrain.data.making.corpus import Source
from hpctrain.data.making.dataset_plan import DatasetPlan, Recipe, ShardPlan
from hpctrain.data.making.image_folders import check_images
from hpctrain.data.making.labelled_text import tokenize_examples
from hpctrain.data.making.shard_contents import ShardContents
from hpctrain.data.making.shard_directory import ShardDirectory
from hpctrain.data.making.tokenized_text import tokenize_texts


def build_shard(recipe: Recipe, sources: Sequence[Source]) -> ShardContents:
    """Build the arrays of one shard. Raises InvalidInputError with the problems of its sources."""
    match recipe.format:
        case "images":
            return check_images(sources)
        case "tokens":
            return tokenize_texts(recipe, sources)
        case "examples":
            return tokenize_examples(recipe, sources)
        case "packed":
            return tokenize_conversations(recipe, sources)


def make_shards(
    plan: DatasetPlan,
    directory: ShardDirectory,
    wanted: Sequence[ShardPlan],
    workers: int,
    log: Callable[[str], None],
) -> None:
    """Make those of `wanted` that are missing or damaged, with `workers` processes.

    Raises InvalidInputError with the problems of the input, HpctrainError when a process is killed.
    """
    problems: list[Problem] = []
    for done, outcome in enumerate(_outcomes(plan, directory, wanted, workers), 1):
        problems += outcome.problems
        result = "could not be made" if outcome.problems else "made"
        if len(plan.shards) > 1:
            log(f"shard {done} of {len(wanted)} {'was there' if outcome.kept else result}")
    if problems:
        raise InvalidInputError(problems)


@dataclass(frozen=True)
class _Outcome:
    problems: tuple[Problem, ...] = ()
    kept: bool = False


def _outcomes(
    plan: DatasetPlan, directory: ShardDirectory, wanted: Sequence[ShardPlan], workers: int
) -> Iterator[_Outcome]:
    if workers == 1 or len(wanted) == 1:
        for shard in wanted:
            yield _make_if_needed(plan.recipe, directory, shard)
        return
    # forked processes share the modules that are imported already
    context = multiprocessing.get_context("fork")
    tasks = [(plan.recipe, directory, shard) for shard in wanted]
    # the tokenizers library would use all CPUs in each process
    one_thread = {"TOKENIZERS_PARALLELISM": "false"}
    try:
        with ProcessPoolExecutor(workers, context, os.environ.update, (one_thread,)) as pool:
            yield from pool.map(_make_if_needed, *zip(*tasks, strict=True))
    except BrokenProcessPool as error:
        raise HpctrainError(
            "a process that makes shards was killed",
            hint="often the machine is out of memory: use fewer --workers or smaller shards; the "
            "same command makes only the missing shards",
        ) from error


def _make_if_needed(recipe: Recipe, directory: ShardDirectory, shard: ShardPlan) -> _Outcome:
    """Return problems instead of raising: pickling an exception would lose its attributes."""
    if directory.intact_record(shard) is not None:
        return _Outcome(kept=True)
    try:
        directory.write(shard, build_shard(recipe, shard.sources))
    except InvalidInputError as error:
        directory.write_failure(shard, error.problems)
        return _Outcome(error.problems)
    return _Outcome()
