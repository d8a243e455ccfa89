"""Reads the logs of a job and of its ranks, by attempt.

The log of a rank is a file, or its lines in the log of its node. Follows a log by polling, because
inotify does not see what other nodes write on a shared file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.errors import UsageError
from hpctrain.base.printable_text import printable_line
from hpctrain.judge.causes import Cause
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import started_ids
from hpctrain.records.layout import RunLayout
from hpctrain.records.old_launches import (
    ATTEMPT_NAME,
    LOG_NAME,
    LabelledLines,
    lines_of_rank,
    log_archives,
)
from hpctrain.runs.run_documents import known_any_plan
from hpctrain.slurm.records import JobRecord

_JOB_LOG = re.compile(r"slurm-(?P<job>\d+)(?:_(?P<task>\d+))?\.out")
_POLL_SECONDS = 1.0
# How much of the log of a script is read, and of it told.
_END_BYTES, _MOST_LINES, _LONGEST_LINE = 16384, 20, 300
_SHELL = re.compile(r"^.{0,200}line \d{1,6}: (?:exec: )?")


@dataclass(frozen=True)
class LogPart:
    """One log: the whole file, or the lines of `rank` in the log of its node."""

    path: Path
    rank: int | None = None

    def text(self) -> str:
        """Read all of it. Raises OSError."""
        if self.rank is None:
            return self.path.read_text(errors="replace")
        lines = lines_of_rank(self.path, self.rank)
        return "".join(line.decode(errors="replace") + "\n" for line in lines)


def attempt_directories(run: RunFiles) -> list[Path]:
    """List the log directories `JOB.RESTART`, in the order of the attempts."""
    matches = ((path, ATTEMPT_NAME.fullmatch(path.name)) for path in run.layout.logs.iterdir())
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


def script_end(layout: RunLayout, job: JobRecord) -> tuple[Cause, str] | None:
    """Find why the script of a job ended before its supervisor began: by the end of its own log.

    None without a line that is known, and where the log cannot be read.
    """
    from hpctrain.judge.catalogue import load_signatures
    from hpctrain.supervise.evidence.log_scan import read_signatures

    array = layout.logs.glob(f"slurm-{job.submitted_id}_*.out")  # an element's number is not known
    paths = [path for path in (layout.job_log(job.job_id), *array) if path.exists()]
    if not paths:
        return None
    try:
        with max(paths, key=lambda path: path.stat().st_mtime).open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _END_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return None
    signatures = read_signatures(layout.signatures) or load_signatures()
    matcher = signatures.matcher("script")
    matches = (matcher.match(line) for _, line in matcher.candidates(text, _MOST_LINES))
    found = next(reversed([one for one in matches if one is not None]), None)
    if found is None:
        return None
    means = next(one.means for one in signatures.signatures if one.id == found.signature)
    line = printable_line(_SHELL.sub("", found.line), _LONGEST_LINE)
    words = f"{line}; {means}" if means else line
    how = f"exit code {job.exit_code}" if job.exit_code else "without an exit code"
    reason = f"the script of job {job.job_id} ended before its supervisor began ({how}): {words}"
    return found.cause, reason


def logs_of(run: RunFiles, rank: int | None, attempt: int | None = None) -> list[LogPart]:
    """List the logs of one rank (see `rank_logs`), or of the job if `rank` is None."""
    if rank is not None:
        return rank_logs(run, rank, attempt)
    return [LogPart(path) for path in job_logs(run)]


def rank_logs(run: RunFiles, rank: int, attempt: int | None = None) -> list[LogPart]:
    """List the logs of one rank in order of launches; `attempt` counts from 1, None means all.

    Raises UsageError when there is no such attempt or no log of that rank.
    """
    directories = attempt_directories(run)
    if attempt is not None:
        if not 1 <= attempt <= len(directories):
            raise UsageError(f"run `{run.run_id}` has {len(directories)} attempts with logs")
        directories = [directories[attempt - 1]]
    plan = known_any_plan(run.layout)
    ranks_per_node = plan.nodes.gpus_per_node if plan is not None else None
    logs = [part for one in directories for part in _logs_of_attempt(one, rank, ranks_per_node)]
    if not logs:
        raise UsageError(f"run `{run.run_id}` has no log of rank {rank} yet")
    return logs


def _logs_of_attempt(directory: Path, rank: int, ranks_per_node: int | None) -> list[LogPart]:
    """List the logs of one rank in order of launches.

    Slurm gives each node consecutive ranks (srun(1), --distribution=block). Where a rank has a file
    of its own, the log of its node is that of an agent.
    """
    own: dict[int, LogPart] = {}
    shared: dict[int, LogPart] = {}
    for path in sorted(directory.iterdir()):
        name = LOG_NAME.fullmatch(path.name)
        if name is None:
            continue
        step = int(name["step"])
        if name["rank"]:
            if int(name["rank"]) == rank:
                own[step] = LogPart(path)
        elif ranks_per_node is None:
            if any(True for _ in lines_of_rank(path, rank)):
                shared[step] = LogPart(path, rank)
        elif int(name["node"]) == rank // ranks_per_node:
            shared[step] = LogPart(path, rank)
    return [own.get(step) or shared[step] for step in sorted(own.keys() | shared.keys())]


def packed_logs(run: RunFiles) -> list[Path]:
    """List the archives that contain logs of older launches, the oldest first."""
    return log_archives(run.layout)


def texts(parts: Sequence[LogPart], tail: int | None = None) -> Iterator[str]:
    """Yield the texts of logs, or only the last `tail` lines of all of them. Raises OSError."""
    if tail is None:
        yield from (part.text() for part in parts)
        return
    last: list[str] = []
    for part in reversed(parts):  # the newest has most of them
        lines = part.text().splitlines(keepends=True)[len(last) - tail :]
        last = lines + last
        if len(last) >= tail:
            break
    yield "".join(last)


def follow(
    newest_log: Callable[[], LogPart | None], over: Callable[[], bool], tail: int | None = None
) -> Iterator[str]:
    """Yield text as it appears in the newest log, moving on when a newer log appears.

    Begins with the last `tail` lines of it. Ends when `over()` is true and everything has been
    read.
    """
    current: _Growing | None = None
    while True:
        last_round = over()
        newest = newest_log()
        if newest is not None and (current is None or newest != current.part):
            if current is not None:
                yield from current.read()
            current = _Growing(newest)
            if tail is not None:
                yield "".join("".join(current.read()).splitlines(keepends=True)[-tail:])
                tail = None
        if current is not None:
            yield from current.read()
        if last_round:
            return
        clock.sleep(_POLL_SECONDS)


class _Growing:
    """A log that is read as it grows."""

    def __init__(self, part: LogPart) -> None:
        self.part = part
        self._position = 0
        self._lines = LabelledLines()

    def read(self) -> Iterator[str]:
        """Yield the text that was added since the last call; of a rank among others whole lines."""
        with self.part.path.open("rb") as stream:
            stream.seek(self._position)
            data = stream.read()
        self._position += len(data)
        if self.part.rank is not None:
            found = self._lines.feed(data)
            data = b"".join(line + b"\n" for rank, line in found if rank == self.part.rank)
        if data:
            yield data.decode(errors="replace")


# -- Reads the end of a run's newest log, and what is added to it, for a live view --------------


# What a first look reads, and how many lines are kept.
_FIRST_BYTES = 128 * 1024
_KEPT_LINES = 2000


class LogTail:
    """The last lines of the newest log of a job; each call reads what was added since the last."""

    def __init__(self, run: RunFiles) -> None:
        self._run = run
        self._path: Path | None = None
        self._position = 0
        self._lines: list[str] = []
        self._torn = b""

    def read(self) -> tuple[str, ...]:
        """Return the lines that are kept, none before there is a log. Raises OSError."""
        try:
            newest = next(reversed(job_logs(self._run)), None)
        except FileNotFoundError:
            newest = None
        if newest is None:
            return ()
        with newest.open("rb") as stream:
            size_bytes = stream.seek(0, 2)
            if newest != self._path or size_bytes < self._position:
                self._path, self._lines, self._torn = newest, [], b""
                self._position = max(0, size_bytes - _FIRST_BYTES)
                begins_inside = self._position > 0
            else:
                begins_inside = False
            stream.seek(self._position)
            data = stream.read()
        self._position += len(data)
        *whole, self._torn = (self._torn + data).split(b"\n")
        lines = [line.decode(errors="replace") for line in whole]
        self._lines = (self._lines + lines[1 if begins_inside else 0 :])[-_KEPT_LINES:]
        torn = self._torn.decode(errors="replace")
        return (*self._lines, torn) if torn else tuple(self._lines)
