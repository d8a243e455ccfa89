"""Write one rank's files of one checkpoint, digest them, and report how that ended.

Runs in the process of a writer, whichever kind it is. Belongs here: one job and its result. Does
not belong here: processes (see `writer`, `spawned_writer`), what is written (see the engines'
rooms).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import write_rank_digests
from hpctrain.train.faults import is_full
from hpctrain.train.free_space import exhausted
from hpctrain.train.step_agreement import WriterState
from hpctrain.train.storage import is_away, lost_in


@dataclass(frozen=True)
class WriteJob:
    """What one rank writes below `directory`; `write` returns names of files and a result."""

    rank: int
    run: RunLayout
    directory: Path
    write: Callable[[], tuple[list[str], Any]]


@dataclass(frozen=True)
class WriteResult:
    """How a job ended: `value` is the result of `write`, or the reason as text."""

    state: WriterState
    value: Any


def run_job(job: WriteJob) -> WriteResult:
    """Write and digest; never raises."""
    try:
        names, value = job.write()
        write_rank_digests(job.directory, job.rank, names)
        return WriteResult(WriterState.FINISHED, value)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if is_full(error) or exhausted(job.directory):
            return WriteResult(WriterState.NO_SPACE, reason)
        if lost_in(job.directory, error) or is_away(error, job.run):
            return WriteResult(WriterState.AWAY, reason)
        return WriteResult(WriterState.FAILED, reason)
