"""The check before training in `describe`, in at most 80 columns."""

from __future__ import annotations

from hpctrain.records.speed_checks import AxisSpeed, SlowPart, SpeedCheck
from hpctrain.runs.describe import speed_lines

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
