"""Record the messages that this rank sends in one step, whoever calls for them.

torch's flight recorder lists every collective operation of a process group with its sizes, whether
Python or C++ has called it (torch: c10d/FlightRecorder.hpp); it is always on. With NCCL it has
durations and point-to-point messages, too. With gloo it has neither: durations come from
torch.profiler, which runs for that step only, and sends are seen where all of them pass,
`ProcessGroup.send`. Belongs here: what one rank reads from torch. Does not belong here: which axis
a message belongs to (see `message_axes`), when a step is measured (see `messages`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

from hpctrain.telemetry.traces import message_kind
from hpctrain.train.device import on_cpu
from hpctrain.train.message_axes import Message

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
