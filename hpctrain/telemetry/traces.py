"""Chrome traces of torch.profiler in a few numbers: what was sent, and what of it nothing hid.

A trace of one step of a large model is hundreds of MB of JSON, so events are taken one at a time
from the compressed stream, and reading stops at a limit, which the summary says. Belongs here:
reading and adding up. Does not belong here: taking traces (the trainer does), judging them
(`hpctrain.diagnose`).
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hpctrain.telemetry.intervals import Interval, length, merged, overlap

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
    """One collective operation: when it began within the trace, how long it and what of it took
    that nothing else hid, in seconds; its bytes where they are known."""

    kind: str
    begin: float
    seconds: float
    exposed_seconds: float
    size_bytes: int | None


@dataclass(frozen=True)
class TraceSummary:
    """One rank in one range of steps. All seconds are means per step.

    `exposed_seconds`: communication during which nothing was computed. `parts`: how long the parts
    of a step took as the rank's own process saw it, by name. `messages` are those of the first
    step. `whole` is False when reading stopped before the end.
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
class _Collected:
    """What is kept of the events, in microseconds of the trace's clock."""

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
            self._take_part(name, when)
        elif category == "kernel" and "nccl" not in name.lower():
            self.kernels.append(when)
        elif category == "kernel" or (category == "user_annotation" and name.startswith("gloo:")):
            kind = _kind(name)
            if kind is not None:
                self.sent.append((when, kind, _size(event.get("args") or {})))
        elif category == "cpu_op" and name.startswith("aten::"):
            self.operations.append(when)

    def _take_part(self, name: str, when: Interval) -> None:
        step = _STEP.match(name)
        if step is not None:
            self.steps[int(step[1])] = when
        else:
            part = name.removeprefix(_PART)
            self.parts[part] = self.parts.get(part, 0.0) + when[1] - when[0]


def trace_files(directory: Path) -> list[Path]:
    """The traces of torch.profiler, those of the newest launch first, then by rank and step."""
    if not directory.is_dir():
        return []
    named = [(path, _NAME.match(path.name)) for path in directory.iterdir()]
    found = [(path, [int(n) for n in match.groups()]) for path, match in named if match]
    return [path for path, (e, r, f, _) in sorted(found, key=lambda one: _order(one[1]))]


def _order(numbers: list[int]) -> tuple[int, ...]:
    epoch, rank, first, _ = numbers
    return (-epoch, rank, first)


def read_trace(path: Path, most_events: int = MOST_EVENTS) -> TraceSummary | None:
    """Sum up a trace; None when it is no trace of ours or nothing of a step is in it."""
    named = _NAME.match(path.name)
    if named is None:
        return None
    collected = _Collected()
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
        pass  # what was read until there counts, and the summary says that it is not all
    if not collected.steps:
        return None
    return _summary(path.name, int(named[1]), int(named[2]), collected)


def _events(stream: TextIO) -> Iterator[dict[str, Any]]:
    """The members of `traceEvents`. Raises ValueError where it is not JSON, EOFError at its end."""
    decoder = json.JSONDecoder()
    buffer, position = _up_to_the_list(stream)
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


def _up_to_the_list(stream: TextIO) -> tuple[str, int]:
    buffer = ""
    while len(buffer) < _LONGEST_EVENT:
        more = stream.read(_CHUNK)
        if not more:
            break
        buffer += more
        key = buffer.find('"traceEvents"')
        begin = buffer.find("[", key) if key >= 0 else -1
        if begin >= 0:
            return buffer[begin + 1 :], 0
    raise ValueError("no traceEvents")


def _kind(name: str) -> str | None:
    plain = name.lower().replace("_", "")
    return next((kind for word, kind in _KINDS if word in plain), None)


def _size(arguments: dict[str, Any]) -> int | None:
    """Bytes of a message: NCCL's kernels have elements and type (kineto), gloo's operations have
    shapes where they were recorded."""
    elements, kind = arguments.get("In msg nelems"), arguments.get("dtype")
    if elements is None and arguments.get("Input Dims"):
        elements, kind = _elements(arguments["Input Dims"]), arguments.get("Input type", [None])[0]
    each = _ELEMENT_BYTES.get(str(kind).lower())
    return int(elements) * each if elements is not None and each else None


def _elements(dims: Any) -> int:
    """Of all tensors: a list of numbers is one tensor's shape."""
    if not isinstance(dims, list):
        return 0
    if dims and all(isinstance(one, int) for one in dims):
        product = 1
        for one in dims:
            product *= one
        return product
    return sum(_elements(one) for one in dims)


def _summary(file: str, epoch: int, rank: int, collected: _Collected) -> TraceSummary:
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


def _messages(collected: _Collected, step: Interval, busy: list[Interval]) -> Iterator[Message]:
    """Those that began within one step, in order."""
    for when, kind, size_bytes in sorted(collected.sent, key=lambda one: one[0]):
        if step[0] <= when[0] <= step[1]:
            hidden = length(overlap([when], busy))
            seconds = (when[1] - when[0]) / 1e6
            yield Message(
                kind, (when[0] - step[0]) / 1e6, seconds, seconds - hidden / 1e6, size_bytes
            )
