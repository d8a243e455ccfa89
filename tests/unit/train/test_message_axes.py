"""Groups of ranks are attributed to axes, and collectives to links: tables of cases."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.train import messages
from hpctrain.train.engine import AxisGroup
from hpctrain.train.messages import (
    FAILED_ROW,
    Message,
    RecordingError,
    axis_of,
    entries_between,
    handed_bytes,
    nccl_messages,
    record_of,
    row_of,
    sent_bytes,
)


def known_group(axis: Any, name: str, ranks: tuple[int, ...]) -> AxisGroup:
    return AxisGroup(axis, SimpleNamespace(group_name=name), ranks)


# Rank 0 of tp 2, cp 2, dp 2, pp 2, where experts are spread over dp.
MEGATRON = (
    known_group("tp", "t", (0, 1)),
    known_group("cp", "c", (0, 2)),
    known_group("ep", "e", (0, 4)),
    known_group("dp", "d", (0, 2, 4, 6)),
    known_group("pp", "p", (0, 8)),
)
PIPELINE = (known_group("pp", "0", (0, 1)),)  # of DeepSpeed: torch's group has all ranks


@pytest.mark.parametrize(
    ("group", "ranks", "known", "axis"),
    [
        ("t", (0, 1), MEGATRON, "tp"),
        ("c", (0, 2), MEGATRON, "cp"),
        ("e", (0, 4), MEGATRON, "ep"),
        ("d", (0, 2, 4, 6), MEGATRON, "dp"),
        ("x", (0, 2, 4, 6), MEGATRON, "dp"),
        ("x", (0, 6), MEGATRON, "dp"),
        ("x", (8, 0), MEGATRON, "pp"),
        ("x", (0, 1, 8, 9), MEGATRON, "other"),
        ("0", tuple(range(16)), MEGATRON, "other"),
        ("0", (0, 1, 2, 3), PIPELINE, "other"),
        ("x", (0, 1), PIPELINE, "pp"),
        ("x", (0, 2), PIPELINE, "dp"),
        ("0", (0, 1), (), "other"),
    ],
)
def test_axis_of_a_group(
    group: str, ranks: tuple[int, ...], known: tuple[AxisGroup, ...], axis: str
) -> None:
    assert axis_of(group, ranks, 0, known) == axis


def test_groups_of_the_same_ranks_are_told_apart_by_name() -> None:
    known = (known_group("ep", "e", (0, 1)), known_group("dp", "d", (0, 1)))
    assert [axis_of(name, (0, 1), 0, known) for name in ("e", "d")] == ["ep", "dp"]


def message(kind: str, ranks: tuple[int, ...] = (0, 1, 2, 3), **fields: Any) -> Message:
    usual: dict[str, Any] = dict(group="d", size_bytes=400, begin=None, seconds=0.5)
    return Message(kind, ranks=ranks, **{**usual, **fields})


@pytest.mark.parametrize(
    ("kind", "ranks", "sent"),
    [
        ("all_reduce", (0, 1, 2, 3), {2: 600}),
        ("reduce_scatter", (0, 1, 2, 3), {2: 300}),
        ("all_gather", (0, 1, 2, 3), {2: 1200}),
        ("broadcast", (0, 1, 2, 3), {2: 300}),
        ("all_to_all", (0, 1, 2, 3), {0: 100, 2: 100, 3: 100}),
        ("all_reduce", (3, 0, 1), {3: pytest.approx(400 * 4 / 3)}),
        ("send", (1, 3), {3: 400}),
        ("receive", (3, 1), {}),
        ("barrier", (0, 1, 2, 3), {}),
        ("coalesced", (0, 1), {0: 200}),
    ],
)
def test_what_rank_1_sends_to_whom(
    kind: str, ranks: tuple[int, ...], sent: dict[int, float]
) -> None:
    assert sent_bytes(message(kind, ranks), 1) == sent


def record(rows: list[list[float]], nodes: tuple[str, ...]) -> Any:
    return record_of(rows, epoch=2, step=7, time=1.0, nodes=nodes, source="test")


def test_a_record_has_sums_of_all_ranks() -> None:
    groups = ({0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3)})
    rows = []
    for rank in range(4):
        known = (
            known_group("tp", "t", groups[0][rank]),
            known_group("dp", "d", groups[1][rank % 2]),
        )
        own = [
            message("all_reduce", known[0].ranks, group="t", begin=1.0, seconds=2.0),
            message("all_reduce", known[0].ranks, group="t", begin=2.0, seconds=2.0),
            message("all_gather", known[1].ranks, size_bytes=10),
            message("all_reduce", (rank,), group="alone"),
            message("all_reduce", (0, 1, 2, 3), group="0", size_bytes=4),
        ]
        rows.append(row_of(own, rank, known, 9.0 + rank))
    found = record(rows, ("a", "a", "b", "b"))
    tensors, data, other = found.axes
    assert (found.step_seconds, found.epoch, found.step) == (12.0, 2, 7)
    assert (tensors.axis, tensors.groups, tensors.ranks_per_group) == ("tp", (0, 0, 2, 2), 2)
    assert tensors.calls == (2,) * 4 and tensors.bytes == (800,) * 4
    assert tensors.seconds == (3.0,) * 4, "overlapping seconds count once"
    assert (data.axis, data.groups, data.bytes) == ("dp", (0, 1, 0, 1), (10,) * 4)
    assert (other.axis, other.groups, other.ranks_per_group) == ("other", (0,) * 4, 4)
    links = {(link.source, link.target): link.bytes for link in found.links}
    assert links[0, 1] == 800 + 6, "both to the neighbour in its group, and in the ring of all"
    assert links[0, 2] == 10 and (0, 3) not in links


def test_many_links_are_those_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = message("all_reduce", (0, 1, 2, 3), group="0")
    rows = [row_of([ring], rank, (), 1.0) for rank in range(4)]
    assert len(record(rows, ("a", "a", "b", "b")).links) == 4
    monkeypatch.setattr(messages, "MOST_LINKS", 3)
    links = record(rows, ("a", "a", "b", "b")).links
    assert [(link.source, link.target, link.bytes) for link in links] == [
        (0, 0, 600),
        (0, 2, 600),
        (2, 0, 600),
        (2, 2, 600),
    ]


def test_a_rank_that_could_not_measure_is_seen() -> None:
    good = row_of([message("all_reduce")], 0, (), 1.0)
    assert len(good) == len(FAILED_ROW)
    assert record([good, [*FAILED_ROW]], ("a", "b")) is None


def entry(number: int, name: str, **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = dict(
        record_id=number,
        time_created_ns=100 + number,
        profiling_name=name,
        process_group=["d", "DATA"],
        input_sizes=[[10, 10]],
        input_dtypes=["BFloat16"],
    )
    return {**usual, **fields}


def test_entries_of_ncclls_recorder_have_durations_and_peers() -> None:
    entries = [
        entry(0, "nccl:all_reduce", duration_ms=2.0),
        entry(1, "nccl:send 0->1", process_group=["p", ""]),
        entry(2, "nccl:recv 0<-1", process_group=["p", ""]),
        entry(3, "nccl:coalesced", process_group=["p", ""], duration_ms=3.0, input_sizes=[]),
        entry(4, "nccl:all_reduce", process_group=["ours", ""]),
    ]
    ranks = {"d": (4, 5, 6, 7), "p": (4, 12)}
    found = nccl_messages(entries, ranks, {"ours"})
    assert [(one.kind, one.ranks, one.size_bytes, one.seconds) for one in found] == [
        ("all_reduce", (4, 5, 6, 7), 200, 0.002),
        ("send", (4, 12), 200, 0.0),
        ("receive", (4, 12), 0, 0.0),
        ("coalesced", (4, 12), 0, 0.003),
    ]
    row = row_of(found, 4, (known_group("pp", "p", (4, 12)),), 1.0)
    (_, stages) = record([row] + [row_of([], 0, (), 1.0)] * 12, ("a",) * 13).axes
    assert (stages.calls[0], stages.bytes[0], stages.seconds[0]) == (2, 200, 0.003)


def test_only_entries_of_the_step_count() -> None:
    text = json.dumps({"entries": [entry(number, "gloo:send") for number in range(6)]})
    assert [one["record_id"] for one in entries_between(text, 102, 104)] == [2, 3, 4]
    assert (
        handed_bytes(entry(0, "x", input_sizes=[[2], [3, 1]], input_dtypes=["Long", "Bool"])) == 19
    )


def test_a_step_that_the_recorder_forgot_in_part_is_not_measured() -> None:
    text = json.dumps({"entries": [entry(number, "gloo:send") for number in (5, 6)]})
    with pytest.raises(RecordingError, match="TORCH_FR_BUFFER_SIZE"):
        entries_between(text, 103, 200)
    assert len(entries_between(text, 105, 200)) == 2
