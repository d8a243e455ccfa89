"""The table of runs on a terminal: long names, runs of others, prepared runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from hpctrain.records.requests import user_name
from hpctrain.records.software import Library, SoftwareFacts, SoftwareRecord
from hpctrain.records.speed_checks import AxisSpeed, SlowPart, SpeedCheck
from hpctrain.runs.describe import software_lines, speed_lines
from hpctrain.runs.run_page import Planned, RunPage, page_lines, run_page
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus
from hpctrain.runs.status_text import people_lines
from tests.judged_runs import submitted

LONG = "a-name-that-somebody-took-great-pains-to-make-complete-1a2b"


def row(run_id: str, state: RunState = RunState.RUNNING, **more: Any) -> RunStatus:
    facts: dict[str, Any] = dict(
        job_id=4711, attempts=2, step=1200, target_step=100_000, loss=2.5, step_seconds=1.25,
        tokens_per_second=12_345.0, updated_seconds_ago=12.0, eta_seconds=90_000.0,
        owner=user_name(), reason="",
    )  # fmt: skip
    return RunStatus(run_id=run_id, state=state, **{**facts, **more})


def test_one_long_name_takes_no_columns_from_the_others() -> None:
    without = list(people_lines([row("gpt-1a2b")], 80))
    lines = list(people_lines([row("gpt-1a2b"), row(LONG), row("bert-77aa")], 80))
    assert lines[0].split() == without[0].split()
    own = lines.index(LONG)
    assert lines[own + 1].split()[0] == "RUNNING", "its cells are below it"
    assert [line for line in lines if line.startswith("bert-77aa")]
    assert max(map(len, lines)) <= 80


def test_a_long_name_stays_in_its_row_where_there_is_room() -> None:
    lines = list(people_lines([row("gpt-1a2b"), row(LONG)], 160))
    assert any(line.startswith(f"{LONG}  RUNNING") for line in lines)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_and_states_are_whole_at_every_width(width: int) -> None:
    names = ["x" * length for length in (5, 20, 32, 33, 50)]
    text = "\n".join(people_lines([row(name) for name in names], width))
    assert all(any(line.split()[:1] == [name] for line in text.splitlines()) for name in names)
    assert text.count("RUNNING") == len(names)


def test_runs_of_others_show_whose_they_are() -> None:
    (head, *_) = people_lines([row("gpt-1a2b"), row("hers-0001", owner="ada")], 120)
    assert head.split()[:3] == ["RUN", "STATE", "USER"]
    (head, *_) = people_lines([row("gpt-1a2b"), row("unknown-0001", owner=None)], 120)
    assert "USER" not in head


def test_times_are_aligned_on_the_right() -> None:
    rows = [row("a", updated_seconds_ago=0.024), row("b", updated_seconds_ago=754.0)]
    ends = []
    for line in itertools.islice(people_lines(rows, 140), 0, 5):
        if line.startswith(("a ", "b ")):
            cells = line.split("  ")
            ends.append(len(line.rstrip()) if cells else 0)
    assert len(set(ends)) == 1


def test_a_prepared_run_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [row("prepared-0001", RunState.PREPARED), row("refused-0002", RunState.NOT_SUBMITTED)]
    prepared, refused = (
        line for line in people_lines(rows, 120) if "PREPARED" in line or "NOT SUB" in line
    )
    assert "\x1b[33m" in prepared and "\x1b[31m" in refused


# -- What the page of one run says of its plan ---------------------------------------------------


def plan_told(measured: float | None, low: float | None = 30.5, high: float | None = 38.2) -> str:
    page = RunPage(
        status=RunStatus(
            run_id="one-1a2b", state=RunState.RUNNING, reason="", step_seconds=measured
        ),
        directory="runs/one-1a2b",
        planned=Planned(
            layout="tp 2",
            nodes="2 x 8",
            step_seconds=34.0,
            gpu_hours=None,
            low_step_seconds=low,
            high_step_seconds=high,
        ),
    )
    words = " ".join(" ".join(page_lines(page)).split())
    return words[words.index("Plan ") :].split(" Directory")[0]


def test_the_planned_step_has_its_interval() -> None:
    assert "34 s a step planned (80%: 30.5 s-38.2 s)" in plan_told(None)
    assert "80%" not in plan_told(None, low=None, high=None)


@pytest.mark.parametrize(("measured", "outside"), [(34.5, False), (38.1, False), (40.0, True)])
def test_a_step_outside_the_interval_is_said_to_be(measured: float, outside: bool) -> None:
    assert ("outside the interval" in plan_told(measured)) == outside
    assert "outside" not in plan_told(measured, low=None, high=None)


def test_the_interval_is_that_of_the_submitted_plan(tmp_path: Path) -> None:
    run, _ = submitted(tmp_path, "llama7b", "h100x16", ("resources.gpus=64",))
    found = run_page(run, RunStatus(run_id="one", state=RunState.PREPARED, reason="")).planned
    assert found is not None
    assert found.step_seconds is not None
    assert found.low_step_seconds is not None
    assert found.high_step_seconds is not None
    assert found.low_step_seconds < found.step_seconds < found.high_step_seconds


# -- The software of a launch in `describe` ------------------------------------------------------


FACTS = SoftwareFacts(
    python="3.12.3",
    torch="2.13.0+cu130",
    cuda_build="13.0",
    driver="580.65.06",
    driver_cuda="13.0",
    nccl="2.28.3",
    gpus=("NVIDIA H100 80GB HBM3",) * 8,
    megatron_core="0.16.1",
    transformer_engine=Library(version="2.9.0"),
    attention=("cuDNN", "flash-attn 2.8.3"),
    apex_wgrad=Library(error="ImportError: libcudart.so.12"),
    triton=Library(version="3.5.0"),
    compiler="/usr/bin/gcc",
    open_files=65536,
)


def test_equal_nodes_are_one_block() -> None:
    (record,) = [SoftwareRecord(epoch=3, nodes=("n0", "n1"), ranks=16, facts=FACTS)]
    assert software_lines([record]) == [
        "Software of launch 3",
        "  python, torch      3.12.3, 2.13.0+cu130",
        "  CUDA               13.0, driver 580.65.06 (up to CUDA 13.0), NCCL 2.28.3",
        "  GPUs of a rank     8 x NVIDIA H100 80GB HBM3",
        "  megatron-core      0.16.1",
        "  TransformerEngine  2.9.0, attention: cuDNN, flash-attn 2.8.3",
        "  Apex wgrad         cannot be imported (ImportError: libcudart.so.12)",
        "  triton, compiler   3.5.0, /usr/bin/gcc",
        "  open files         65,536 at most",
    ]


def test_warnings_about_the_engine_s_library_are_shown() -> None:
    odd = FACTS.model_copy(update={"remarks": ("megatron-core 0.20.0 is not tested",)})
    (record,) = [SoftwareRecord(epoch=1, nodes=("n0",), ranks=1, facts=odd)]
    assert software_lines([record])[-1] == "  warning            megatron-core 0.20.0 is not tested"


def test_other_nodes_are_named() -> None:
    cpu = SoftwareFacts(python="3.11.7", torch="2.13.0+cpu", open_files=1024)
    nodes = tuple(f"n{number}" for number in range(6))
    lines = software_lines(
        [
            SoftwareRecord(epoch=1, nodes=nodes, ranks=6, facts=cpu),
            SoftwareRecord(epoch=1, nodes=("n9",), ranks=1, facts=FACTS),
        ]
    )
    assert lines[1:4] == [
        "  on n0, n1, n2, n3 and 2 more",
        "  python, torch      3.11.7, 2.13.0+cpu",
        "  open files         1,024 at most",
    ]
    assert lines[4] == "  on n9"
    assert software_lines([]) == []


# -- The check before training in `describe`, in at most 80 columns ------------------------------


CHECK = SpeedCheck(
    epoch=3,
    time=1.0,
    seconds=7.4,
    nodes=("n0", "n0", "n1", "n1"),
    gpu="NVIDIA H100 80GB HBM3",
    accelerator="cuda",
    precision="bf16",
    product_mnk=(8192, 8192, 8192),
    product_flops_per_second=(612e12, 598e12, None, 310e12),
    expected_flops_per_second=650e12,
    copy_bytes_per_second=(2900e9,) * 4,
    clock_hz=(1755e6, 1755e6, None, 1005e6),
    highest_clock_hz=(1980e6,) * 4,
    slowdowns=("", "", "", "thermal"),
    free_memory_bytes=(79 * 2**30,) * 4,
    total_memory_bytes=(80 * 2**30,) * 4,
    networks=("IB", "IB", "IB", ""),
    far_cpus=("", "", "CPUs of NUMA node 1, its GPU is on node 0", ""),
    axes=(
        AxisSpeed(
            axis="tp",
            operation="all_reduce",
            ranks_per_group=2,
            message_bytes=64 * 2**20,
            groups=(0, 0, 2, 2),
            bus_bytes_per_second=(350e9, 350e9, 41.5e9, 41.5e9),
            expected_bytes_per_second=360e9,
        ),
    ),
    rounds=2,
    skipped=("axis pp: the limit of 60 s",),
    slow=(
        SlowPart(
            part="gpu",
            message="rank 3 on n1: matrix products at 310 TFLOP/s, 52% of its peers' 600 TFLOP/s; "
            "clock 1,005 of 1,980 MHz (thermal)",
            nodes=("n1",),
            rank=3,
            certain=True,
        ),
    ),
    leaves=True,
)


def test_all_measurements_and_what_is_slow() -> None:
    assert speed_lines(CHECK) == [
        "Speed before launch 3: 4 ranks on 2 nodes, measured in 7 s, in two rounds",
        "  GPU               NVIDIA H100 80GB HBM3",
        "  matrix products   598 TFLOP/s, lowest 310 TFLOP/s, the plan has 650 TFLOP/s",
        "                    bf16, 8192x8192x8192",
        "  copies in memory  2,900 GB/s, lowest 2,900 GB/s",
        "  SM clock          1,755 MHz, lowest 1,005 MHz of 1,980 MHz",
        "  held down by      thermal: 1 rank",
        "  free memory       79.0 GiB at least",
        "  network of NCCL   IB: 3 ranks",
        "  axis tp 2         196 GB/s, lowest 41.5 GB/s, the plan has 360 GB/s",
        "                    all_reduce of 64.0 MiB",
        "  CPUs              rank 2 on node n1 runs on CPUs of NUMA node 1, its GPU is on",
        "                    node 0",
        "  slow              rank 3 on n1: matrix products at 310 TFLOP/s, 52% of its",
        "                    peers' 600 TFLOP/s; clock 1,005 of 1,980 MHz (thermal)",
        "  not measured      axis pp: the limit of 60 s",
        "  then              the launch ended, so that these nodes are replaced",
    ]


def test_nothing_is_slow() -> None:
    lines = speed_lines(CHECK.model_copy(update={"slow": (), "leaves": False, "rounds": 1}))
    assert lines[0] == "Speed before launch 3: 4 ranks on 2 nodes, measured in 7 s"
    assert "  slow              nothing" in lines
    assert max(map(len, speed_lines(CHECK))) <= 80
