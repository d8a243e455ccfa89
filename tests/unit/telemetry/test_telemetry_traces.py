"""Traces in a few numbers: what was sent, what of it nothing hid, and how far a file was read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hpctrain.telemetry import traces
from hpctrain.telemetry.traces import length, merged, overlap, read_trace, trace_files

NAME = "e000002-rank-000003-steps-7-8.json.gz"


def event(
    name: str, begin: float, micros: float, category: str = "kernel", **arguments: Any
) -> dict[str, Any]:
    return dict(ph="X", name=name, cat=category, ts=begin, dur=micros, args=arguments)


def nccl(
    begin: float, micros: float, elements: int = 1000, kind: str = "BFloat16"
) -> dict[str, Any]:
    """As kineto writes it (libkineto: output_json.cpp, the metadata of collectives)."""
    told = {"Collective name": "allreduce", "In msg nelems": elements, "dtype": kind}
    return event(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs)", begin, micros, **told
    )


STEP = event("hpctrain: step 7", 1000, 1000, "user_annotation")
NEXT = event("hpctrain: step 8", 3000, 1000, "user_annotation")
GPU = [
    STEP,
    NEXT,
    event("hpctrain: data", 1000, 100, "user_annotation"),
    event("hpctrain: data", 3000, 300, "user_annotation"),
    event("sm90_gemm", 1100, 400),
    event("sm90_gemm", 3100, 400),
    nccl(1300, 400),  # half of it behind the product
    nccl(1800, 100, 500, "Float"),
    nccl(2500, 100),  # between steps: of no step
    event("aten::mm", 1700, 300, "cpu_op"),  # a GPU's kernels count, not who asks for them
    dict(ph="M", name="process_name"),
]


def written(
    directory: Path, events: list[Any], name: str = NAME, *, cut: int | None = None
) -> Path:
    path = directory / name
    before = {"schemaVersion": 1, "distributedInfo": {"pg_config": []}}
    text = json.dumps({**before, "traceEvents": events, "traceName": "x"}, indent=1)
    data = gzip.compress(text.encode())
    path.write_bytes(data[:cut])
    return path


def test_messages_and_what_hides_them(tmp_path: Path) -> None:
    told = read_trace(written(tmp_path, GPU))
    assert told is not None
    assert (told.epoch, told.rank, told.steps, told.whole, told.on_gpu) == (
        2,
        3,
        (7, 8),
        True,
        True,
    )
    assert told.step_seconds == pytest.approx(1e-3)
    assert told.communication_seconds == pytest.approx(500e-6 / 2)
    assert told.exposed_seconds == pytest.approx(300e-6 / 2)
    assert told.parts == {"data": pytest.approx(200e-6)}
    first, second = told.messages
    assert (first.kind, first.size_bytes, second.size_bytes) == ("all_reduce", 2000, 2000)
    assert (first.begin, first.seconds) == (pytest.approx(3e-4), pytest.approx(4e-4))
    assert first.exposed_seconds == pytest.approx(2e-4)
    assert second.exposed_seconds == pytest.approx(1e-4)


GLOO = {"Input Dims": [[10, 3], [5]], "Input type": ["float", "float"]}


def test_gloo_sends_beside_the_operations_of_a_cpu(tmp_path: Path) -> None:
    told = read_trace(written(tmp_path, [
        STEP,
        event("gloo:all_reduce", 1200, 400, "user_annotation", **GLOO),
        event("gloo:all_gather", 1700, 100, "user_annotation"),
        event("aten::mm", 1100, 300, "cpu_op"),
        event("aten::linear", 1050, 400, "cpu_op"),
        event("c10d::allreduce_", 1200, 400, "cpu_op"),
    ]))  # fmt: skip
    assert told is not None and not told.on_gpu
    assert told.exposed_seconds == pytest.approx(250e-6)
    assert [(m.kind, m.size_bytes) for m in told.messages] == [
        ("all_reduce", 35 * 4), ("all_gather", None)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "reduce_scatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "all_gather"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send"),
        ("gloo:alltoall_base", "all_to_all"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("sm90_gemm", None),
    ],
)
def test_kinds_of_messages(name: str, kind: str | None) -> None:
    assert traces.message_kind(name) == kind


def test_a_trace_that_breaks_off_counts_as_far_as_it_goes(tmp_path: Path) -> None:
    noise = [event(f"aten::op{number}", number, 1, "cpu_op") for number in range(20000)]
    whole = written(tmp_path, [STEP, *noise], "e000001-rank-000000-steps-7-7.json.gz")
    cut = written(tmp_path, [STEP, *noise], cut=whole.stat().st_size // 2)
    told, half = read_trace(whole), read_trace(cut)
    assert told is not None and half is not None
    assert told.whole and told.events == 20001
    assert not half.whole and 1000 < half.events < 20001 and half.steps == (7,)


def test_reading_stops_at_a_limit(tmp_path: Path) -> None:
    told = read_trace(written(tmp_path, GPU), most_events=5)
    assert told is not None and not told.whole and told.events == 6


def test_what_is_no_trace_says_nothing(tmp_path: Path) -> None:
    assert read_trace(written(tmp_path, [])) is None, "no step in it"
    assert read_trace(written(tmp_path, GPU, "other.json.gz")) is None
    broken = tmp_path / NAME
    broken.write_bytes(b"no gzip")
    assert read_trace(broken) is None
    broken.write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "X", "name": nonsense}]}'))
    assert read_trace(broken) is None
    broken.write_bytes(gzip.compress(b'{"other": []}'))
    assert read_trace(broken) is None


def test_traces_of_the_newest_launch_come_first(tmp_path: Path) -> None:
    names = [
        "e000002-rank-000000-steps-3-3.json.gz",
        "e000002-rank-000001-steps-3-3.json.gz",
        "e000001-rank-000000-steps-10-10.json.gz",
        "e000001-rank-000000-steps-3-3.json.gz",
        "unfinished-e000003-rank-000000-steps-3-3.json.gz.tmp",
        "e000002-rank-000000-steps-3-3.nsys-rep",
    ]
    for name in names:
        (tmp_path / name).touch()
    found = [path.name for path in trace_files(tmp_path)]
    assert found == [names[0], names[1], names[3], names[2]]
    assert trace_files(tmp_path / "none") == []


def test_intervals() -> None:
    some = merged([(5.0, 6.0), (1.0, 3.0), (2.0, 4.0), (8.0, 8.0)])
    assert some == [(1.0, 4.0), (5.0, 6.0)] and length(some) == 4.0
    assert overlap(some, [(0.0, 2.0), (3.5, 5.5)]) == [(1.0, 2.0), (3.5, 4.0), (5.0, 5.5)]
