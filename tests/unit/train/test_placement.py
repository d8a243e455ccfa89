"""Ranks are bound to CPUs near their GPUs, read from files as Linux and NVIDIA write them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpctrain.train.placement import far_cpus, parse_cpu_list, place_rank, visible_gpus

# A node with two sockets: GPUs 0 and 1 on NUMA node 0, GPUs 2 and 3 on NUMA node 1.
ADDRESSES = ("0000:07:00.0", "0000:0F:00.0", "0000:87:00.0", "0000:8F:00.0")


@pytest.fixture
def node(tmp_path: Path) -> Path:
    own = sorted(os.sched_getaffinity(0))
    (tmp_path / "dev").mkdir()
    for number, address in enumerate(ADDRESSES):
        directory = tmp_path / "proc/driver/nvidia/gpus" / address
        directory.mkdir(parents=True)
        text = (
            f"Model: \t\t NVIDIA A100\nGPU UUID: \t GPU-{number}abc\n"
            f"Bus Location: \t {address}\nDevice Minor: \t {number}\n"
        )
        (directory / "information").write_text(text)
        (tmp_path / f"dev/nvidia{number}").touch()
        device = tmp_path / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{number // 2}\n")
    for number, cpus in enumerate((f"{own[0]}", f"{own[-1]},4000-4010")):
        directory = tmp_path / f"sys/devices/system/node/node{number}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _mask_is_restored() -> object:
    own = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, own)


@pytest.mark.parametrize(("local_rank", "numa_node"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_a_rank_goes_to_the_numa_node_of_its_gpu(
    node: Path, local_rank: int, numa_node: int
) -> None:
    own, preferred = sorted(os.sched_getaffinity(0)), []
    assert place_rank(local_rank, {}, node, preferred.append) == "near"
    assert os.sched_getaffinity(0) == {own[0] if numa_node == 0 else own[-1]}
    assert preferred == [numa_node]


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-0abc", "GPU-1abc", "GPU-2abc", "GPU-3abc"]),
        ("2", ["GPU-2abc"]),
        ("3,0", ["GPU-3abc", "GPU-0abc"]),
        ("GPU-1,GPU-3abc", ["GPU-1abc", "GPU-3abc"]),
        ("0,7,1", ["GPU-0abc"]),  # CUDA stops at the first that it does not know
        ("MIG-55", []),
        ("", []),
    ],
)
def test_gpus_are_those_that_cuda_shows(node: Path, visible: str | None, uuids: list[str]) -> None:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert [gpu.uuid for gpu in visible_gpus(environment, node)] == uuids


def test_with_one_visible_gpu_every_local_rank_has_that_one(node: Path) -> None:
    environment, preferred = {"CUDA_VISIBLE_DEVICES": "3"}, []
    assert place_rank(2, environment, node, preferred.append) == "near"
    assert preferred == [1]


def test_a_gpu_that_a_cgroup_withholds_is_not_counted(node: Path) -> None:
    (node / "dev/nvidia0").unlink()
    assert [gpu.uuid for gpu in visible_gpus({}, node)] == ["GPU-1abc", "GPU-2abc", "GPU-3abc"]


def test_a_mask_elsewhere_is_left_alone(node: Path) -> None:
    (node / "sys/devices/system/node/node0/cpulist").write_text("4000-4010\n")
    own, preferred = os.sched_getaffinity(0), []
    assert place_rank(0, {}, node, preferred.append) == "far"
    assert os.sched_getaffinity(0) == own and preferred == []
    assert far_cpus(0, {}, node) == "CPUs of NUMA node 1, its GPU is on node 0"
    (node / "sys/devices/system/node/node1/cpulist").write_text("4000-4010\n")
    assert far_cpus(0, {}, node) == "CPUs of no NUMA node, its GPU is on node 0"


@pytest.mark.parametrize("local_rank", [0, 3])
def test_a_rank_that_was_placed_is_not_far(node: Path, local_rank: int) -> None:
    assert place_rank(local_rank, {}, node, lambda _: None) == "near"
    assert far_cpus(local_rank, {}, node) == ""
    other, own = ("2", 0) if local_rank == 0 else ("0", 1)
    words = f"CPUs of NUMA node {own}, its GPU is on node {1 - own}"
    assert far_cpus(0, {"CUDA_VISIBLE_DEVICES": other}, node) == words


def test_nothing_is_far_where_nothing_is_known(node: Path, tmp_path: Path) -> None:
    assert far_cpus(0, {}, tmp_path / "empty") == ""
    assert far_cpus(0, {"CUDA_VISIBLE_DEVICES": "MIG-55"}, node) == ""
    (node / "sys/bus/pci/devices" / ADDRESSES[0].lower() / "numa_node").write_text("-1\n")
    assert far_cpus(0, {}, node) == ""


def test_without_a_driver_or_numa_nothing_is_known(node: Path, tmp_path: Path) -> None:
    assert place_rank(0, {}, tmp_path / "empty") == "unknown"
    (node / "sys/bus/pci/devices/0000:07:00.0/numa_node").write_text("-1\n")
    assert place_rank(0, {}, node) == "unknown"


def test_the_memory_policy_is_set_for_real(node: Path) -> None:
    """Of this machine, in a child: its one NUMA node is preferred, as numa_maps shows."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            place_rank(0, {}, node)
            os.write(write, Path("/proc/self/numa_maps").read_bytes()[:200])
        finally:
            os._exit(0)
    os.close(write)
    text = os.read(read, 200).decode()
    os.waitpid(pid, 0)
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA")
    assert "prefer" in text


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cpu_list("\n") == set()
