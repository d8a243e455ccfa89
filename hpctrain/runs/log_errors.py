"""Reduces the logs of one launch to what its ranks died of: a line per error, and whose it is.

Belongs here: which lines are shown, and grouping them. Does not belong here: matching lines
(`hpctrain.supervise.evidence.log_scan`), deciding on a cause (`hpctrain.judge`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from pydantic import BaseModel, ConfigDict

from hpctrain.base.errors import UsageError
from hpctrain.judge.attempts import launch_starts
from hpctrain.judge.catalogue import load_signatures
from hpctrain.judge.documents import LogFinding
from hpctrain.judge.odd_stacks import ranges
from hpctrain.page.output import coloured
from hpctrain.page.text import paragraph
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.find import RunFiles
from hpctrain.records.old_launches import ATTEMPT_NAME
from hpctrain.records.run_records import ExitRecord
from hpctrain.runs.logs import attempt_directories
from hpctrain.supervise.evidence.log_scan import TRACEBACK, LaunchRanks, Scanner, read_signatures

# What differs between ranks that died of the same: numbers and addresses.
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


class LogError(BaseModel):
    """One error of a launch and the ranks that have it, ascending; `line` is of the first of them.

    `follows`: it follows from another error, such as a peer that went away. `ranks` is empty for
    lines that belong to no rank. `first_time`: in seconds since the epoch, 0 if unknown.
    """

    model_config = ConfigDict(frozen=True)

    cause: str
    line: str
    follows: bool
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    first_time: float = 0.0


class LaunchErrors(BaseModel):
    """The errors of the newest launch of an attempt, roots first; `unread`: what could not be."""

    model_config = ConfigDict(frozen=True)

    directory: str
    epoch: int | None
    errors: tuple[LogError, ...] = ()
    unread: tuple[str, ...] = ()


def launch_errors(run: RunFiles, attempt: int | None = None) -> LaunchErrors:
    """Read the newest launch of an attempt, counted from 1; by default of the newest attempt.

    Raises UsageError where there are no logs of it.
    """
    directories = attempt_directories(run)
    if not directories or not 1 <= (attempt or 1) <= len(directories):
        count = f"{len(directories)} {'attempt' if len(directories) == 1 else 'attempts'} with logs"
        raise UsageError(f"run `{run.run_id}` has {count}")
    directory = directories[-1 if attempt is None else attempt - 1]
    epoch = _newest_epoch(run, directory.name)
    ends = [] if epoch is None else read_exit_records(run.layout, epoch)
    ranks = LaunchRanks({e.rank: e.node for e in ends}, {e.rank: e.time for e in ends})
    scanner = Scanner(read_signatures(run.layout.signatures) or load_signatures())
    found = scanner.logs(directory, -1, ranks, tracebacks=True)
    # What a rank recorded of its end says more than a traceback, and one that ended well had none.
    recorded = {end.rank for end in ends if end.message or not end.exit_code}
    told = [
        finding
        for finding in found
        if finding.role != "advice"
        and (finding.signature != TRACEBACK or finding.rank not in recorded)
    ]
    errors = [*_of_records(ends, told), *_grouped(told)]
    return LaunchErrors(
        directory=str(directory),
        epoch=epoch,
        errors=tuple(sorted(errors, key=lambda one: (one.follows, one.first_time))),
        unread=tuple(finding.line for finding in found if finding.role == "advice"),
    )


def _newest_epoch(run: RunFiles, name: str) -> int | None:
    """Find the newest launch of the attempt whose logs are in a directory of that name."""
    match = ATTEMPT_NAME.fullmatch(name)
    assert match is not None
    attempt = (int(match["job"]), int(match["restart"]))
    epochs = [
        event.epoch
        for event in launch_starts(run.ledger.events())
        if event.attempt == attempt and event.epoch is not None
    ]
    return max(epochs, default=None)


def _of_records(ends: Sequence[ExitRecord], told: Sequence[LogFinding]) -> list[LogError]:
    """Group what ranks recorded themselves, of those whose logs have no line that is known."""
    known = {finding.rank for finding in told}
    groups: dict[str, list[ExitRecord]] = {}
    for end in ends:
        if end.message and end.exit_code and end.rank not in known:
            groups.setdefault(_alike(end.message), []).append(end)
    return [
        LogError(
            cause=group[0].cause or str(group[0].outcome),
            line=group[0].message or "",
            follows=False,
            ranks=tuple(end.rank for end in group),
            nodes=tuple(dict.fromkeys(end.node for end in group)),
            first_time=min(end.time for end in group),
        )
        for group in groups.values()
    ]


def _grouped(told: Iterable[LogFinding]) -> list[LogError]:
    groups: dict[tuple[str, str], list[LogFinding]] = {}
    for finding in told:
        groups.setdefault((finding.signature, _alike(finding.line)), []).append(finding)
    return [
        LogError(
            cause=str(group[0].cause),
            line=group[0].line,
            follows=group[0].role == "cascade",
            ranks=tuple(sorted({one.rank for one in group if one.rank is not None})),
            nodes=tuple(dict.fromkeys(one.node for one in group if one.node)),
            first_time=min(one.order for one in group),
        )
        for group in groups.values()
    ]


def _alike(line: str) -> str:
    """Make lines equal that differ in numbers only."""
    return _VARYING.sub("#", line)


# -- Formats the errors of a launch: what began it, and what followed ---------------------------


_SHOWN_NODES = 4


def error_lines(found: LaunchErrors) -> Iterator[str]:
    """Format errors, those that follow from others last and without their lines' details."""
    launch = "" if found.epoch is None else f"launch {found.epoch}, "
    yield f"{launch}logs in {found.directory}"
    for error in found.errors:
        yield ""
        cause = error.cause.replace("_", " ")
        head = f"follows: {cause}" if error.follows else cause
        yield coloured(head, None if error.follows else "red") + _whose(error)
        yield from paragraph(error.line, "  ", hang=4)
    if not found.errors:
        yield "no line in them names a cause"
    yield from found.unread


def _whose(error: LogError) -> str:
    if not error.ranks:
        return ""
    count = f"rank {error.ranks[0]}"
    if len(error.ranks) > 1:
        count = f"{len(error.ranks):,} ranks ({ranges(list(error.ranks))})"
    more = len(error.nodes) - _SHOWN_NODES
    nodes = ", ".join(error.nodes[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")
    return f"  {count}" + (f" on {nodes}" if nodes else "")
