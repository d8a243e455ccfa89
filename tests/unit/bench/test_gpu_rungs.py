"""The rungs of `make gpu`: refusals for a newcomer, one report, jobs for a profile.

What needs a GPU is given as facts here; nothing in this file has seen one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import driver, environment, one_gpu, report
from bench.gpu import nodes as node_rungs
from bench.gpu.__main__ import FAILED, NOT_RUN, OK, climb, main, rungs
from bench.gpu.facts import GpuNode, MachineFacts
from bench.gpu.links import LinkReport, axes_of, bus_rate, read_network
from bench.gpu.one_gpu import read_tests
from bench.gpu.one_node import link_checks
from bench.gpu.rung import Ended, Found, NotRunError, Rung, Site, failed, not_run, passed
from bench.one_gpu import __main__ as one_gpu_jobs
from bench.one_gpu.__main__ import other_gpu
from bench.one_gpu.jobs import Case
from hpctrain.records.gpu_report import GpuReport, RungCheck, StepTime
from hpctrain.records.software import Library, SoftwareFacts
from hpctrain.records.speed_checks import AxisSpeed, SpeedCheck
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile

ROOT = Path(__file__).resolve().parents[3]
SOFTWARE = SoftwareFacts(
    python="3.12.3",
    torch="2.9.1",
    cuda_build="13.0",
    driver="580.65.06",
    driver_cuda="13.0",
    nccl="2.27.7",
    gpus=("NVIDIA H100 80GB HBM3",) * 8,
    megatron_core="0.16.1",
    transformer_engine=Library(version="2.8.0"),
    attention=("cuDNN", "flash-attn 2.8.3"),
    apex_wgrad=Library(version="0.1"),
    flash_attention=Library(version="2.8.3"),
    triton=Library(version="3.5.0"),
    compiler="/usr/bin/gcc",
    open_files=1048576,
)
MACHINE = MachineFacts(
    driver_loaded=True,
    devices=8,
    software=SOFTWARE,
    memory_bytes=(85_520_809_984,) * 8,
    gpu_nodes=(GpuNode(numa_node=0, near_cpus=56),) * 8,
    cpus=112,
    libraries={"transformers": "5.20.0", "deepspeed": "0.19.8"},
    required_megatron_core="==0.16.1",
)


def machine(**software: Any) -> MachineFacts:
    return MACHINE.model_copy(update={"software": SOFTWARE.model_copy(update=software)})


def by_name(checks: Iterable[RungCheck]) -> dict[str, RungCheck]:
    return {check.name: check for check in checks}


# -- rung 1 ------------------------------------------------------------------------------------


def test_a_good_node_passes_the_first_rung() -> None:
    checks = by_name(driver.judge(MACHINE))
    assert {check.outcome for check in checks.values()} == {"passed"}
    assert checks["GPUs"].detail == "8 x NVIDIA H100 80GB HBM3 with 79.6 GiB"


REFUSALS: dict[str, tuple[MachineFacts, str, str]] = {
    "a login node": (
        MACHINE.model_copy(update={"driver_loaded": False, "devices": 0}),
        "driver",
        "This machine has no NVIDIA driver (/proc/driver/nvidia is missing)",
    ),
    "a job without --gpus": (
        MACHINE.model_copy(update={"devices": 0}),
        "driver",
        "this shell may open no GPU (/dev/nvidia0 is missing)",
    ),
    "no torch": (
        MACHINE.model_copy(update={"software": None, "torch_error": "No module named 'torch'"}),
        "torch",
        "PyTorch cannot be imported: No module named 'torch'",
    ),
    "a wheel for CPUs": (
        machine(torch="2.13.0+cpu", cuda_build=None, driver_cuda=None, nccl=None, gpus=()),
        "CUDA",
        "This PyTorch (2.13.0+cpu) was built for CPUs only",
    ),
    "a driver that is too old": (
        machine(driver="535.183.01", driver_cuda="12.2", gpus=(), gpu_error="too old"),
        "CUDA",
        "The driver 535.183.01 is too old for this PyTorch: it supports CUDA up to 12.2, and 2.9.1 "
        "needs CUDA 13.0",
    ),
    "a GPU that CUDA cannot use": (
        machine(gpus=(), gpu_error="CUDA error 802: system not yet initialized"),
        "GPUs",
        "CUDA's own reason: CUDA error 802: system not yet initialized",
    ),
    "a part of a GPU": (
        machine(gpus=("NVIDIA A100-SXM4-80GB MIG 1g.10gb",)),
        "GPUs",
        "This is a part of a GPU",
    ),
    "a torch without NCCL": (machine(nccl=None), "NCCL", "no NCCL"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_each_refusal_is_a_sentence_with_what_to_do(name: str) -> None:
    facts, check, sentence = REFUSALS[name]
    found = by_name(driver.judge(facts))[check]
    assert found.outcome == "failed"
    assert sentence in found.detail
    assert found.detail[0].isupper() and found.detail.endswith("."), found.detail
    assert "Traceback" not in found.detail


def test_this_machine_is_refused_by_the_command_itself(tmp_path: Path) -> None:
    """No GPU, or one: the command has to say which of the two, with the exit code of it."""
    words = ["--rung", "1", "--directory", str(tmp_path), "--report", str(tmp_path / "r.json")]
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    written = GpuReport.model_validate_json((tmp_path / "r.json").read_text())
    [rung] = written.rungs
    if Path("/proc/driver/nvidia/version").exists():
        assert done.returncode == (OK if rung.outcome == "passed" else FAILED)
        return
    assert done.returncode == FAILED, done.stderr
    assert "FAILED  driver: This machine has no NVIDIA driver" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert rung.outcome == "failed" and written.software[0].torch in done.stdout


# -- rung 2 ------------------------------------------------------------------------------------


def test_a_good_environment_passes_the_second_rung() -> None:
    checks = list(environment.judge(MACHINE, promised=True))
    assert {check.outcome for check in checks} == {"passed"}, checks


ABSENT: dict[str, tuple[MachineFacts, str, str, str]] = {
    "no TransformerEngine": (
        machine(transformer_engine=Library()),
        "TransformerEngine",
        "failed",
        "'transformer-engine[pytorch]'",
    ),
    "a broken TransformerEngine": (
        machine(transformer_engine=Library(error="ImportError: undefined symbol: _ZN3c10")),
        "TransformerEngine",
        "failed",
        "built for another torch or CUDA",
    ),
    "no Apex": (machine(apex_wgrad=Library()), "Apex extension", "passed", "a kernel of their own"),
    "no flash-attn": (machine(flash_attention=Library()), "flash-attn", "passed", "cuDNN"),
    "no triton": (machine(triton=Library()), "triton and C compiler", "failed", "force-reinstall"),
    "no compiler": (machine(compiler=None), "triton and C compiler", "failed", "module load gcc"),
    "no megatron-core": (machine(megatron_core=None), "megatron-core", "failed", "megatron-core=="),
    "few open files": (machine(open_files=1024), "open files", "failed", "about 768 ranks"),
    "far CPUs": (
        MACHINE.model_copy(update={"gpu_nodes": (GpuNode(numa_node=1, near_cpus=0),)}),
        "NUMA nodes of GPUs",
        "failed",
        "block:block",
    ),
}


@pytest.mark.parametrize("name", ABSENT)
def test_each_absence_says_what_it_costs_and_what_to_do(name: str) -> None:
    facts, check, outcome, words = ABSENT[name]
    found = by_name(environment.judge(facts, promised=True))[check]
    assert (found.outcome, words in found.detail) == (outcome, True), found.detail


def test_a_profile_without_transformer_engine_lets_it_be_absent() -> None:
    facts = machine(transformer_engine=Library())
    found = by_name(environment.judge(facts, promised=False))["TransformerEngine"]
    assert found.outcome == "passed" and "no FP8" in found.detail


def test_the_cost_of_an_absence_is_planned_for_the_profile(tmp_path: Path) -> None:
    said = environment.planned_cost("h100x16")
    assert said is not None
    ratio = float(said.split(" takes ")[1].split()[0])
    assert 1.05 < ratio < 5, said
    facts = machine(transformer_engine=Library())
    checks = by_name(environment.judge(facts, promised=True, planned=said))
    assert said in checks["TransformerEngine"].detail
    assert environment.planned_cost("sandbox") is None


# -- climbing ----------------------------------------------------------------------------------


def rung_of(number: int, *checks: RungCheck) -> Rung:
    def run(site: Site, found: Found) -> Iterator[RungCheck]:
        yield from checks

    return Rung(number, f"rung {number}", "a stand-in", "nothing", run)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(directory=tmp_path)


def test_climbing_ends_at_the_first_rung_that_fails(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    chosen = [rung_of(1, passed("a")), rung_of(2, passed("b"), failed("c", "Why.")), rung_of(3)]
    assert climb(chosen, site, path, keep_names=False) == FAILED
    written = GpuReport.model_validate_json(path.read_text())
    assert [(one.number, one.outcome) for one in written.rungs] == [(1, "passed"), (2, "failed")]
    shown = capsys.readouterr().out
    assert "Rung 3" not in shown and "Send back report.json" in shown
    assert climb(chosen[:1], site, path, keep_names=False) == OK


def test_a_rung_without_what_it_needs_is_not_run_and_not_passed(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(site: Site, found: Found) -> Iterator[RungCheck]:
        raise NotRunError("a profile")
        yield passed("never")

    lacking = replace(rung_of(5), run=run)
    assert climb([lacking], site, tmp_path / "r.json", keep_names=False) == NOT_RUN
    assert "needs a profile" in capsys.readouterr().out
    skipped = [rung_of(4, not_run("a", "no TransformerEngine"))]
    assert climb(skipped, site, tmp_path / "r.json", keep_names=False) == NOT_RUN


def test_a_wrong_profile_is_one_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--rung", "5", "--profile", "h100x61", "--directory", str(tmp_path / "d")]
    assert main([*words, "--report", str(tmp_path / "r.json")]) == FAILED
    shown = " ".join(capsys.readouterr().out.split())
    assert "no cluster profile is called `h100x61`" in shown and "did you mean `h100x16`" in shown


def test_rungs_are_numbered_as_documented() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    for rung in rungs():
        assert f"## Rung {rung.number}: {rung.name}" in text, rung


# -- the report --------------------------------------------------------------------------------


def speed(nodes: tuple[str, ...], **more: Any) -> SpeedCheck:
    return SpeedCheck(
        epoch=0,
        time=0.0,
        seconds=1.0,
        nodes=nodes,
        accelerator="cuda",
        precision="bf16",
        product_mnk=(1, 1, 1),
        product_flops_per_second=(1.0,) * len(nodes),
        **more,
    )


def test_names_of_nodes_and_people_are_hidden_unless_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = "/".join(("", "home", "mustermann"))
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(report.getpass, "getuser", lambda: "mustermann")
    monkeypatch.setattr(report.socket, "gethostname", lambda: "login7")
    monkeypatch.setattr(report.socket, "getfqdn", lambda: "login7.example.org")
    text = f"gpu1 died, gpu12 not; {home}/runs by mustermann on login7.example.org"
    found = Found(speed=[speed(("gpu1", "gpu12"))])
    [rung] = [rung_of(1, failed("a", text))]
    path = tmp_path / "r.json"
    site = Site(directory=tmp_path)
    assert climb([replace(rung, run=lambda s, f: _with(f, found, text))], site, path,
                 keep_names=False) == FAILED  # fmt: skip
    sent = path.read_text()
    for name in ("gpu1", "gpu12", "mustermann", "login7", "example.org"):
        assert name not in sent, name
    written = GpuReport.model_validate_json(sent)
    first, second = written.speed[0].nodes
    assert first != second and first.startswith("node-")
    assert f"{first} died, {second} not; ~/runs by user" in written.rungs[0].checks[0].detail
    key = (tmp_path / "names.key").read_text()
    assert key not in sent and (tmp_path / "names.key").stat().st_mode & 0o077 == 0
    again = tmp_path / "kept.json"
    climb([replace(rung, run=lambda s, f: _with(f, found, text))], site, again, keep_names=True)
    assert (
        "gpu12" in again.read_text() and GpuReport.model_validate_json(again.read_text()).names_kept
    )


def _with(found: Found, measured: Found, text: str) -> Iterator[RungCheck]:
    found.speed.extend(measured.speed)
    yield failed("a", text)


def test_rungs_of_several_calls_add_up_and_a_repeated_one_replaces() -> None:
    empty = GpuReport(kind="hpctrain-gpu-report", hpctrain="0")
    site = Site(directory=Path("."), profile="sites/ours.yaml")

    def add(now: GpuReport, number: int, found: Found, emulated: bool = False) -> GpuReport:
        result = report.RungResult(
            number=number, name="x", outcome="passed", time=0, seconds=0, emulated=emulated
        )
        return report.add_rung(now, result, found, site)

    one = add(empty, 3, Found(speed=[speed(("a",))], software=[SOFTWARE]))
    two = add(one, 5, Found(speed=[speed(("a", "b"))], software=[SOFTWARE]))
    again = add(two, 3, Found(speed=[speed(("a",), gpu="new")]))
    assert [rung.number for rung in again.rungs] == [3, 5]
    assert [(check.nodes, check.gpu) for check in again.speed] == [
        (("a", "b"), None),
        (("a",), "new"),
    ]
    assert again.software == (SOFTWARE,) and again.profile == "ours"
    emulated = add(again, 4, Found(), emulated=True)
    assert [rung.number for rung in emulated.rungs] == [4] and emulated.speed == ()


def test_a_file_that_is_no_report_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "thesis.json"
    path.write_text('{"chapter": 1}')
    assert main(["--rung", "1", "--directory", str(tmp_path), "--report", str(path)]) == 2
    assert path.read_text() == '{"chapter": 1}'


# -- rung 3 ------------------------------------------------------------------------------------


def test_skipped_tests_count_as_not_run_with_their_reason(tmp_path: Path) -> None:
    (tmp_path / "t.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase name="test_a[ddp]" time="1.5"/>'
        '<testcase name="test_b" time="0.1"><skipped message="not run: no checkout"/></testcase>'
        '<testcase name="test_c" time="2"><failure message="assert 1 == 2">trace</failure>'
        '</testcase><testcase name="test_d" time="0"><error message="setup">no GPU</error>'
        "</testcase></testsuite></testsuites>"
    )
    found = list(read_tests(tmp_path / "t.xml"))
    assert [(one.name, one.outcome) for one in found] == [
        ("a[ddp]", "passed"),
        ("b", "not_run"),
        ("c", "failed"),
        ("d", "failed"),
    ]
    assert found[1].detail == "not run: no checkout" and "assert 1 == 2" in found[2].detail


def test_small_tests_share_the_gpu_and_the_others_come_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for the GPU would keep the tests that it was given: two programs."""
    started: list[list[str]] = []

    def run_program(words: list[str], *_: Any) -> Ended:
        started.append(words)
        result = next(word for word in words if word.startswith("--junitxml=")).partition("=")[2]
        Path(result).write_text('<testsuite><testcase name="test_a" time="1"/></testsuite>')
        return Ended(0, "", 1.0)

    monkeypatch.setattr(one_gpu, "run_program", run_program)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    checks = list(one_gpu.run_tests(Site(tmp_path)))
    assert [check.outcome for check in checks] == ["passed", "passed"]
    small, alone = started
    assert "-n8" in small and small[small.index("-m", 1) + 1] == "not whole_gpu"
    assert "no:xdist" in alone and alone[alone.index("-m", 1) + 1] == "whole_gpu"
    list(one_gpu.run_tests(replace(Site(tmp_path), emulated=True)))
    assert "-n8" not in started[2], "CPUs in the GPU's place are not shared"


def test_a_card_of_80_gb_gets_no_jobs_of_141_gb() -> None:
    h200 = load_profile(ROOT / "bench/one_gpu/h200x1.yaml").document
    h100 = load_profile(find_profile("h100x16")).document
    memory = 85_520_809_984
    assert other_gpu(h100, memory) is None
    assert "plans for 140 GiB: give the profile of this machine" in str(other_gpu(h200, memory))
    assert "no usable GPU" in str(other_gpu(h100, None))


def test_a_job_that_is_interrupted_loses_no_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(case: Case, profile: str, steps: list[StepTime]) -> str:
        if steps:
            raise KeyboardInterrupt
        seconds = dict(planned_seconds=1.0, measured_seconds=1.1)
        steps.append(StepTime(name=case.name, spec="{}", gpus=1, nodes=1, **seconds))
        return case.name

    result = tmp_path / "jobs.json"
    profile = str(ROOT / "bench/one_gpu/h200x1.yaml")
    monkeypatch.setattr(one_gpu_jobs, "compared", compared)
    monkeypatch.setattr(one_gpu_jobs, "memory_of_gpu", lambda: 150_109_880_320)
    monkeypatch.setattr(sys, "argv", ["x", "--profile", profile, "--result", str(result)])
    with pytest.raises(KeyboardInterrupt):
        one_gpu_jobs.main()
    assert [step["name"] for step in json.loads(result.read_text())] == ["gpt-1.3b ddp"]


# -- rungs 4 and 5 -----------------------------------------------------------------------------


def test_bus_rates_are_those_of_nccl_tests() -> None:
    """nccl-tests, doc/PERFORMANCE.md: factors 2(n-1)/n, (n-1)/n and 1."""
    assert bus_rate("all_reduce", 8, 2**20, 0.5) == pytest.approx(2 * 2**20 * 1.75)
    assert bus_rate("all_gather", 8, 2**20, 0.5) == pytest.approx(2 * 2**20 * 0.875)
    assert bus_rate("send_recv", 8, 2**20, 0.5) == pytest.approx(2 * 2**20)


def test_groups_of_the_axes_cover_all_ranks_once() -> None:
    axes = {(axis.name, axis.size): axis for axis in axes_of(16, 8)}
    assert set(axes) == {("tp", 2), ("tp", 4), ("tp", 8), ("dp", 2), ("pp", 2)}
    assert axes["tp", 8].group_of(11) == tuple(range(8, 16))
    assert axes["dp", 2].group_of(11) == (3, 11), "the same GPU of both nodes"
    for axis in axes.values():
        groups = {axis.group_of(rank) for rank in range(16)}
        assert sorted(rank for group in groups for rank in group) == list(range(16))
    assert [(axis.name, axis.size) for axis in axes_of(1, 1)] == []
    assert ("tp", 6) in {(axis.name, axis.size) for axis in axes_of(6, 6)}


# Lines of NCCL 2.27, INFO of INIT and NET.
IB_LOG = """\
gpu1:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.0.1<0>
gpu1:1:1 [0] NCCL INFO Using network IB
gpu1:1:1 [0] NCCL INFO NVLS multicast support is available on dev 0
"""
TCP_LOG = """\
gpu1:1:1 [0] NCCL INFO NET/IB : No device found.
gpu1:1:1 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
gpu1:1:1 [0] NCCL INFO Using network Socket
"""


def test_the_network_is_read_from_nccl_s_own_lines() -> None:
    network, cards, sharp = read_network(IB_LOG)
    assert (network, sharp) == ("IB", "available")
    assert cards == "NET/IB : [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]"
    assert read_network(TCP_LOG)[0] == "Socket"
    assert read_network("") == ("", "", None)


def link_report(network: str, rate: float) -> LinkReport:
    axis = AxisSpeed(
        axis="dp",
        operation="all_gather",
        ranks_per_group=2,
        message_bytes=2**28,
        groups=(0, 1, 0, 1),
        bus_bytes_per_second=(rate, rate, rate / 2, rate),
    )
    check = speed(("gpu1", "gpu1", "gpu2", "gpu2"), networks=(network,) * 4, axes=(axis,))
    return LinkReport(check=check, open_files=40, open_files_limit=4096, far=(3,))


@pytest.fixture
def h100() -> ClusterProfile:
    return load_profile(find_profile("h100x16")).document


def test_a_fall_back_to_tcp_fails_the_rung(h100: ClusterProfile) -> None:
    bad = node_rungs.network_check(link_report("Socket", 1e9), h100)
    assert bad.outcome == "failed" and "NCCL fell back to TCP" in bad.detail
    assert node_rungs.network_check(link_report("IB", 4e10), h100).outcome == "passed"
    ethernet = h100.model_copy(
        update={"network": h100.network.model_copy(update={"fabric": "ethernet"})}
    )
    assert node_rungs.network_check(link_report("Socket", 1e9), ethernet).outcome == "passed"


def test_the_slowest_rank_counts_against_the_cards(h100: ClusterProfile) -> None:
    slow = node_rungs.rate_check(link_report("IB", 4e10), h100)
    assert slow.outcome == "failed" and "20.00 GB/s per GPU on the slowest rank" in slow.detail
    assert node_rungs.rate_check(link_report("IB", 9e10), h100).outcome == "passed"
    checks = by_name(link_checks(link_report("IB", 4e10), 1.0))
    assert checks["all_gather of 2 ranks (dp)"].detail.startswith("20.0 GB/s")
    assert checks["placement"].outcome == "failed" and "ranks 3" in checks["placement"].detail


@pytest.mark.parametrize("name", ["h100x16", "a100x64", "gb200nvl72", "sandbox"])
def test_the_job_of_two_nodes_is_a_script_of_the_profile(name: str, tmp_path: Path) -> None:
    profile = load_profile(find_profile(name)).document
    site = Site(directory=tmp_path, profile=name)
    script = node_rungs.write_link_job(site, profile, tmp_path / "job")
    text = script.read_text()
    assert (
        "#SBATCH --nodes=2\n" in text
        and f"--partition={profile.slurm.partition(None).name}" in text
    )  # type: ignore[union-attr]
    assert f"--ntasks={2 * profile.gpu.per_node}" in text
    assert "-m bench.gpu.links" in text and "hpctrain.train" not in text
    assert "hpctrain.supervise" not in text and "train.json" not in text
    assert ("--emulate-gpu" in text) == (name == "sandbox")
    for variable in profile.environment:
        assert f"export {variable.name}=" in text
    assert (tmp_path / "job/bench/gpu/links.py").is_file(), "the job needs no checkout"
    shell = subprocess.run(
        [str(Path(sys.executable).with_name("shellcheck")), "-s", "bash", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shell.returncode == 0, shell.stdout


def test_the_program_of_the_job_runs_without_the_checkout(tmp_path: Path) -> None:
    """On a compute node there is an installed hpctrain and the run's directory, no more."""
    site = Site(directory=tmp_path, profile="sandbox")
    profile = load_profile(find_profile("sandbox")).document
    node_rungs.write_link_job(site, profile, tmp_path / "job")
    done = subprocess.run(
        [sys.executable, "-c", "import bench, bench.gpu.links; print(bench.__file__)"],
        cwd=tmp_path / "job",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path / "job"))


def test_fewer_nodes_than_the_rung_wants_is_not_run(tmp_path: Path) -> None:
    site = Site(directory=tmp_path, profile="a100x1")
    with pytest.raises(NotRunError, match="2 nodes; profile a100x1 has 1"):
        list(node_rungs.run_two_nodes(site, Found()))


def test_the_run_of_eight_nodes_is_the_user_s_with_fifty_steps() -> None:
    changes = node_rungs.run_overrides(ROOT / "examples/gpt175b.yaml", 64)
    assert "resources.gpus=64" in changes and "budget.steps=50" in changes
    batch = next(one for one in changes if one.startswith("batch.global="))
    assert batch == "batch.global=192", "1536 samples on 512 GPUs are 192 on 64"


def test_measurements_of_the_rungs_are_a_calibration(tmp_path: Path) -> None:
    """The report as the rungs write it, with plausible rates in the place of a GPU's."""
    from hpctrain.site.calibrate import calibrate

    name = "NVIDIA H100 80GB HBM3"
    measured = speed(("gpu1",), gpu=name, total_memory_bytes=(85_520_809_984,)).model_copy(
        update={"product_mnk": (8192, 8192, 8192), "product_flops_per_second": (7.1e14,)}
    )
    result = report.RungResult(number=3, name="one GPU", outcome="passed", time=0, seconds=0)
    site = Site(directory=tmp_path, profile="h100x16")
    empty = GpuReport(kind="hpctrain-gpu-report", hpctrain="0")
    written = report.add_rung(empty, result, Found(speed=[measured]), site)
    path = tmp_path / "gpu-report.json"
    report.write_report(path, written, tmp_path, keep_names=False)
    done = calibrate(path, output=tmp_path / "ours.calibration.yaml")
    assert done.profile == "h100x16" and done.site.product_efficiency is not None
    assert json.loads(path.read_text())["kind"] == "hpctrain-gpu-report"
