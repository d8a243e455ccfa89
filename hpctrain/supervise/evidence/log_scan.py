"""Find lines that name a cause in the logs of ranks, in srun's stderr and in kernel logs.

A launch of 4096 ranks leaves 512 logs of nodes, or 4096 of ranks, on a file system that may itself
have failed. So threads read only the end of each file, until a deadline. What could not be read in
time is reported. In the log of a node the label of a line is its rank.
Belongs here: reading and matching. Does not belong here: which of the findings is the cause
(`rank_verdict`), and the signatures themselves (`signatures`).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base import clock
from hpctrain.judge.causes import Cause
from hpctrain.judge.documents import LogFinding
from hpctrain.judge.signatures import Matcher, Signatures, Where
from hpctrain.records.old_launches import LOG_NAME, LabelledLines

UNREAD, TRACEBACK = "logs_unread", "traceback"
# CSI and OSC sequences (ECMA-48): colours, and titles of terminals.
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_LONGEST_EVIDENCE = 400
_MOST_CANDIDATES = 2000
# Keeps the order of lines within one file where they bear the same time.
_LINE_SECONDS = 1e-6


@dataclass(frozen=True)
class ScanLimits:
    """`tail_bytes` of each file, less where all files together would exceed `total_bytes`.

    The log of a node has the lines of several ranks, so more of it is read.
    """

    tail_bytes: int = 64 * 1024
    node_tail_bytes: int = 512 * 1024
    total_bytes: int = 64 * 2**20
    seconds: float = 20.0
    readers: int = 4

    def tail(self, files: int, *, of_node: bool = False) -> int:
        most = self.node_tail_bytes if of_node else self.tail_bytes
        return min(most, max(4096, self.total_bytes // max(files, 1)))


@dataclass(frozen=True)
class LaunchRanks:
    """What is known about the ranks of a launch; `ended_at` is in seconds since the epoch."""

    nodes: Mapping[int, str] = field(default_factory=dict)
    ended_at: Mapping[int, float] = field(default_factory=dict)

    def ended_at_by_node(self) -> dict[int, float]:
        """When the first rank of each node ended; nodes count in the order of their ranks."""
        names = dict.fromkeys(self.nodes[rank] for rank in sorted(self.nodes))
        number = {name: index for index, name in enumerate(names)}
        first: dict[int, float] = {}
        for rank, at in self.ended_at.items():
            if rank in self.nodes:
                node = number[self.nodes[rank]]
                first[node] = min(at, first.get(node, at))
        return first


def read_signatures(path: Path) -> Signatures | None:
    """Read the signatures written at submit time; None if there is no file or it is unreadable."""
    try:
        return Signatures.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def newest_step(directory: Path) -> int:
    """Find the highest step with logs in a directory, -1 without any. Raises OSError."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return -1
    return max((int(m["step"]) for m in map(LOG_NAME.fullmatch, names) if m), default=-1)


class Scanner:
    """Matches text against signatures; expressions are compiled when they are first needed."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures

    @cached_property
    def _matchers(self) -> dict[Where, Matcher]:
        kinds: tuple[Where, ...] = ("rank", "srun", "kernel")
        return {where: self._signatures.matcher(where) for where in kinds}

    def lines(
        self,
        lines: Iterable[str],
        where: Where,
        *,
        rank: int | None = None,
        node: str | None = None,
        at: float = 0.0,
    ) -> tuple[LogFinding, ...]:
        """Match lines of one source; `at` (seconds since the epoch) is for lines without a time."""
        text = "\n".join(line.replace("\n", " ") for line in lines)
        return tuple(self._text(text, where, rank, node, at))

    def logs(
        self,
        directory: Path,
        after_step: int,
        ranks: LaunchRanks | None = None,
        limits: ScanLimits | None = None,
        *,
        tracebacks: bool = False,
    ) -> tuple[LogFinding, ...]:
        """Match the logs of the newest step beyond `after_step`; findings are in the order of time.

        With `log_scan` a rank that ended with an exception, and has no line that matches, is a
        finding with the signature `TRACEBACK`: for people, since the exception names no cause.
        Never raises and takes at most about `limits.seconds`. What could not be read in time is
        an advice finding with the signature `UNREAD`.
        """
        limits = limits or ScanLimits()
        work = _Reading(self, directory, after_step, ranks or LaunchRanks(), limits, tracebacks)
        return work.run()

    def _text(
        self, text: str, where: Where, rank: int | None, node: str | None, at: float
    ) -> Iterator[LogFinding]:
        matcher = self._matchers[where]
        if "\x1b" in text:
            text = _ANSI.sub("", text)
        matches: list[LogFinding] = []
        for _, line in matcher.candidates(text, _MOST_CANDIDATES):
            match = matcher.match(line)
            if match is not None:
                matches.append(match)
                if match.teardown and rank is not None:
                    break
        times = _times([match.line for match in matches], at)
        seen: set[str] = set()
        for number, (match, when) in enumerate(zip(matches, times, strict=True)):
            if match.role != "advice" and (rank is None or match.signature not in seen):
                seen.add(match.signature)
                yield replace(
                    match,
                    line=match.line.strip()[:_LONGEST_EVIDENCE],
                    rank=rank,
                    node=match.node if node is None else node,
                    order=when + number * _LINE_SECONDS,
                )


class _Reading:
    """The threads that read the logs of one launch, and what they have found so far."""

    def __init__(
        self,
        scanner: Scanner,
        directory: Path,
        after_step: int,
        ranks: LaunchRanks,
        limits: ScanLimits,
        tracebacks: bool,
    ) -> None:
        self._scanner, self._directory, self._after_step = scanner, directory, after_step
        self._ranks, self._limits, self._tracebacks = ranks, limits, tracebacks
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int | None, str]] = deque()
        self._found: list[LogFinding] = []
        self._total = self._done = 0
        self._listed = False

    def run(self) -> tuple[LogFinding, ...]:
        deadline = clock.monotonic() + self._limits.seconds
        self._join([self._start(self._list)], deadline)
        readers = [self._start(self._read_all) for _ in range(self._limits.readers)]
        self._join(readers, deadline)
        with self._lock:
            self._waiting.clear()
            found, done = list(self._found), self._done
        found.sort(key=lambda one: (one.order, -1 if one.rank is None else one.rank))
        if not self._listed or done < self._total:
            which = f"{self._total - done} of {self._total} logs" if self._listed else "the logs"
            line = f"{which} could not be read within {self._limits.seconds:g} s"
            found.append(LogFinding(UNREAD, Cause.UNKNOWN, "advice", line))
        return tuple(found)

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True, name="log reader")
        thread.start()
        return thread

    def _join(self, threads: list[threading.Thread], deadline: float) -> None:
        for thread in threads:
            thread.join(max(0.0, deadline - clock.monotonic()))

    def _list(self) -> None:
        """List the logs; those of ranks that recorded their own end come first, as likely places.

        The log of a node counts as that of its rank that ended first.
        """
        try:
            names = os.listdir(self._directory)
        except FileNotFoundError:
            names = []
        except OSError:
            return
        matches = [m for m in map(LOG_NAME.fullmatch, names) if m]
        step = max((int(m["step"]) for m in matches), default=-1)
        newest = [m for m in matches if int(m["step"]) == step]
        of_nodes = self._ranks.ended_at_by_node()

        def likely(match: re.Match[str]) -> tuple[float, str]:
            found = self._ranks.ended_at if match["rank"] else of_nodes
            return found.get(int(match["rank"] or match["node"]), float("inf")), match[0]

        newest.sort(key=likely)
        files = [(int(m["rank"]) if m["rank"] else None, m[0]) for m in newest]
        with self._lock:
            self._waiting.extend(files if step > self._after_step else ())
            self._total = len(self._waiting)
            self._listed = True

    def _read_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                rank, name = self._waiting.popleft()
            try:
                with (self._directory / name).open("rb") as stream:
                    status = os.fstat(stream.fileno())
                    tail_bytes = self._limits.tail(self._total, of_node=rank is None)
                    start = max(0, status.st_size - tail_bytes)
                    stream.seek(start)
                    raw = stream.read(status.st_size - start)
            except OSError:
                continue
            if start:  # the first line is incomplete
                raw = raw.partition(b"\n")[2]
            findings = [
                finding
                for owner, text in _texts(raw, rank)
                for finding in self._match(text, owner, status.st_mtime)
            ]
            with self._lock:
                self._found.extend(findings)
                self._done += 1

    def _match(self, raw: bytes, rank: int | None, modified_at: float) -> Iterator[LogFinding]:
        known = -1 if rank is None else rank
        node, at = self._ranks.nodes.get(known), self._ranks.ended_at.get(known, modified_at)
        text = raw.decode("utf-8", errors="replace")
        found = tuple(self._scanner._text(text, "rank", rank, node, at))
        yield from found
        if self._tracebacks and rank is not None and not found:
            line = final_exception(text)
            if line is not None:
                evidence = line[:_LONGEST_EVIDENCE]
                yield LogFinding(TRACEBACK, Cause.CRASH, "root", evidence, rank, node, at)


def _texts(raw: bytes, rank: int | None) -> list[tuple[int | None, bytes]]:
    """Split the end of a log by rank: all of it is of `rank`, or None, and labels name the rank."""
    if rank is not None:
        return [(rank, raw)]
    lines, found = LabelledLines(), dict[int | None, list[bytes]]()
    for owner, line in (*lines.feed(raw), *lines.finish()):
        found.setdefault(owner, []).append(line)
    return [(owner, b"\n".join(own)) for owner, own in found.items()]


def _times(lines: list[str], at: float) -> list[float]:
    """Find the time of each line: its own, that of the next line with one, or `at`."""
    times: list[float] = []
    after = at
    for line in reversed(lines):
        own = line_time(line, at)
        after = own if own is not None else after
        times.append(after)
    return times[::-1]


# -- Finds the exception with which a Python process ended, in the end of its log ---------------


_HEAD = "Traceback (most recent call last):"
# torch 2.4 and newer label the lines of an exception that ends a rank: `[rank3]: Traceback ...`.
_LABEL = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# Below the head: lines of the stack, indented or empty, then the exception at the line's beginning.
_TRACEBACK = re.compile(rf"^{re.escape(_HEAD)}\n(?:[ \t].*\n|\n)+(?P<error>\S.*)", re.MULTILINE)
_MOST_LINES_AFTER = 20


def final_exception(text: str) -> str | None:
    """Return the line of the last traceback that names the exception (CPython Lib/traceback.py).

    None without one, and where more than a few lines follow: that process has gone on.
    """
    if _HEAD not in text:
        return None
    plain = _LABEL.sub("", text)
    found = list(_TRACEBACK.finditer(plain))
    if not found or plain.count("\n", found[-1].end()) > _MOST_LINES_AFTER:
        return None
    return found[-1]["error"].strip()


# -- Parse when a line of a log was written -----------------------------------------------------
# Nodes of a cluster share their time, and lines have local time.


_DAY_SECONDS = 86400.0
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_NAME = rf"(?P<name>{'|'.join(_MONTHS)})"
_CLOCK = r"(?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
_FORMATS = tuple(
    re.compile(text)
    for text in (
        # torch, c10/util/Logging.cpp: [rank3]:[E1121 05:33:37.123456789 Process...; May 6 is `506`
        rf"\[[EWIF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}",
        # Python's logging, ISO 8601, slurmstepd: 2026-11-21 05:33:37,123
        rf"(?P<year>\d{{4}})-(?P<month>\d\d)-(?P<day>\d\d)[T ]{_CLOCK}",
        # dmesg -T: [Fri Nov 21 05:33:37 2026]
        rf"\[\w{{3}} {_NAME} {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK} (?P<year>\d{{4}})\]",
        # syslog: Nov 21 05:33:37 host kernel:
        rf"^{_NAME} {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK} ",
    )
)
# A time further into a line belongs to the message, or to another machine.
_WITHIN = 120


def line_time(line: str, near: float) -> float | None:
    """Parse the time of a line in seconds since the epoch; None if it has none.

    A missing year is the one that brings the time next to `near` (seconds since the epoch).
    """
    matches = (expression.search(line[:_WITHIN]) for expression in _FORMATS)
    match = next((match for match in matches if match is not None), None)
    if match is None:
        return None
    parts: dict[str, str | None] = match.groupdict()
    name = parts.get("name")
    month = _MONTHS.index(name) + 1 if name else int(parts["month"] or 0)
    hour, minute, second = map(int, (parts["clock"] or "").split(":"))
    day = int(parts["day"] or 0)
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    year = int(parts.get("year") or time.localtime(near).tm_year)
    seconds = time.mktime((year, month, day, hour, minute, second, 0, 0, -1))
    if not parts.get("year") and seconds > near + _DAY_SECONDS:  # the turn of the year
        seconds = time.mktime((year - 1, month, day, hour, minute, second, 0, 0, -1))
    return seconds + float(f"0.{parts.get('part') or 0}")
