"""The files of shards: an archive, a record with its digest, or the reason why there is none.

A shard is an archive `KEY.npz` and a record `KEY.json`, which is written last. For a shard that
could not be made, `KEY.failed` holds the reason for the process that merges them. Belongs here:
these files. Does not belong here: making shards (see `stages`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.durable import replace_text
from hpctrain.base.errors import Problem
from hpctrain.data.making.dataset_plan import DatasetPlan, ShardPlan
from hpctrain.data.making.digests import sha256_of_file
from hpctrain.data.making.shard_contents import DocumentCounts, ShardContents
from hpctrain.records.datasets import ReportedProblem
from hpctrain.train.datasets.npz_arrays import write_archive


class ShardRecord(BaseModel):
    """A finished shard: its digest and counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    npz_sha256: str
    npz_bytes: int
    counts: DocumentCounts


class ShardFailure(BaseModel):
    """Why a shard could not be made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        reported = tuple(
            ReportedProblem(message=p.message, file=p.file, line=p.line, hint=p.hint)
            for p in problems
        )
        failure = ShardFailure(problems=reported)
        replace_text(self._failure(shard), failure.model_dump_json() + "\n")
