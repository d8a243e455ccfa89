"""Measurements of all ranks are compared, and what NVIDIA's driver and NCCL report."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from hpctrain.records.speed_checks import AxisSpeed, SlowPart, SpeedCheck
from hpctrain.train.slow_parts import (
    Suspects,
    Thresholds,
    better_of,
    slow_parts,
    suspects_of,
)
from hpctrain.train.speed_check import GpuState, NetworkLog, open_network_log, read_gpu_state

# -- Measurements of all ranks are compared: a table of cases, and what each names ---------------


LIMITS = Thresholds(slow_gpu=0.75, slow_link=0.5, fabric="infiniband")
GB, TFLOP = 1e9, 1e12
# eight nodes with two ranks each
NODES = tuple(f"n{rank // 2}" for rank in range(16))


def check(**fields: Any) -> SpeedCheck:
    usual: dict[str, Any] = dict(
        epoch=3,
        time=1.0,
        seconds=7.0,
        nodes=NODES,
        gpu="NVIDIA H100 80GB HBM3",
        accelerator="cuda",
        precision="bf16",
        product_mnk=(8192, 8192, 8192),
        product_flops_per_second=(600 * TFLOP,) * 16,
        twice=("gpu", "tp", "dp"),
    )
    return SpeedCheck(**{**usual, **fields})


def rates(usual: float, **others: float | None) -> tuple[float | None, ...]:
    """By rank: `r3=1.0` is that of rank 3."""
    return tuple(others.get(f"r{rank}", usual) for rank in range(16))


def axis(bus: tuple[float | None, ...], groups: Any = None, **fields: Any) -> AxisSpeed:
    """Two groups of eight ranks unless `groups` has others."""
    groups = groups or tuple(rank % 2 for rank in range(16))
    size = groups.count(groups[0])
    usual: dict[str, Any] = dict(
        axis="dp", operation="all_reduce", ranks_per_group=size, message_bytes=2**28, groups=groups
    )
    return AxisSpeed(**{**usual, "bus_bytes_per_second": bus, **fields})


def named(slow: tuple[SlowPart, ...]) -> list[tuple[str, tuple[str, ...], bool]]:
    return [(part.part, part.nodes, part.certain) for part in slow]


T = TFLOP
PAIRS = tuple(4 * rank for rank in range(4) for _ in range(4))  # four groups of four ranks
CASES: dict[str, tuple[dict[str, Any], list[tuple[str, tuple[str, ...], bool]]]] = {
    "all alike": ({}, []),
    "the spread of one kind of GPU": (
        dict(product_flops_per_second=rates(600 * T, r3=480 * T)),
        [],
    ),
    "one slow GPU": (
        dict(product_flops_per_second=rates(600 * T, r3=400 * T)),
        [("gpu", ("n1",), True)],
    ),
    "two slow GPUs on one node": (
        dict(product_flops_per_second=rates(600 * T, r2=410 * T, r3=400 * T)),
        [("gpu", ("n1",), True)] * 2,
    ),
    "slow GPUs on many nodes are no node's fault": (
        dict(product_flops_per_second=rates(600 * T, r0=300 * T, r2=300 * T, r4=300 * T)),
        [("gpu", ("n0",), False), ("gpu", ("n1",), False), ("gpu", ("n2",), False)],
    ),
    "all slow against the plan": (
        dict(product_flops_per_second=rates(300 * T), expected_flops_per_second=700 * T),
        [("gpu", (), False)],
    ),
    "missing measurements": (
        dict(product_flops_per_second=rates(600 * T, r3=None), axes=(axis((None,) * 16),)),
        [],
    ),
    "nothing was measured": (dict(product_flops_per_second=(None,) * 16), []),
    "slow memory": (
        dict(copy_bytes_per_second=rates(2900 * GB, r5=1400 * GB)),
        [("gpu", ("n2",), True)],
    ),
    "memory that another process holds": (
        dict(free_memory_bytes=tuple(2**30 * (20 if rank == 7 else 79) for rank in range(16))),
        [("memory", ("n3",), True)],
    ),
    "contexts differ a little": (
        dict(free_memory_bytes=tuple(2**30 * 79 - 2**28 * (rank == 7) for rank in range(16))),
        [],
    ),
    "a slow group inside one node": (
        dict(
            axes=(
                axis(
                    rates(350 * GB, r6=120 * GB, r7=120 * GB),
                    groups=tuple(rank // 2 * 2 for rank in range(16)),
                    axis="tp",
                ),
            )
        ),
        [("link", ("n3",), True)],
    ),
    "a slow group over nodes, nobody stands out": (
        dict(
            axes=(
                axis(
                    tuple((10 if rank < 4 else 40) * GB for rank in range(16)),
                    groups=PAIRS,
                    best_pair_bytes_per_second=rates(40 * GB),
                ),
            )
        ),
        [("link", ("n0", "n1"), False)],
    ),
    "one rank's link, shown by its pairs": (
        dict(
            axes=(
                axis(
                    tuple((10 if rank % 2 else 40) * GB for rank in range(16)),
                    expected_bytes_per_second=42 * GB,
                    best_pair_bytes_per_second=rates(45 * GB, r9=9 * GB),
                ),
            )
        ),
        [("link", ("n4",), True)],
    ),
    "all links below the plan": (
        dict(
            axes=(
                axis(
                    rates(12 * GB),
                    expected_bytes_per_second=42 * GB,
                    best_pair_bytes_per_second=rates(14 * GB),
                ),
            )
        ),
        [("link", (), False)],
    ),
    "all nodes use TCP": (dict(networks=("Socket",) * 16), [("network", (), False)]),
    "one node uses TCP": (
        dict(networks=tuple("Socket" if n == "n5" else "IB" for n in NODES)),
        [("network", ("n5",), True)],
    ),
    "an unknown network": (dict(networks=("",) * 16), []),
    "plugins have other names": (dict(networks=("IBext_v8",) * 16), []),
}


@pytest.mark.parametrize(("fields", "expected"), CASES.values(), ids=CASES)
def test_what_is_named(
    fields: dict[str, Any], expected: list[tuple[str, tuple[str, ...], bool]]
) -> None:
    assert named(slow_parts(check(**fields), LIMITS)) == expected


def test_a_slow_gpu_is_described_with_its_clock() -> None:
    clocks = rates(1980e6, r3=1005e6)
    slow = slow_parts(
        check(
            product_flops_per_second=rates(600 * T, r3=310 * T),
            clock_hz=clocks,
            highest_clock_hz=rates(1980e6),
            slowdowns=tuple("thermal" if rank == 3 else "" for rank in range(16)),
        ),
        LIMITS,
    )
    assert [(part.rank, round(part.share or 0, 2)) for part in slow] == [(3, 0.52)]
    assert slow[0].message == (
        "rank 3 on n1: matrix products at 310 TFLOP/s, 52% of its peers' 600 TFLOP/s; "
        "clock 1,005 of 1,980 MHz (thermal)"
    )


def test_of_two_ranks_the_slower_one_is_slow() -> None:
    two = check(nodes=("n0", "n1"), product_flops_per_second=(600 * T, 300 * T))
    assert named(slow_parts(two, LIMITS)) == [("gpu", ("n1",), True)]


def test_tcp_is_right_on_ethernet_and_inside_a_node() -> None:
    tcp = check(networks=("Socket",) * 16)
    assert slow_parts(tcp, Thresholds(0.75, 0.5, "ethernet")) == ()
    one = check(nodes=("n0",) * 16, networks=("Socket",) * 16)
    assert slow_parts(one, LIMITS) == ()


def test_one_noisy_measurement_is_measured_again_and_forgotten() -> None:
    first = check(
        product_flops_per_second=rates(600 * T, r3=200 * T),
        axes=(axis(tuple((5 if rank < 4 else 40) * GB for rank in range(16)), groups=PAIRS),),
    )
    assert suspects_of(first, LIMITS) == Suspects(gpus=True, axes=("dp",))
    assert slow_parts(first, LIMITS), "without a second round both would be named"
    again = check(
        product_flops_per_second=rates(590 * T),
        axes=(axis(rates(39 * GB), groups=PAIRS, best_pair_bytes_per_second=rates(41 * GB)),),
    )
    better = better_of(first, again)
    assert better.rounds == 2 and slow_parts(better, LIMITS) == ()
    assert better.product_flops_per_second == rates(600 * T, r3=590 * T)
    assert better.axes[0].bus_bytes_per_second[0] == 39 * GB
    assert better.axes[0].best_pair_bytes_per_second == rates(41 * GB)


def test_what_is_slow_twice_stays_slow() -> None:
    slow = check(product_flops_per_second=rates(600 * T, r3=200 * T), twice=())
    better = better_of(slow, slow)
    assert better.twice == ("gpu",)
    assert named(slow_parts(better, LIMITS)) == [("gpu", ("n1",), True)]


def test_what_was_measured_once_blames_no_node() -> None:
    """Time was over before the second round of that part."""
    links = tuple(rank // 2 * 2 for rank in range(16))
    slow = check(
        product_flops_per_second=rates(600 * T, r3=200 * T),
        axes=(axis(rates(350 * GB, r6=120 * GB, r7=120 * GB), groups=links, axis="tp"),),
        twice=(),
    )
    nothing = check(product_flops_per_second=(None,) * 16, axes=(), twice=())
    links_again = nothing.model_copy(update={"axes": slow.axes})
    gpu, link = ("gpu", ("n1",)), ("link", ("n3",))
    assert set(named(slow_parts(better_of(slow, nothing), LIMITS))) == {
        (*gpu, False),
        (*link, False),
    }
    assert named(slow_parts(better_of(slow, links_again), LIMITS)) == [(*link, True), (*gpu, False)]


def test_a_pipeline_measures_pairs_in_its_first_round_which_blame_no_node() -> None:
    pairs = rates(45 * GB, r9=9 * GB)
    bus = tuple((9 if rank % 2 else 40) * GB for rank in range(16))
    pipeline = axis(
        bus, axis="pp", expected_bytes_per_second=42 * GB, best_pair_bytes_per_second=pairs
    )
    once = check(axes=(pipeline,), twice=())
    assert named(slow_parts(once, LIMITS)) == [("link", ("n4",), False)]
    assert named(slow_parts(better_of(once, once), LIMITS)) == [("link", ("n4",), True)]


def test_nothing_is_suspected_without_a_reason() -> None:
    assert not suspects_of(check(axes=(axis(rates(40 * GB)),)), LIMITS)


# -- What the driver says about a GPU. There is no GPU here: NVML is a stand-in with its calls ---


class Nvml:
    """The calls of libnvidia-ml, by their C signatures; `mask` holds the clock down."""

    def __init__(self, mask: int = 0, known: str = "GPU-5f3a", works: bool = True) -> None:
        self.mask, self.known, self.works = mask, known, works

    def nvmlInit_v2(self) -> int:
        return 0 if self.works else 9  # NVML_ERROR_DRIVER_NOT_LOADED

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        return 0 if name.decode() == self.known else 6  # NVML_ERROR_NOT_FOUND

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        return self._give(value, ctypes.c_uint, 1005, kind == 1)

    def nvmlDeviceGetMaxClockInfo(self, handle: Any, kind: int, value: Any) -> int:
        return self._give(value, ctypes.c_uint, 1980, kind == 1)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, mask: Any) -> int:
        return self._give(mask, ctypes.c_ulonglong, self.mask)

    def _give(self, place: Any, kind: Any, value: int, valid: bool = True) -> int:
        ctypes.cast(place, ctypes.POINTER(kind))[0] = value
        return 0 if valid else 2


def test_clocks_are_in_hz_and_reasons_have_names() -> None:
    state = read_gpu_state("5f3a", Nvml(mask=0x20 | 0x80))
    assert state == GpuState(1.005e9, 1.98e9, "thermal, power brake")


def test_the_limit_of_power_holds_down_every_gpu_at_full_load() -> None:
    assert read_gpu_state("GPU-5f3a", Nvml(mask=0x4 | 0x2 | 0x1)).slowdown == ""


def test_without_an_answer_of_the_driver_nothing_is_known() -> None:
    for library in (Nvml(works=False), Nvml(known="GPU-other"), object()):
        assert read_gpu_state("5f3a", library) == GpuState()
    assert read_gpu_state("5f3a") == GpuState(), "no driver on this machine"


# -- Which network NCCL has chosen, read from a log with the lines of NCCL 2.21 to 2.28 ----------


NEW, OLD = (2, 27, 5), (2, 21, 5)
IB = """\
n1:924:1152 [5] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.
n1:924:1152 [5] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.7<0>
n1:924:1152 [5] NCCL INFO Using network IB
"""
TCP = """\
n1:924:1152 [5] NCCL INFO NET/IB : No device found.
n1:924:1152 [5] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>
n1:924:1152 [5] NCCL INFO Using network Socket
"""
EFA = "n1:924:1152 [5] NCCL INFO Using network AWS Libfabric\n"


def opened(environment: dict[str, str], version: tuple[int, ...] = NEW) -> NetworkLog:
    log = open_network_log(version, environment)
    assert log is not None
    return log


@pytest.mark.parametrize(
    ("text", "network"),
    [(IB, "IB"), (TCP, "Socket"), (EFA, "AWS Libfabric"), (IB + TCP, "Socket"), ("", "")],
)
def test_the_network_of_the_newest_communicator(text: str, network: str) -> None:
    environment: dict[str, str] = {}
    log = opened(environment)
    path = Path(environment["NCCL_DEBUG_FILE"])
    path.write_text(text)
    assert log.read() == network
    log.close()
    assert not path.exists() and log.read() == ""


class Nccl:
    def __init__(self, environment: dict[str, str]) -> None:
        self.environment, self.read_again = environment, dict[str, str]()

    def ncclResetDebugInit(self) -> None:
        self.read_again = dict(self.environment)


def test_the_variables_of_the_site_come_back_and_nccl_reads_them() -> None:
    environment = {"NCCL_DEBUG": "WARN", "PATH": "/bin"}
    nccl = Nccl(environment)
    log = opened(environment)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    assert os.stat(environment["NCCL_DEBUG_FILE"]).st_mode & 0o777 == 0o600
    log.close(nccl)
    assert nccl.read_again == environment == {"NCCL_DEBUG": "WARN", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("environment", "version"),
    [
        ({"NCCL_DEBUG": "INFO"}, NEW),
        ({"NCCL_DEBUG": "trace"}, NEW),
        ({"NCCL_DEBUG_FILE": "/tmp/mine.%h"}, NEW),
        ({"NCCL_DEBUG": "WARN"}, OLD),
    ],
)
def test_no_output_is_taken_from_a_person(
    environment: dict[str, str], version: tuple[int, ...]
) -> None:
    before = dict(environment)
    assert open_network_log(version, environment) is None
    assert environment == before


def test_an_old_nccl_without_output_is_read_and_left_as_it_is() -> None:
    environment: dict[str, str] = {}
    log = opened(environment, OLD)
    nccl = Nccl(environment)
    log.close(nccl)
    assert environment == {} and nccl.read_again == {}
