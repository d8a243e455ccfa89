"""Reads the logs of a job and of its ranks, by attempt.

Follows a log by polling, because inotify does not see what other nodes write on a shared file
system.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpctrain.actions.runs import RunFiles
from hpctrain.errors import UsageError
from hpctrain.store.jobs import started_ids

_JOB_LOG = re.compile(r"slurm-(?P<job>\d+)(?:_(?P<task>\d+))?\.out")
_ATTEMPT = re.compile(r"(?P<job>\d+)\.(?P<restart>\d+)")
_RANK_LOG = re.compile(r"step(?P<step>\d+)-rank(?P<rank>\d+)\.log")
_POLL_SECONDS = 1.0


def attempt_directories(run: RunFiles) -> list[Path]:
    """List the log directories `JOB.RESTART`, in the order of the attempts."""
    matches = ((path, _ATTEMPT.fullmatch(path.name)) for path in run.layout.logs.iterdir())
    found = [(int(m["job"]), int(m["restart"]), path) for path, m in matches if m]
    # by the start of the jobs, because the last element of an array has the lowest id
    order = {job_id: n for n, job_id in enumerate(started_ids(run.ledger.events()))}
    found.sort(key=lambda one: (order.get(one[0], len(order)), *one))
    return [path for _, _, path in found]


def job_logs(run: RunFiles) -> list[Path]:
    """List the logs of job script and supervisor, one file per job id, oldest first."""
    matches = ((path, _JOB_LOG.fullmatch(path.name)) for path in run.layout.logs.iterdir())
    found = [(int(m["job"]), int(m["task"] or 0), path) for path, m in matches if m]
    return [path for _, _, path in sorted(found)]


def rank_logs(run: RunFiles, rank: int, attempt: int | None = None) -> list[Path]:
    """List the logs of one rank in order of launches; `attempt` counts from 1, None means all.

    Raises UsageError when there is no such attempt or no log of that rank.
    """
    directories = attempt_directories(run)
    if attempt is not None:
        if not 1 <= attempt <= len(directories):
            raise UsageError(f"run `{run.run_id}` has {len(directories)} attempts with logs")
        directories = [directories[attempt - 1]]
    logs: list[Path] = []
    for directory in directories:
        matches = ((path, _RANK_LOG.fullmatch(path.name)) for path in directory.iterdir())
        mine = [(int(m["step"]), path) for path, m in matches if m and int(m["rank"]) == rank]
        logs += [path for _, path in sorted(mine)]
    if not logs:
        raise UsageError(f"run `{run.run_id}` has no log of rank {rank} yet")
    return logs


def follow(newest_log: Callable[[], Path | None], over: Callable[[], bool]) -> Iterator[str]:
    """Yield text as it appears in the newest log, moving on when a newer log appears.

    Ends when `over()` is true and everything has been read.
    """
    current: Path | None = None
    position = 0
    while True:
        last_round = over()
        newest = newest_log()
        if newest is not None and newest != current:
            if current is not None:
                yield from _read_from(current, position)[0]
            current, position = newest, 0
        if current is not None:
            texts, position = _read_from(current, position)
            yield from texts
        if last_round:
            return
        time.sleep(_POLL_SECONDS)


def _read_from(path: Path, position: int) -> tuple[list[str], int]:
    with path.open("rb") as stream:
        stream.seek(position)
        data = stream.read()
    return ([data.decode(errors="replace")] if data else []), position + len(data)
