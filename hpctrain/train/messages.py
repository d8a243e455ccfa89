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
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from hpctrain.records.run_records import AxisMessages, CommunicationRecord, LinkBytes
from hpctrain.telemetry.traces import length, merged, message_kind
from hpctrain.train.device import on_cpu
from hpctrain.train.engine import AxisGroup
from hpctrain.train.times import GatheringClock

_WARM_UP_STEPS = 2
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
AXES = ("tp", "cp", "ep", "dp", "pp", "other")
# Of each rank: the targets that it sends most to. A rank of a ring has one target per axis, and of
# a pipeline two; only an all-to-all of more ranks has others, which are left out.
MOST_TARGETS = 16
# With more links the record has those between nodes, each named by its first rank.
MOST_LINKS = 4096
_COLUMNS = 5  # of each axis in a row: first rank of the group + 1, its size, calls, bytes, seconds
ROW_SIZE = 2 + _COLUMNS * len(AXES) + 2 * MOST_TARGETS
# The row of a rank that could not measure.
FAILED_ROW = (1.0, *(0.0,) * (ROW_SIZE - 1))


class MessageClock(GatheringClock):
    """Measures a step every `interval_steps` steps (None: never); `tell` runs on rank 0.

    All ranks must call `begin` and `end` for the same steps with the same `counts`: a step that
    does not count is not measured, but the next one is. `known`: the groups of the engine.
    """

    def __init__(self, recording: Recording, known: Sequence[AxisGroup], **launch: Any) -> None:
        super().__init__(**launch)
        self.recording, self.known = recording, known
        self._left = _WARM_UP_STEPS
        self._recording_now = self._failed = False
        self._ended: tuple[int, float] | None = None  # step and seconds, until it is complete

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
            self._send_row()
        if not self._recording_now:
            return
        self._recording_now = False
        with self._attempt():
            self.recording.stop()
        self._ended = step, step_seconds
        if not self.recording.late:
            self._send_row()

    def _send_row(self) -> None:
        assert self._ended is not None
        (step, step_seconds), self._ended = self._ended, None
        row: Sequence[float] = FAILED_ROW
        with self._attempt():
            row = row_of(self.recording.messages(), self.rank, self.known, step_seconds)
        self._send(FAILED_ROW if self._failed else row, step)

    def _received(self, table: list[list[float]], step: int) -> None:
        record = record_of(
            table,
            epoch=self.epoch,
            step=step,
            time=time.time(),
            nodes=self.nodes,
            source=self.recording.source,
        )
        if record is None:
            self.interval_steps = None  # on all ranks, which have the same table
        elif self.rank == 0:
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


# -- Attribute the messages of one rank to axes, and to the ranks that get them: pure ------------


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


def axis_of(group: str, ranks: Sequence[int], rank: int, known: Sequence[AxisGroup]) -> str:
    """Find the axis along which the ranks of a group differ; `other` if that is no single one.

    The engine's own groups come first: groups of two axes may have the same ranks. A part of an
    axis belongs to it: the ranks that share a copy of the weights, the ends of a pipeline, a sender
    and its receiver. A group that meets every known axis in this rank only is one of data
    parallelism: DeepSpeed makes those of a pipeline after the mesh.
    """
    members = set(ranks)
    for own in known:
        if own.name == group and set(own.ranks) == members:
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


def row_of(
    messages: Iterable[Message], rank: int, known: Sequence[AxisGroup], step_seconds: float
) -> list[float]:
    """Sum the messages of a rank into numbers, which all ranks add to one table.

    Operations of a group of one rank send nothing, and are left out. Those of one GPU's group
    follow each other: their durations add up.
    """
    own: dict[str, tuple[int, ...]] = {group.axis: group.ranks for group in known}
    by_axis: dict[str, list[Message]] = {axis: [] for axis in AXES}
    targets: dict[int, float] = defaultdict(float)
    for message in messages:
        if len(message.ranks) > 1:
            by_axis[axis_of(message.group, message.ranks, rank, known)].append(message)
            for target, size in sent_bytes(message, rank).items():
                targets[target] += size
    row = [0.0, step_seconds]
    for axis, sent in by_axis.items():
        ranks = own.get(axis) or max((one.ranks for one in sent), key=len, default=())
        # `coalesced`: the end of a batch whose parts were counted
        calls = sum(one.kind != "coalesced" for one in sent)
        seconds = sum(one.seconds for one in sent if one.begin is None)
        begun = [(one.begin, one.begin + one.seconds) for one in sent if one.begin is not None]
        size = sum(one.size_bytes for one in sent)
        first = min(ranks) + 1 if ranks else 0
        row += [first, len(ranks), calls, size, seconds + length(merged(begun))]
    most = sorted(targets.items(), key=lambda item: (-item[1], item[0]))[:MOST_TARGETS]
    row += [number for target, size in most for number in (target + 1, round(size))]
    return row + [0.0] * (ROW_SIZE - len(row))


def record_of(
    table: Sequence[Sequence[float]],
    *,
    epoch: int,
    step: int,
    time: float,
    nodes: tuple[str, ...],
    source: str,
) -> CommunicationRecord | None:
    """Make the record from the rows of all ranks; None if one of them could not measure."""
    if any(row[0] == FAILED_ROW[0] for row in table):
        return None
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
    links: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(table):
        pairs = row[ROW_SIZE - 2 * MOST_TARGETS :]
        for target, size in zip(pairs[::2], pairs[1::2], strict=True):
            if target:
                links[rank, int(target) - 1] = int(size)
    if len(links) > MOST_LINKS:
        leader = {node: rank for rank, node in reversed([*enumerate(nodes)])}
        between: dict[tuple[int, int], int] = defaultdict(int)
        for (rank, target), sent in links.items():
            between[leader[nodes[rank]], leader[nodes[target]]] += sent
        links = between
    return CommunicationRecord(
        epoch=epoch,
        step=step,
        time=time,
        step_seconds=max(row[1] for row in table),
        nodes=nodes,
        axes=tuple(axes),
        links=tuple(
            LinkBytes(source=rank, target=target, bytes=size)
            for (rank, target), size in sorted(links.items())
        ),
        source=source,
    )


# -- Record the messages that this rank sends in one step, whoever calls for them ----------------
# torch's flight recorder lists every collective operation of a process group with its sizes,
# whether Python or C++ has called it (torch: c10d/FlightRecorder.hpp); it is always on. With NCCL
# it has durations and point-to-point messages, too. With gloo it has neither: durations come from
# torch.profiler, which runs for that step only, and sends are seen where all of them pass,
# `ProcessGroup.send`.


class RecordingError(Exception):
    """The messages of a step could not be measured; training is not affected."""


class Recording(ABC):
    """Records one step at a time, without `own_groups`, which are not the engine's.

    `late`: the messages are complete only at the end of the step after it.
    """

    source: ClassVar[str]
    late: ClassVar[bool]

    def __init__(self, own_groups: set[str]) -> None:
        self._own_groups = own_groups
        self._begin_ns = self._end_ns = 0

    def start(self) -> None:
        self._begin_ns = time.time_ns()

    def stop(self) -> None:
        self._end_ns = time.time_ns()

    @abstractmethod
    def messages(self) -> list[Message]:
        """Return the messages of the step that has been stopped last."""


def recording_of(own_groups: set[str]) -> Recording:
    """Choose how this rank records."""
    return GlooRecording(own_groups) if on_cpu() else NcclRecording(own_groups)


class _Call(NamedTuple):
    """An operation of gloo as it was called, before its duration is known."""

    called_ns: int
    name: str
    group: str
    ranks: tuple[int, ...]
    size_bytes: int


class GlooRecording(Recording):
    """Records on a CPU, with the profiler of torch running for the step."""

    source = "flight recorder and torch.profiler, gloo"
    late = False

    def __init__(self, own_groups: set[str]) -> None:
        super().__init__(own_groups)
        self._profiling = False
        self._events: list[Any] = []
        self._sends: list[_Call] = []
        self._restore: Callable[[], None] | None = None

    def start(self) -> None:
        """Start torch's profiler for what has the scope of users, as the operations of gloo do.

        `torch.profiler.profile` records every operator as well: a measured step takes some times as
        long as others then, and reading it longer still.
        """
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints two lines each time
        # here: a torch without these names ends measuring, not the launch
        from torch._C._profiler import RecordScope, _ExperimentalConfig

        profiler: Any = torch.autograd
        kinds = {ProfilerActivity.CPU}
        nothing_more = (False,) * 5  # shapes, memory, stacks, FLOPs, modules
        config = profiler.ProfilerConfig(
            profiler.ProfilerState.KINETO, *nothing_more, _ExperimentalConfig()
        )
        profiler._prepare_profiler(config, kinds)
        profiler._enable_profiler(config, kinds, {RecordScope.USER_SCOPE})
        self._profiling = True
        self._sends = []
        self._restore = _watch_sends(self._sends)
        super().start()

    def stop(self) -> None:
        super().stop()
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self._profiling:
            self._profiling = False
            self._events = torch.autograd._disable_profiler().events()

    def messages(self) -> list[Message]:
        events, self._events = self._events, []
        lasting: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for event in events:
            lasting[event.name()].append((event.start_ns(), event.duration_ns()))
        timed = {name: iter(sorted(found)) for name, found in lasting.items()}
        text = torch._C._distributed_c10d._dump_fr_trace_json()
        calls, ranks = [*self._sends], _GroupRanks()
        for entry in entries_between(text, self._begin_ns, self._end_ns):
            group, name = str(entry["process_group"][0]), str(entry["profiling_name"])
            called_ns = int(entry["time_created_ns"])
            calls.append(_Call(called_ns, name, group, ranks[group], handed_bytes(entry)))
        messages = []
        # each has one event, which begins after the call
        for called_ns, name, group, members, size in sorted(calls, key=lambda call: call[0]):
            begin, lasted = next(
                (one for one in timed.get(name, ()) if one[0] >= called_ns), (called_ns, 0)
            )
            kind = "receive" if name == "gloo:recv" else message_kind(name)
            if kind is not None and group not in self._own_groups:
                messages.append(Message(kind, group, members, size, begin / 1e9, lasted / 1e9))
        return messages


def _watch_sends(calls: list[_Call]) -> Callable[[], None]:
    """Note every send and receive from now on; returns what ends that."""
    group_class: Any = dist.ProcessGroup
    # as the class has them: read as attributes they are functions that do not bind
    originals = {name: vars(group_class)[name] for name in ("send", "recv")}
    rank = dist.get_rank()

    def noting(name: str, original: Any) -> Any:
        def noted(group: Any, tensors: Any, peer: int, *rest: Any, **named: Any) -> Any:
            with contextlib.suppress(Exception):  # never at the expense of a message
                other = dist.get_process_group_ranks(group)[peer]
                sent = name == "send"
                size = sum(one.numel() * one.element_size() for one in tensors) if sent else 0
                pair = (rank, other) if sent else (other, rank)
                calls.append(
                    _Call(time.time_ns(), f"gloo:{name}", str(group.group_name), pair, size)
                )
            return original.__get__(group)(tensors, peer, *rest, **named)

        return noted

    def restore() -> None:
        for name, original in originals.items():
            setattr(group_class, name, original)

    for name, original in originals.items():
        setattr(group_class, name, noting(name, original))
    return restore


class NcclRecording(Recording):
    """Records on a GPU by NCCL's flight recorder alone.

    Its thread learns of finished operations some time after them, hence `late`. The engine's groups
    of gloo, for tensors on the host, are not measured.
    """

    source = "flight recorder, NCCL"
    late = True
    _timed = False

    def start(self) -> None:
        if not self._timed:  # an event more in front of each operation, from now on
            for group in list(dist.distributed_c10d._world.pg_map):
                with contextlib.suppress(RuntimeError):  # a backend that measures nothing
                    group._enable_collectives_timing()
            self._timed = True
        super().start()

    def messages(self) -> list[Message]:
        c10d: Any = torch._C._distributed_c10d
        text = c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=False)
        entries = entries_between(text, self._begin_ns, self._end_ns)
        return nccl_messages(entries, _GroupRanks(), self._own_groups)


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
