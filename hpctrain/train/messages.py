"""Measure the messages between ranks in one step out of many, and gather them on rank 0.

The third step of a launch is the first that is measured: by then every engine has connected its
groups and DDP has arranged its buckets. The sums of all ranks are gathered in one vector beside
training, and received one step later. A rank that cannot measure ends measuring for all of them;
training goes on. Belongs here: recording, sums by axis and link, when, and gathering. Does not
belong here: judging (`hpctrain.diagnose`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from hpctrain.records.communication import AxisMessages, CommunicationRecord, LinkBytes
from hpctrain.telemetry.intervals import length, merged
from hpctrain.telemetry.traces import message_kind
from hpctrain.train.device import on_cpu
from hpctrain.train.engine import AxisGroup
from hpctrain.train.step_agreement import Control

# -- Record the messages that this rank sends in one step, whoever calls for them ----------------
# torch's flight recorder lists every collective operation of a process group with its sizes,
# whether Python or C++ has called it (torch: c10d/FlightRecorder.hpp); it is always on. With NCCL
# it has durations and point-to-point messages, too. With gloo it has neither: durations come from
# torch.profiler, which runs for that step only, and sends are seen where all of them pass,
# `ProcessGroup.send`.


# Names of c10::ScalarType, as the flight recorder writes them; all others have one byte.
_ELEMENT_BYTES = {
    "Double": 8,
    "Long": 8,
    "ComplexFloat": 8,
    "Float": 4,
    "Int": 4,
    "BFloat16": 2,
    "Half": 2,
    "Short": 2,
}


class RecordingError(Exception):
    """The messages of a step could not be measured; training is not affected."""


class Recording(Protocol):
    """Records one step at a time.

    `late`: the messages are complete only at the end of the step after it.
    """

    source: str
    late: bool

    def start(self) -> None: ...

    def stop(self) -> None:
        """End the step."""

    def messages(self) -> list[Message]:
        """Return the messages of the step that has been stopped last."""


def recording_of(own_groups: set[str]) -> Recording:
    """Choose how this rank records; `own_groups` are not the engine's, and are left out."""
    return GlooRecording(own_groups) if on_cpu() else NcclRecording(own_groups)


@dataclass
class _Call:
    """An operation of gloo as it was called, before its duration is known."""

    name: str
    group: str
    ranks: tuple[int, ...]
    size_bytes: int
    called_ns: int


@dataclass
class GlooRecording:
    """Records on a CPU, with the profiler of torch running for the step."""

    own_groups: set[str]
    source: str = "flight recorder and torch.profiler, gloo"
    late: bool = False
    _profiling: bool = False
    _events: list[Any] = field(default_factory=list)
    _restore: Callable[[], None] | None = None
    _sends: list[_Call] = field(default_factory=list)
    _begin_ns: int = 0
    _end_ns: int = 0

    def start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints two lines each time
        _start_profiler()
        self._profiling = True
        self._sends = []
        self._restore = _watch_sends(self._sends)
        self._begin_ns = time.time_ns()

    def stop(self) -> None:
        self._end_ns = time.time_ns()
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self._profiling:
            self._profiling = False
            self._events = torch.autograd._disable_profiler().events()

    def messages(self) -> list[Message]:
        events, self._events = self._events, []
        waiting: dict[str, list[tuple[int, int]]] = {}
        for event in events:
            name = event.name()
            if name.startswith("gloo:"):
                waiting.setdefault(name, []).append((event.start_ns(), event.duration_ns()))
        calls = [*self._sends, *self._collectives()]
        calls.sort(key=lambda call: call.called_ns)
        timed = {name: iter(sorted(found)) for name, found in waiting.items()}
        messages = []
        for call in calls:  # each has one event, which begins after the call
            begin, lasted = next(
                (one for one in timed.get(call.name, ()) if one[0] >= call.called_ns),
                (call.called_ns, 0),
            )
            kind = "receive" if call.name == "gloo:recv" else message_kind(call.name)
            if kind is not None and call.group not in self.own_groups:
                messages.append(
                    Message(
                        kind, call.group, call.ranks, call.size_bytes, begin / 1e9, lasted / 1e9
                    )
                )
        return messages

    def _collectives(self) -> Iterator[_Call]:
        text = torch._C._distributed_c10d._dump_fr_trace_json()
        ranks = _GroupRanks()
        for entry in entries_between(text, self._begin_ns, self._end_ns):
            group, name = str(entry["process_group"][0]), str(entry["profiling_name"])
            size = handed_bytes(entry)
            yield _Call(name, group, ranks[group], size, int(entry["time_created_ns"]))


def _start_profiler() -> None:
    """Start torch's profiler for what has the scope of users, as the operations of gloo do.

    `torch.profiler.profile` records every operator as well: a measured step takes some times as
    long as others then, and reading it longer still.
    """
    # here: a torch without these names ends measuring, not the launch
    from torch._C._profiler import RecordScope, _ExperimentalConfig

    choices: Any = torch.autograd
    kinds = {ProfilerActivity.CPU}
    nothing_more = (False,) * 5  # shapes, memory, stacks, FLOPs, modules
    config = choices.ProfilerConfig(
        choices.ProfilerState.KINETO, *nothing_more, _ExperimentalConfig()
    )
    choices._prepare_profiler(config, kinds)
    choices._enable_profiler(config, kinds, {RecordScope.USER_SCOPE})


def _watch_sends(calls: list[_Call]) -> Callable[[], None]:
    """Note every send and receive from now on; returns what ends that."""
    group_class: Any = dist.ProcessGroup
    # as the class has them: read as attributes they are functions that do not bind
    send, receive = vars(group_class)["send"], vars(group_class)["recv"]
    rank = dist.get_rank()

    def note(name: str, group: Any, tensors: Any, peer: int) -> None:
        with contextlib.suppress(Exception):  # never at the expense of a message
            other = dist.get_process_group_ranks(group)[peer]
            sent = name == "gloo:send"
            size = sum(one.numel() * one.element_size() for one in tensors) if sent else 0
            pair = (rank, other) if sent else (other, rank)
            calls.append(_Call(name, str(group.group_name), pair, size, time.time_ns()))

    def noted_send(group: Any, tensors: Any, peer: int, *rest: Any, **named: Any) -> Any:
        note("gloo:send", group, tensors, peer)
        return send.__get__(group)(tensors, peer, *rest, **named)

    def noted_receive(group: Any, tensors: Any, peer: int, *rest: Any, **named: Any) -> Any:
        note("gloo:recv", group, tensors, peer)
        return receive.__get__(group)(tensors, peer, *rest, **named)

    def restore() -> None:
        group_class.send, group_class.recv = send, receive

    group_class.send, group_class.recv = noted_send, noted_receive
    return restore


@dataclass
class NcclRecording:
    """Records on a GPU by NCCL's flight recorder alone.

    Its thread learns of finished operations some time after them, hence `late`. The engine's groups
    of gloo, for tensors on the host, are not measured.
    """

    own_groups: set[str]
    source: str = "flight recorder, NCCL"
    late: bool = True
    _timed: bool = False
    _begin_ns: int = 0
    _end_ns: int = 0

    def start(self) -> None:
        if not self._timed:  # an event more in front of each operation, from now on
            for group in list(dist.distributed_c10d._world.pg_map):
                with contextlib.suppress(RuntimeError):  # a backend that measures nothing
                    group._enable_collectives_timing()
            self._timed = True
        self._begin_ns = time.time_ns()

    def stop(self) -> None:
        self._end_ns = time.time_ns()

    def messages(self) -> list[Message]:
        c10d: Any = torch._C._distributed_c10d
        text = c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
        return nccl_messages(
            entries_between(text, self._begin_ns, self._end_ns), _GroupRanks(), self.own_groups
        )


def nccl_messages(
    entries: list[dict[str, Any]], ranks_of: Any, own_groups: set[str]
) -> list[Message]:
    """Read entries of NCCL's flight recorder.

    The name of a point-to-point message has the ranks within its group: `nccl:send 0->1`,
    `nccl:recv 0<-1` (torch: ProcessGroupNCCL.cpp). Where several are sent as one, the last entry,
    `nccl:coalesced`, has the duration.
    """
    messages = []
    for entry in entries:
        group, name = str(entry["process_group"][0]), str(entry["profiling_name"])
        kind = "coalesced" if name == "nccl:coalesced" else message_kind(name)
        if kind is None or group in own_groups:
            continue
        ranks, size = tuple(ranks_of[group]), handed_bytes(entry)
        pair = name.partition(" ")[2].replace("<-", "->").split("->")
        if len(pair) == 2:
            ranks = tuple(ranks[int(one)] for one in pair)
        if "recv" in name:
            kind, size = "receive", 0
        seconds = float(entry.get("duration_ms") or 0.0) / 1e3
        messages.append(
            Message(kind, group, ranks, 0 if kind == "coalesced" else size, None, seconds)
        )
    return messages


class _GroupRanks(dict[str, tuple[int, ...]]):
    """The ranks of a process group, by its name."""

    def __missing__(self, name: str) -> tuple[int, ...]:
        group = dist.distributed_c10d._resolve_process_group(name)
        self[name] = tuple(dist.get_process_group_ranks(group))
        return self[name]


def entries_between(text: bytes | str, begin_ns: int, end_ns: int) -> list[dict[str, Any]]:
    """Select the operations that were called in a step. Raises RecordingError if some are lost."""
    entries: list[dict[str, Any]] = json.loads(text).get("entries", [])
    entries.sort(key=lambda entry: entry["record_id"])
    if entries and entries[0]["record_id"] > 0 and entries[0]["time_created_ns"] > begin_ns:
        raise RecordingError(
            f"a step has more messages than the {len(entries)} that torch's flight recorder "
            "keeps: set TORCH_FR_BUFFER_SIZE to more"
        )
    return [entry for entry in entries if begin_ns <= entry["time_created_ns"] <= end_ns]


def handed_bytes(entry: dict[str, Any]) -> int:
    """Count the bytes of all input tensors of an operation."""
    sizes, kinds = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    pairs = zip(sizes, kinds, strict=False)
    return sum(math.prod(size) * _ELEMENT_BYTES.get(str(kind), 1) for size, kind in pairs)


# ------------------------------------------------------------------------------------------------
# Attribute the messages of one rank to the axes of the layout, and to the ranks that get them.
# Pure sums over one measured step.


AXES = ("tp", "cp", "ep", "dp", "pp", "other")
# Of each rank: the targets that it sends most to. A rank of a ring has one target per axis, and of
# a pipeline two; only an all-to-all of more ranks has others, which are left out.
MOST_TARGETS = 16
# With more links the record has those between nodes, each named by its first rank.
MOST_LINKS = 4096
_COLUMNS = 5  # of each axis in a row: first rank of the group + 1, its size, calls, bytes, seconds
ROW_SIZE = 2 + _COLUMNS * len(AXES) + 2 * MOST_TARGETS
_FAILED = 1  # the row of a rank that could not measure


@dataclass(frozen=True)
class Message:
    """One operation that this rank has called.

    `kind`: as of `hpctrain.telemetry.traces`, or `receive`. `group`: torch's name of the process
    group; `ranks`: its ranks in their order, of a point-to-point message sender and receiver.
    `size_bytes` is what the rank handed over. `begin` is None where only durations are known.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    size_bytes: int
    begin: float | None
    seconds: float


@dataclass(frozen=True)
class KnownGroup:
    """A group of an axis of which the engine has told; see `hpctrain.train.engine.AxisGroup`."""

    axis: str
    group: str
    ranks: tuple[int, ...]


def axis_of(group: str, ranks: Sequence[int], rank: int, known: Sequence[KnownGroup]) -> str:
    """Find the axis along which the ranks of a group differ; `other` if that is no single one.

    The engine's own groups come first: groups of two axes may have the same ranks. A part of an
    axis belongs to it: the ranks that share a copy of the weights, the ends of a pipeline, a sender
    and its receiver. A group that meets every known axis in this rank only is one of data
    parallelism: DeepSpeed makes those of a pipeline after the mesh.
    """
    members = set(ranks)
    for own in known:
        if own.group == group and set(own.ranks) == members:
            return own.axis
    holding = [own for own in known if members <= set(own.ranks)]
    if holding:
        return min(holding, key=lambda own: len(own.ranks)).axis
    if known and all(members & set(own.ranks) == {rank} for own in known):
        return "dp"
    return "other"


def sent_bytes(message: Message, rank: int) -> dict[int, float]:
    """Tell how much a rank sends to whom for one of its operations.

    Point-to-point messages are exact. A ring passes 2 (n - 1) / n of the message of an all-reduce
    through each rank, half of that in a reduce-scatter, and n - 1 parts in an all-gather
    (nccl-tests, doc/PERFORMANCE.md); the root of a broadcast or reduce is not known, so that each
    rank gets the mean, (n - 1) / n. An all-to-all sends each rank its part.
    """
    ranks, size = message.ranks, len(message.ranks)
    if message.kind == "send":
        return {ranks[-1]: message.size_bytes}
    if message.kind in ("receive", "barrier") or size < 2 or rank not in ranks:
        return {}
    if message.kind == "all_to_all":
        return {other: message.size_bytes / size for other in ranks if other != rank}
    share = (size - 1) / size
    times = {"all_reduce": 2 * share, "all_gather": size - 1.0}.get(message.kind, share)
    return {ranks[(ranks.index(rank) + 1) % size]: times * message.size_bytes}


@dataclass
class _AxisSum:
    """The messages of one axis: `ranks` of its largest group."""

    ranks: tuple[int, ...] = ()
    calls: int = 0
    size_bytes: int = 0
    durations: list[float] = field(default_factory=list)
    intervals: list[tuple[float, float]] = field(default_factory=list)

    def add(self, message: Message) -> None:
        self.calls += message.kind != "coalesced"  # the end of a batch whose parts were counted
        self.size_bytes += message.size_bytes
        if message.begin is None:
            self.durations.append(message.seconds)
        else:
            self.intervals.append((message.begin, message.begin + message.seconds))

    @property
    def seconds(self) -> float:
        """Operations of one GPU's group follow each other: their durations add up."""
        return sum(self.durations) + length(merged(self.intervals))


def row_of(
    messages: Iterable[Message], rank: int, known: Sequence[KnownGroup], step_seconds: float
) -> list[float]:
    """Sum the messages of a rank into numbers, which all ranks add to one table.

    Operations of a group of one rank send nothing, and are left out.
    """
    sums = {axis: _AxisSum() for axis in AXES}
    for own in known:
        sums[own.axis].ranks = own.ranks
    targets: dict[int, float] = {}
    for message in messages:
        if len(message.ranks) < 2:
            continue
        axis = axis_of(message.group, message.ranks, rank, known)
        sums[axis].add(message)
        if not any(own.axis == axis for own in known):
            sums[axis].ranks = max(sums[axis].ranks, message.ranks, key=len)
        for target, size in sent_bytes(message, rank).items():
            targets[target] = targets.get(target, 0.0) + size
    row = [0.0, step_seconds]
    for one in sums.values():
        first = min(one.ranks) + 1 if one.ranks else 0
        row += [first, len(one.ranks), one.calls, one.size_bytes, one.seconds]
    most = sorted(targets.items(), key=lambda item: (-item[1], item[0]))[:MOST_TARGETS]
    row += [number for target, size in most for number in (target + 1, round(size))]
    return row + [0.0] * (ROW_SIZE - len(row))


def failed_row() -> list[float]:
    """Make the row of a rank that could not measure."""
    return [float(_FAILED)] + [0.0] * (ROW_SIZE - 1)


def all_measured(table: Sequence[Sequence[float]]) -> bool:
    return all(row[0] != _FAILED for row in table)


def record_of(
    table: Sequence[Sequence[float]],
    *,
    epoch: int,
    step: int,
    time: float,
    nodes: tuple[str, ...],
    source: str,
) -> CommunicationRecord:
    """Make the record from the rows of all ranks."""
    axes = []
    for number, axis in enumerate(AXES):
        begin = 2 + number * _COLUMNS
        first, sizes, calls, handed, seconds = zip(
            *(row[begin : begin + _COLUMNS] for row in table), strict=True
        )
        if any(calls):
            axes.append(
                AxisMessages(
                    axis=axis,
                    ranks_per_group=int(max(sizes)),
                    groups=tuple(int(one) - 1 for one in first),
                    calls=tuple(map(int, calls)),
                    bytes=tuple(map(int, handed)),
                    seconds=tuple(seconds),
                )
            )
    return CommunicationRecord(
        epoch=epoch,
        step=step,
        time=time,
        step_seconds=max(row[1] for row in table),
        nodes=nodes,
        axes=tuple(axes),
        links=_links(table, nodes),
        source=source,
    )


def _links(table: Sequence[Sequence[float]], nodes: tuple[str, ...]) -> tuple[LinkBytes, ...]:
    found: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(table):
        pairs = row[ROW_SIZE - 2 * MOST_TARGETS :]
        for target, size in zip(pairs[::2], pairs[1::2], strict=True):
            if target:
                found[rank, int(target) - 1] = int(size)
    if len(found) > MOST_LINKS:
        first = {node: rank for rank, node in reversed([*enumerate(nodes)])}
        between: dict[tuple[int, int], int] = {}
        for (source, target), size in found.items():
            ends = first[nodes[source]], first[nodes[target]]
            between[ends] = between.get(ends, 0) + size
        found = between
    return tuple(
        LinkBytes(source=source, target=target, bytes=size)
        for (source, target), size in sorted(found.items())
    )


# Functions of this file in which a rank waits for others, as the supervisor recognises them in
# stacks (`hpctrain.judge.odd_stacks`; its unit test compares the two).
WAITS_FOR_RANKS = ("_receive",)
_WARM_UP_STEPS = 2


@dataclass
class _Measured:
    """A step whose messages are being read or gathered."""

    step: int
    step_seconds: float
    vector: Any = None
    work: Any = None


@dataclass
class MessageClock:
    """Measures a step every `interval_steps` steps (None: never); `tell` runs on rank 0.

    All ranks must call `begin` and `end` for the same steps with the same `counts`: a step that
    does not count is not measured, but the next one is.
    """

    recording: Recording
    known: Sequence[KnownGroup]
    control: Control
    rank: int
    nodes: tuple[str, ...]
    epoch: int
    interval_steps: int | None
    tell: Callable[[CommunicationRecord], None]
    _left: int = _WARM_UP_STEPS
    _recording_now: bool = False
    _failed: bool = False
    _ended: _Measured | None = field(default=None)
    _sent: _Measured | None = field(default=None)

    def begin(self, *, counts: bool) -> None:
        """Start to record if this step is to be measured."""
        if self.interval_steps is None or len(self.nodes) == 1:
            return
        if self._left > 0 or not counts:
            self._left -= 1
            return
        self._left = self.interval_steps - 1
        self._recording_now = True
        with self._attempt():
            self.recording.start()

    def end(self, step: int, step_seconds: float) -> None:
        """Stop recording; send what is complete, and report what has been gathered."""
        self._receive()
        if self._ended is not None:
            self._send(self._ended)
        if not self._recording_now:
            return
        self._recording_now = False
        with self._attempt():
            self.recording.stop()
        self._ended = _Measured(step, step_seconds)
        if not self.recording.late:
            self._send(self._ended)

    def _send(self, measured: _Measured) -> None:
        self._ended = None
        row = failed_row()
        with self._attempt():
            messages = self.recording.messages()
            row = row_of(messages, self.rank, self.known, measured.step_seconds)
        vector = torch.zeros(len(self.nodes), ROW_SIZE, dtype=torch.float64)
        vector[self.rank] = torch.tensor(failed_row() if self._failed else row, dtype=torch.float64)
        measured.vector, measured.work = vector, self.control.start_sum(vector)
        self._sent = measured

    def _receive(self) -> None:
        """Finish gathering, one step later, so that no rank waits for the slowest one."""
        if self._sent is None:
            return
        sent, self._sent = self._sent, None
        sent.work.wait()
        table = sent.vector.tolist()
        if not all_measured(table):
            self.interval_steps = None  # on all ranks, which have the same table
            return
        if self.rank == 0:
            record = record_of(
                table,
                epoch=self.epoch,
                step=sent.step,
                time=time.time(),
                nodes=self.nodes,
                source=self.recording.source,
            )
            self.tell(record)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Report what fails in measuring once; it never ends training."""
        try:
            yield
        except Exception as error:
            if not self._failed:
                print(
                    f"event=messages rank={self.rank} messages are not measured any more, "
                    f"{type(error).__name__}: {error}",
                    flush=True,
                )
            self._failed = True


def known_groups(axes: Sequence[AxisGroup]) -> tuple[KnownGroup, ...]:
    """Name the groups of a mesh as torch's flight recorder does."""
    return tuple(KnownGroup(one.axis, str(one.group.group_name), one.ranks) for one in axes)
