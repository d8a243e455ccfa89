"""Summarize torch.profiler's Chrome traces: collective operations, and which of them were exposed.

A trace of one step of a large model is hundreds of MB of JSON. Events are therefore parsed one at a
time from the compressed stream, and reading stops at a limit, which the summary reports. Does not
belong here: recording traces (the trainer does), interpreting them (`hpctrain.diagnose`).
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

# -- Merge, intersect and measure time intervals. Pure; any unit --------------------------------
# An interval is (begin, end). A merged list is sorted and has no overlaps.


Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, sorted and without overlaps."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > begin:
            union.append((begin, end))
    return union


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return the intersection of two merged lists."""
    common: list[Interval] = []
    left = right = 0
    while left < len(one) and right < len(other):
        begin = max(one[left][0], other[right][0])
        end = min(one[left][1], other[right][1])
        if begin < end:
            common.append((begin, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return common


def length(intervals: Sequence[Interval]) -> float:
    """Return the total length of merged intervals."""
    return sum(end - begin for begin, end in intervals)


# ----------------------------------------------------------------------------------------------


MOST_EVENTS = 4_000_000
_CHUNK = 2**20
_LONGEST_EVENT = 2**24  # characters; a file whose event is longer is damaged
_NAME = re.compile(r"e(\d+)-rank-(\d+)-steps-(\d+)-(\d+)\.json\.gz$")
_STEP = re.compile(r"hpctrain: step (\d+)$")
_PART = "hpctrain: "
_BETWEEN_EVENTS = re.compile(r"[\s,]*")
# Names of NCCL's kernels (nccl: src/device/generate.py) and of gloo's operations (torch:
# ProcessGroupGloo.cpp), without underscores.
_KINDS = (
    ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("broadcast", "broadcast"),
    ("sendrecv", "send"),
    ("send", "send"),
    ("recv", "send"),
    ("reduce", "reduce"),
    ("gather", "gather"),
    ("barrier", "barrier"),
)
_ELEMENT_BYTES = {
    "float": 4,
    "float32": 4,
    "double": 8,
    "long int": 8,
    "long": 8,
    "int": 4,
    "half": 2,
    "c10::half": 2,
    "bfloat16": 2,
    "c10::bfloat16": 2,
    "unsigned char": 1,
    "byte": 1,
}


@dataclass(frozen=True)
class Message:
    """One collective operation: begin within the step, duration and exposed part in seconds.

    The exposed part is not overlapped by computation. `size_bytes` is None where it is unknown.
    """

    kind: str
    begin: float
    seconds: float
    exposed_seconds: float
    size_bytes: int | None


@dataclass(frozen=True)
class TraceSummary:
    """One rank in one range of steps. All seconds are means per step.

    `exposed_seconds`: communication not overlapped by computation. `parts`: durations of the parts
    of a step in the rank's own process, by name. `messages` are those of the first step. `whole`
    is False when reading stopped before the end.
    """

    file: str
    epoch: int
    rank: int
    steps: tuple[int, ...]
    events: int
    whole: bool
    on_gpu: bool
    step_seconds: float
    communication_seconds: float
    exposed_seconds: float
    parts: dict[str, float]
    messages: tuple[Message, ...]


@dataclass
class _TraceEvents:
    """The relevant events, in microseconds of the trace's clock."""

    steps: dict[int, Interval] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    kernels: list[Interval] = field(default_factory=list)
    operations: list[Interval] = field(default_factory=list)
    sent: list[tuple[Interval, str, int | None]] = field(default_factory=list)
    events: int = 0
    whole: bool = False

    def take(self, event: dict[str, Any]) -> None:
        if event.get("ph") != "X":
            return
        name, category = str(event.get("name", "")), event.get("cat")
        begin = float(event.get("ts", 0.0))
        when = (begin, begin + float(event.get("dur", 0.0)))
        if category == "user_annotation" and name.startswith(_PART):
            if step := _STEP.match(name):
                self.steps[int(step[1])] = when
            else:
                part = name.removeprefix(_PART)
                self.parts[part] = self.parts.get(part, 0.0) + when[1] - when[0]
        elif category == "kernel" and "nccl" not in name.lower():
            self.kernels.append(when)
        elif category == "kernel" or (category == "user_annotation" and name.startswith("gloo:")):
            kind = message_kind(name)
            if kind is not None:
                self.sent.append((when, kind, _message_bytes(event.get("args") or {})))
        elif category == "cpu_op" and name.startswith("aten::"):
            self.operations.append(when)


def trace_files(directory: Path) -> list[Path]:
    """List the traces of torch.profiler: the newest launch first, then by rank and step."""
    if not directory.is_dir():
        return []
    matches = [(path, _NAME.match(path.name)) for path in directory.iterdir()]
    numbered = []
    for path, match in matches:
        if match:
            epoch, rank, first, _ = map(int, match.groups())
            numbered.append(((-epoch, rank, first), path))
    return [path for _, path in sorted(numbered, key=lambda entry: entry[0])]


def read_trace(path: Path, most_events: int = MOST_EVENTS) -> TraceSummary | None:
    """Summarize a trace; None when the file is not such a trace or contains no step."""
    named = _NAME.match(path.name)
    if named is None:
        return None
    collected = _TraceEvents()
    try:
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as stream:
            for event in _events(stream):
                collected.events += 1
                if collected.events > most_events:
                    break
                collected.take(event)
            else:
                collected.whole = True
    except (OSError, EOFError, zlib.error, ValueError):
        pass  # the events so far are used, and the summary reports that some are missing
    if not collected.steps:
        return None
    return _summary(path.name, int(named[1]), int(named[2]), collected)


def _events(stream: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the members of `traceEvents`. Raises ValueError, EOFError if the file is damaged."""
    decoder = json.JSONDecoder()
    buffer, position = _skip_to_events(stream), 0
    while True:
        between = _BETWEEN_EVENTS.match(buffer, position)
        position = between.end() if between else position
        if buffer.startswith("]", position):
            return
        try:
            event, position = decoder.raw_decode(buffer, position)
        except json.JSONDecodeError:
            more = stream.read(_CHUNK)
            if not more:
                raise EOFError from None
            if len(buffer) - position > _LONGEST_EVENT:
                raise
            buffer, position = buffer[position:] + more, 0
            continue
        if isinstance(event, dict):
            yield event


def _skip_to_events(stream: TextIO) -> str:
    """Read up to the list of events; returns the text after its opening bracket."""
    buffer = ""
    while len(buffer) < _LONGEST_EVENT:
        more = stream.read(_CHUNK)
        if not more:
            break
        buffer += more
        key = buffer.find('"traceEvents"')
        begin = buffer.find("[", key) if key >= 0 else -1
        if begin >= 0:
            return buffer[begin + 1 :]
    raise ValueError("no traceEvents")


def message_kind(name: str) -> str | None:
    """Return the collective operation of a kernel or annotation, None if it is none."""
    plain = name.lower().replace("_", "")
    return next((kind for word, kind in _KINDS if word in plain), None)


def _message_bytes(arguments: dict[str, Any]) -> int | None:
    """Return the bytes of a message, None if unknown.

    NCCL's kernels have a number of elements and a type (kineto); gloo's operations have shapes
    where they were recorded.
    """
    elements, kind = arguments.get("In msg nelems"), arguments.get("dtype")
    if elements is None and arguments.get("Input Dims"):
        elements, kind = _elements(arguments["Input Dims"]), arguments.get("Input type", [None])[0]
    each = _ELEMENT_BYTES.get(str(kind).lower())
    return int(elements) * each if elements is not None and each else None


def _elements(dims: Any) -> int:
    """Count the elements of all tensors; a list of numbers is the shape of one tensor."""
    if not isinstance(dims, list):
        return 0
    if dims and all(isinstance(size, int) for size in dims):
        return math.prod(dims)
    return sum(_elements(shape) for shape in dims)


def _summary(file: str, epoch: int, rank: int, collected: _TraceEvents) -> TraceSummary:
    steps = merged(collected.steps.values())
    count = len(collected.steps)
    busy = merged(collected.kernels or collected.operations)
    sent = overlap(merged(when for when, _, _ in collected.sent), steps)
    hidden = length(overlap(sent, busy))
    first = collected.steps[min(collected.steps)]
    return TraceSummary(
        file=file,
        epoch=epoch,
        rank=rank,
        steps=tuple(sorted(collected.steps)),
        events=collected.events,
        whole=collected.whole,
        on_gpu=bool(collected.kernels),
        step_seconds=length(steps) / count / 1e6,
        communication_seconds=length(sent) / count / 1e6,
        exposed_seconds=(length(sent) - hidden) / count / 1e6,
        parts={name: micros / count / 1e6 for name, micros in collected.parts.items()},
        messages=tuple(_messages(collected, first, busy)),
    )


def _messages(collected: _TraceEvents, step: Interval, busy: list[Interval]) -> Iterator[Message]:
    """Yield the operations that began within one step, in order."""
    for when, kind, size_bytes in sorted(collected.sent, key=lambda entry: entry[0]):
        if step[0] <= when[0] <= step[1]:
            hidden = length(overlap([when], busy))
            seconds = (when[1] - when[0]) / 1e6
            yield Message(
                kind, (when[0] - step[0]) / 1e6, seconds, seconds - hidden / 1e6, size_bytes
            )
