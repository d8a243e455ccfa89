"""Read steps and losses from what a trainer prints and writes, and record what it has reported.

A value that the trainer has not reported stays unknown. Belongs here: the sources of the spec,
putting their values into rows, and the comparison of the first step with the checkpoint. Does not
belong here: who calls this and when (`agent`), the fields of a source (`hpctrain.spec.trainer`).
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Phase, RankTimes, StepMetrics
from hpctrain.spec.trainer import ProgressSource
from hpctrain.train.report import LaunchReporter, finite

# Rows that show how often a trainer reports.
_FIRST_ROWS = 3
# For so long a tree is looked at in one go: the agent has more to do.
_LOOK_SECONDS = 0.2
# So many looks fit into the silence that is a hang, and within two of them a look has to end.
_LOOKS = 40
Values = dict[str, float]


def values_of(row: Mapping[str, Any], source: ProgressSource) -> Values | None:
    """Take the values that a source names from a row; None where there is no step in it."""
    found: Values = {}
    for name, key in source.names.items():
        with contextlib.suppress(TypeError, ValueError, KeyError, OverflowError):
            found[name] = float(row[key])  # an empty cell is none
    if "step" in found:
        found["step"] += source.add
    return found if math.isfinite(found.get("step", math.nan)) else None


class OutputReader:
    """Finds values in lines of output, by the regular expressions of the spec."""

    def __init__(self, sources: tuple[ProgressSource, ...], target_step: int | None) -> None:
        done = r"\d+" if target_step is None else str(target_step)
        self._patterns = [
            (re.compile(one.output.replace("{done}", done)), one.add)
            for one in sources
            if one.output is not None
        ]

    def read(self, line: str) -> Iterator[Values]:
        for pattern, add in self._patterns:
            for found in pattern.finditer(line):
                values: Values = {}
                for name, text in found.groupdict().items():
                    with contextlib.suppress(ValueError):
                        if text is not None:  # a group that takes no part
                            values[name] = float(text.replace(",", ""))
                if math.isfinite(values.get("step", math.nan)):
                    yield {**values, "step": values["step"] + add}


@dataclass
class FileReader:
    """Finds values in the files of one source; each row once.

    `after_step`: rows of a document's history that belong to earlier launches end with it.
    """

    source: ProgressSource
    output: Path
    after_step: float = -math.inf
    _read_bytes: dict[Path, int] = field(default_factory=dict)
    _first_lines: dict[Path, bytes] = field(default_factory=dict)
    _heads: dict[Path, list[str]] = field(default_factory=dict)
    _stamps: dict[Path, int] = field(default_factory=dict)

    def pass_over(self) -> None:
        """Leave out what is there now: a checkpoint that was put back, the log of all launches."""
        for _ in self.read():
            pass

    def read(self) -> Iterator[Values]:
        """Yield the values of new rows. A file that cannot be read yields none."""
        source = self.source
        pattern = source.csv or source.jsonl or source.json_files or source.tensorboard
        if pattern is None:
            return
        rows = self._rows_of_tensorboard if source.tensorboard else self._rows_of_lines
        rows = self._rows_of_documents if source.json_files else rows
        root = self.output
        if os.path.isabs(pattern):
            root, pattern = Path("/"), pattern.lstrip("/")
        for path in sorted(root.glob(pattern)):
            with contextlib.suppress(OSError, ValueError):
                for row in rows(path):
                    values = values_of(row, source)
                    if values is not None:
                        yield values

    def _rows_of_lines(self, path: Path) -> Iterator[Mapping[str, Any]]:
        """Read the lines that have been completed since the last call.

        A file with another beginning was written anew, as loggers do for one more column.
        """
        with path.open("rb") as stream:
            head = stream.readline()
            size = stream.seek(0, os.SEEK_END)
            if self._first_lines.get(path, head) != head or size < self._read_bytes.get(path, 0):
                self._read_bytes.pop(path, None)
                self._heads.pop(path, None)
            if head.endswith(b"\n"):
                self._first_lines[path] = head
            stream.seek(self._read_bytes.get(path, 0))
            data = stream.read()
        whole, newline, _ = data.rpartition(b"\n")
        self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            if self.source.jsonl:
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row
                continue
            cells = next(csv.reader([line]), [])
            if path not in self._heads or self.source.step in cells:
                self._heads[path] = cells
            else:
                yield dict(zip(self._heads[path], cells, strict=False))

    def _rows_of_documents(self, path: Path) -> Iterator[Mapping[str, Any]]:
        """Read a JSON document that has changed; rows of steps that were not there before."""
        stamp = path.stat().st_mtime_ns
        if self._stamps.get(path) == stamp:
            return
        document = json.loads(path.read_bytes())
        self._stamps[path] = stamp
        rows: Any = [document]
        if self.source.rows is not None:
            rows = document.get(self.source.rows) if isinstance(document, dict) else None
        for row in rows if isinstance(rows, list) else ():
            step = row.get(self.source.step) if isinstance(row, dict) else None
            if isinstance(step, int | float) and step + self.source.add > self.after_step:
                self.after_step = float(step + self.source.add)
                yield row

    def _rows_of_tensorboard(self, path: Path) -> Iterator[Mapping[str, Any]]:
        """Read scalars of an event file by the library that writes them, where it is installed.

        Each scalar is an event of its own: those of a step that follow each other are one row.
        """
        try:
            loader: Any = importlib.import_module(
                "tensorboard.backend.event_processing.event_file_loader"
            )
            tensors: Any = importlib.import_module("tensorboard.util.tensor_util")
        except ImportError:
            return
        done, seen = self._read_bytes.get(path, 0), 0
        row: dict[str, Any] = {}
        for event in loader.LegacyEventFileLoader(str(path)).Load():
            seen += 1
            if seen <= done or not event.HasField("summary"):
                continue
            if row and row[self.source.step] != event.step:
                yield row
                row = {}
            row[self.source.step] = event.step
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    row[value.tag] = value.simple_value
                elif value.HasField("tensor"):
                    with contextlib.suppress(TypeError, ValueError):
                        row[value.tag] = float(tensors.make_ndarray(value.tensor))
        if row:
            yield row
        self._read_bytes[path] = max(done, seen)


class Recorder(LaunchReporter):
    """Writes what a trainer has reported, on the agent that leads; its records may fail.

    `target_step`: None where a file ends the run. `tells`: the trainer's steps are told. `beats`:
    its silence means nothing, so a sign of life comes every second.
    """

    def __init__(
        self,
        run: RunLayout,
        epoch: int,
        resume_step: int,
        target_step: int | None,
        *,
        tells: bool,
        beats: bool,
    ) -> None:
        super().__init__(run, epoch, resume_step or None, target_step)
        self.first_step: int | None = None
        self.row_steps: list[int] = []  # the first ones, by which a wrong start is seen
        self.samples: int | None = None
        self._tells, self._beats = tells, beats
        self._row_step = resume_step
        self._seen_at: float | None = None
        starting: Phase = "loading" if resume_step else "starting"
        self._phase = "training" if beats else starting
        self._active, self._active_at = True, time.monotonic()

    @property
    def has_stepped(self) -> bool:
        return self.first_step is not None

    def sign(self) -> None:
        """Note that the trainer has done something: printed a line, written a file."""
        self._active, self._active_at = True, time.monotonic()
        if not self._tells and self._phase in ("starting", "loading"):
            self._phase = "training"  # nothing else will show it

    @property
    def silent_seconds(self) -> float:
        """Seconds since the trainer has last done something."""
        return time.monotonic() - self._active_at

    def report(self, values: Values, *, read_at: float | None = None) -> None:
        """Take one report of now, or of a file that was read at a time (rows share it, by which
        readers know that steps were not trained within microseconds)."""
        step, now, live = int(values["step"]), time.monotonic(), read_at is None
        self.sign()
        if step < 1:
            return  # nothing is trained yet
        if step > self.step or self.first_step is None:
            if self.first_step is None:
                self.first_step = step
            elif live and self._seen_at is not None and step > self.step:
                self._step_seconds = (now - self._seen_at) / (step - self.step)
            self.step, self._seen_at = step, now if live else None
            self._phase = "training"
        own = {name: value for name, value in values.items() if name != "step"}
        if own and len(self.row_steps) < _FIRST_ROWS and step not in self.row_steps:
            self.row_steps.append(step)
        if own and step > self._row_step:
            self._row_step = step
            self._append(step, own, read_at)

    def _append(self, step: int, own: Values, read_at: float | None) -> None:
        """Append a row of what was reported; the seconds of a step may be measured here."""
        seconds = own.get("seconds") or (self._step_seconds if read_at is None else None)
        loss, tokens = own.get("loss"), own.get("tokens")
        if loss is not None:
            self.loss = loss if math.isfinite(loss) else None
        samples = own.get("samples")
        row = StepMetrics(
            step=step,
            epoch=self._epoch,
            time=time.time() if read_at is None else read_at,
            loss=self.loss if loss is not None else None,
            loss_hex=None if loss is None else loss.hex(),
            grad_norm=finite(own.get("grad_norm")),
            learning_rate=finite(own.get("learning_rate")),
            step_seconds=seconds,
            tokens_per_second=tokens / seconds if tokens and seconds else None,
            mfu=None,
            memory_bytes=None,
            consumed_samples=None if samples is None else int(samples),
        )
        self._metrics.append(row)
        if samples is not None:
            self.samples = int(samples)

    def published(self, step: int) -> None:
        self.checkpoint_step = step
        self._written_at, self._active = -math.inf, True

    def times(
        self, first_step: int, last_step: int, seconds: list[float], nodes: list[str]
    ) -> None:
        """Write the times of all ranks in a window of steps."""
        times = RankTimes(
            epoch=self._epoch,
            first_step=first_step,
            last_step=last_step,
            time=time.time(),
            compute_seconds=tuple(seconds),
            nodes=tuple(nodes),
        )
        with contextlib.suppress(OSError):
            self.rank_times(times)

    def write(self) -> None:
        """Replace the sign of life, at most once a second, if there was one."""
        if self._beats or self._active:
            self.still_working()

    def _write_progress(self) -> None:
        try:
            super()._write_progress()
        except OSError:  # a full disk must not end the trainer
            self._written_at = -math.inf
        self._active = self._written_at == -math.inf  # once more with the next look


class FileChanges:
    """Finds out whether any file below a directory changes, in looks at a part of it.

    All names, sizes and times of one pass are compared with those of the pass before; what links
    lead to is left out. `silence_seconds`: the silence that counts as a hang. `takes_too_long`: so
    large a tree proves nothing in time, and is taken for one that changes.
    """

    def __init__(self, root: Path, silence_seconds: float) -> None:
        self.takes_too_long = False
        self.pause_seconds = silence_seconds / _LOOKS
        self._root = root
        self._before: int | None = None
        self._sum = 0
        self._pass: Iterator[int] | None = None
        self._began_at = self._next_at = -math.inf

    def seen(self, silent_seconds: float) -> bool:
        """Look on, after so many seconds without a sign; True if there has been a change since."""
        now = time.monotonic()
        if silent_seconds < self.pause_seconds:
            self._pass = None  # no need to look
        elif self._pass is None and now >= self._next_at:
            self._pass, self._sum, self._began_at = _marks_below(self._root), 0, now
        if self._pass is None:
            return False
        for mark in self._pass:
            self._sum += mark
            if time.monotonic() - now > _LOOK_SECONDS:
                is_late = now - self._began_at > 2 * self.pause_seconds
                self.takes_too_long |= is_late
                return is_late
        is_changed = self._before not in (None, self._sum)
        self._before, self._pass, self._next_at = self._sum, None, now + self.pause_seconds
        return is_changed


def _marks_below(root: Path) -> Iterator[int]:
    """Yield a number for each file below a directory, which is another one when that changes."""
    directories = [str(root)]
    while directories:
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # gone a moment ago
                    found = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
                    yield hash((entry.name, found.st_ino, found.st_size, found.st_mtime_ns))


def wrong_start(first_step: int | None, row_steps: list[int], resume_step: int) -> str | None:
    """Say why a launch has not begun where it was told to; None if it has, or if nobody can tell.

    `first_step`: the first that the trainer has reported; `row_steps`: the first ones with a value.
    A trainer reports a step after it has trained it, in most cases every so many steps.
    """
    if first_step is not None and resume_step and first_step <= resume_step:
        return (
            f"it starts over: its first report is of step {first_step}, and it was told to resume "
            f"from step {resume_step}"
        )
    if len(row_steps) < _FIRST_ROWS:
        return None
    first, second, third = row_steps
    interval = second - first
    if third - second == interval and first > resume_step + interval > resume_step:
        return (
            f"it starts from another checkpoint: its first report is of step {first}, with one "
            f"every {interval} steps, and it was told to resume from step {resume_step}"
        )
    return None
