"""Making shards: here, by several processes, or a share of them for somebody else.

A shard is an archive `KEY.npz` and a record `KEY.json` with its digest, which is written last. A
shard that could not be made leaves its reason, so that whoever collects them can tell. Belongs
here: files and processes. Does not belong here: what is in a shard (see `texts`, `labelled`,
`conversations`, `pictures`).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.durable import replace_text
from hpctrain.errors import HpctrainError, InvalidInputError, Problem
from hpctrain.prepare.contents import Contents, Counts, contents_of
from hpctrain.prepare.plan import Plan, Recipe, ShardPlan
from hpctrain.store.datasets import ReportedProblem
from hpctrain.train.datasets.archive import write_archive

_CHUNK_BYTES = 1 << 22


class ShardRecord(BaseModel):
    """A finished shard: its digest, and what was counted while it was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    npz_sha256: str
    npz_bytes: int
    counts: Counts


class ShardFailure(BaseModel):
    """Why a shard could not be made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    problems: tuple[ReportedProblem, ...]


@dataclass(frozen=True)
class Shards:
    """The directory in which the shards of a plan are made."""

    directory: Path

    def archive(self, shard: ShardPlan) -> Path:
        return self.directory / f"{shard.key}.npz"

    def _record(self, shard: ShardPlan) -> Path:
        return self.directory / f"{shard.key}.json"

    def _failure(self, shard: ShardPlan) -> Path:
        return self.directory / f"{shard.key}.failed"

    def finished(self, shard: ShardPlan) -> ShardRecord | None:
        """The record of a shard whose content is what it was; reads all of it."""
        try:
            record = ShardRecord.model_validate_json(self._record(shard).read_bytes())
            good = sha256_of_file(self.archive(shard)) == record.npz_sha256
        except (OSError, ValidationError):
            return None
        return record if good and record.key == shard.key else None

    def missing(self, plan: Plan) -> list[ShardPlan]:
        """The shards that are still to be made; without reading those that are there."""
        return [one for one in plan.shards if not self._record(one).exists()]

    def why_missing(self, shards: Sequence[ShardPlan]) -> list[Problem]:
        """What the processes have left that could not make them."""
        found: list[Problem] = []
        for shard in shards:
            try:
                failure = ShardFailure.model_validate_json(self._failure(shard).read_bytes())
            except (OSError, ValidationError):
                continue
            found += [Problem(p.message, p.file, p.line, hint=p.hint) for p in failure.problems]
        return found

    def keep(self, shard: ShardPlan, contents: Contents) -> ShardRecord:
        """Write a shard; whoever else writes the same one writes the same bytes."""
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

    def give_up(self, shard: ShardPlan, problems: Sequence[Problem]) -> None:
        """Leave the reason why there is no such shard."""
        self.directory.mkdir(parents=True, exist_ok=True)
        told = [
            ReportedProblem(message=one.message, file=one.file, line=one.line, hint=one.hint)
            for one in problems
        ]
        failure = ShardFailure(problems=tuple(told))
        replace_text(self._failure(shard), failure.model_dump_json() + "\n")


def sha256_of_file(path: Path) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def make_shards(
    plan: Plan,
    shards: Shards,
    wanted: Sequence[ShardPlan],
    workers: int,
    say: Callable[[str], None],
) -> None:
    """Make those of `wanted` that are not there, or not as they were; by `workers` processes.

    Raises InvalidInputError with what is wrong in the input, HpctrainError when a process dies.
    """
    problems: list[Problem] = []
    for done, outcome in enumerate(_outcomes(plan, shards, wanted, workers), 1):
        problems += outcome.problems
        word = "was there" if outcome.kept else "could not be made" if outcome.problems else "made"
        if len(plan.shards) > 1:
            say(f"shard {done} of {len(wanted)} {word}")
    if problems:
        raise InvalidInputError(problems)


@dataclass(frozen=True)
class _Outcome:
    problems: tuple[Problem, ...] = ()
    kept: bool = False


def _outcomes(
    plan: Plan, shards: Shards, wanted: Sequence[ShardPlan], workers: int
) -> Iterator[_Outcome]:
    if workers == 1 or len(wanted) == 1:
        for shard in wanted:
            yield _make(plan.recipe, shards, shard)
        return
    # forked: what was imported and checked before is there already
    context = multiprocessing.get_context("fork")
    tasks = [(plan.recipe, shards, shard) for shard in wanted]
    try:
        with ProcessPoolExecutor(workers, context, _one_thread) as pool:
            yield from pool.map(_make, *zip(*tasks, strict=True))
    except BrokenProcessPool as error:
        raise HpctrainError(
            "a process that makes shards was killed",
            hint="often the machine is out of memory: use fewer --workers or smaller shards; the "
            "same command goes on with what is missing",
        ) from error


def _one_thread() -> None:
    """The tokenizers library would use all CPUs in each process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _make(recipe: Recipe, shards: Shards, shard: ShardPlan) -> _Outcome:
    """Exceptions would lose their parts on the way between processes."""
    if shards.finished(shard) is not None:
        return _Outcome(kept=True)
    try:
        shards.keep(shard, contents_of(recipe, shard.sources))
    except InvalidInputError as error:
        shards.give_up(shard, error.problems)
        return _Outcome(error.problems)
    return _Outcome()
