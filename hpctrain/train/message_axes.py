"""Attribute the messages of one rank to the axes of the layout, and to the ranks that get them.

Pure sums over one measured step. Belongs here: which axis a group of ranks is, and what a rank
sends to whom. Does not belong here: measuring (see `message_recording`), gathering (see
`messages`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpctrain.records.run_records import AxisMessages, CommunicationRecord, LinkBytes
from hpctrain.telemetry.intervals import length, merged

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
