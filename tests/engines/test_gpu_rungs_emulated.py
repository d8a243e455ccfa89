"""The rungs of one GPU and one node, with CPUs and gloo in the place of GPUs and NCCL.

It shows that the rungs' own code works and finds what it is for; nothing about a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import one_gpu, one_node, serving_kernels
from bench.gpu.one_node import LAYOUTS, Layout
from bench.gpu.rung import Found, NotRunError, Site, run_program
from bench.gpu.trials import LLAMA, TrialRun
from hpctrain.records.gpu_report import RungCheck

pytestmark = pytest.mark.nightly(
    "the code of the rungs of `make gpu`, which nobody runs without a GPU"
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(directory=tmp_path, gpus=2, emulated=True)


def layouts(monkeypatch: pytest.MonkeyPatch, *chosen: Layout) -> None:
    monkeypatch.setattr(one_node, "LAYOUTS", chosen)


def named(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


def outcomes(checks: Iterator[RungCheck]) -> dict[str, tuple[str, str]]:
    return {check.name: (check.outcome, check.detail) for check in checks}


@pytest.mark.variant("test_layout_equals_one_process")
def test_layouts_of_one_node_equal_one_gpu(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    layouts(monkeypatch, named("tp2 sp"), named("ep2"), named("cp2"), named("tp4 sp"))
    found = outcomes(one_node.compare_layouts(site))
    assert found["tp2 sp against one GPU"][0] == "passed", found
    assert found["ep2 against one GPU"][0] == "passed", found
    assert found["cp2 against one GPU"] == (
        "not_run",
        "emulated on CPU: TransformerEngine has no kernels for CPUs",
    )
    assert found["tp4 sp against one GPU"] == ("not_run", "needs 4 GPUs")


@pytest.mark.variant("test_links_and_rates_are_measured_and_marked_as_a_cpu_s")
def test_a_layout_that_trains_another_model_fails(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other initial weights stand for whatever a layout may compute wrongly; then a crash."""
    other = Layout("other weights", LLAMA, dict(data_parallel_size=2, seed=4321))
    crash = Layout("crash", LLAMA, dict(data_parallel_size=2, pipeline_layer_split=((3,),)))
    layouts(monkeypatch, other, crash)
    found = outcomes(one_node.compare_layouts(site))
    assert found["other weights against one GPU"][0] == "failed"
    assert "losses differ by at most" in found["other weights against one GPU"][1]
    assert found["crash against one GPU"][0] == "failed"
    assert "rank 0 ends with" in found["crash against one GPU"][1]


@pytest.mark.variant("test_links_and_rates_are_measured_and_marked_as_a_cpu_s")
def test_a_killed_rank_is_resumed_bit_by_bit(site: Site) -> None:
    done = one_node.kill_and_resume(site)
    assert done.outcome == "passed", done.detail
    assert "equal bit by bit" in done.detail


@pytest.mark.variant("test_links_and_rates_are_measured_and_marked_as_a_cpu_s")
def test_a_resume_that_is_not_exact_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrialRun.exact.fget
    assert real is not None

    def exact(self: TrialRun) -> dict[int, Any]:
        found = real(self)
        if self.run.directory.name == "resumed":
            last = max(found)
            found[last] = ("0x1.0p+1", found[last][1])
        return found

    monkeypatch.setattr(TrialRun, "exact", property(exact))
    done = one_node.kill_and_resume(site)
    assert done.outcome == "failed" and "has another loss or norm" in done.detail


def test_links_and_rates_are_measured_and_marked_as_a_cpu_s(site: Site) -> None:
    found = Found()
    links = outcomes(one_node.measure_links(site, found))
    assert set(links) == {
        "all_reduce of 2 ranks (tp)",
        "all_gather of 2 ranks (tp)",
        "send_recv of 2 ranks (pp)",
    }, links
    [check] = found.speed
    assert check.accelerator == "cpu" and len(check.nodes) == 2
    assert all(rate and rate > 0 for axis in check.axes for rate in axis.bus_bytes_per_second)
    assert one_gpu.measure_rates(site, found).outcome == "passed"
    assert found.kernels[0].gpu is None and found.speed[1].accelerator == "cpu"
    rates = (found.kernels[0].stream_bytes_per_second, found.kernels[0].attention_flops_per_second)
    assert all(rate and rate > 0 for rate in (*rates, *found.speed[1].product_flops_per_second))


def test_kernels_of_a_server_are_measured_and_counted(tmp_path: Path) -> None:
    """On a CPU, small; what it has no kernel for is recorded with the reason."""
    bench = serving_kernels.Bench(torch.device("cpu"), serving_kernels.CPU_SIZES)
    first = {name: list(islice(part(bench), 3)) for name, part in serving_kernels.PARTS.items()}
    for kernel in chain.from_iterable(first.values()):
        assert (kernel.seconds or 0) > 0 or kernel.error, kernel
    m, n, k = first["bf16"][1].shape
    assert m == 8 and first["bf16"][1].flops == 2 * m * n * k
    assert first["bf16"][1].moved_bytes == 2 * (m * k + n * k + m * n)
    cudnn = first["decoding"][1]
    assert cudnn.seconds is None and cudnn.error and cudnn.name.startswith("cudnn")
    result = tmp_path / "kernels.json"
    words = ["-m", "bench.gpu.serving_kernels", str(result), "--emulate-gpu", "--only=launches"]
    assert run_program(words, 120.0).output == "4 kernels, 0 of them cannot be run here\n"
    document = json.loads(result.read_text())
    assert document["gpu"] is None and len(document["kernels"]) == 4


@pytest.mark.variant("test_links_and_rates_are_measured_and_marked_as_a_cpu_s")
def test_tests_of_one_gpu_are_all_counted_skipped_ones_too(site: Site) -> None:
    """One test that a CPU can take part in, and those that it cannot."""
    words = ("-k", "(asked_to_leave and megatron) or assertion_in_a_kernel or that_is_full")
    found = outcomes(one_gpu.run_tests(site, *words))
    assert found.pop("a_run_asked_to_leave_saves_its_last_step[megatron]")[0] == "passed", found
    assert len(found) == 5
    assert set(found.values()) == {("not_run", "emulated on CPU: needs a real GPU")}


def test_one_gpu_is_no_node(site: Site) -> None:
    with pytest.raises(NotRunError, match="GPUS=8"):
        list(one_node.run(replace(site, gpus=1), Found()))
