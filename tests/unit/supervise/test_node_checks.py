"""The checks of one node, on this machine and beside an acting nvidia-smi."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.supervise import preflight
from hpctrain.supervise.preflight import (
    NodeReport,
    check_directory,
    check_gpus,
    check_kernel,
    check_ports,
    check_shared_memory,
    select_lines,
    time_of,
)

BOOT = 1_000_000_000.0
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


# -- storage and memory ----------------------------------------------------------------------


def test_a_directory_that_works(tmp_path: Path) -> None:
    report = NodeReport()
    check_directory(report, tmp_path, "n1")
    assert report.problems == []
    assert isinstance(report.facts["free_bytes"], int) and report.facts["free_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_gone_or_full(tmp_path: Path) -> None:
    report = NodeReport()
    check_directory(report, tmp_path / "gone", "n1")
    check_directory(report, Path("/proc"), "n1")
    texts = [fault.text for fault in report.problems]
    assert "[Errno 2] No such file" in texts[0] and "cannot write into /proc" in texts[1]
    assert not any(fault.hard for fault in report.problems)


def test_the_rename_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / ".preflight-n1.done").mkdir()
    report = NodeReport()
    check_directory(report, tmp_path, "n1")
    assert "cannot write" in report.problems[0].text
    assert [path.name for path in tmp_path.iterdir()] == [".preflight-n1.done"]


@pytest.mark.parametrize(
    ("state", "in_seconds", "words"),
    [
        ("running", None, ""),
        ("degraded", None, ""),
        ("stopping", None, "the machine is being shut down"),
        ("running", 300, "a shutdown of the machine is scheduled within minutes"),
        ("running", 86400, ""),
    ],
)
def test_a_machine_that_shuts_down(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    state: str,
    in_seconds: int | None,
    words: str,
) -> None:
    """The files and the word of systemd, which is not on every machine."""
    plan, program = tmp_path / "scheduled", tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\necho {state}\n[ {state} = running ]\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(preflight, "_SYSTEMD", tmp_path)
    monkeypatch.setattr(preflight, "_SCHEDULED_SHUTDOWN", plan)
    if in_seconds is not None:
        at_usec = int((time.time() + in_seconds) * 1e6)
        plan.write_text(f"USEC={at_usec}\nWARN_WALL=1\nMODE=reboot\n")
    report = NodeReport()
    preflight.check_shutdown(report, 300.0)
    assert [problem.text for problem in report.problems] == ([words] if words else [])
    monkeypatch.setattr(preflight, "_SYSTEMD", tmp_path / "absent")
    elsewhere = NodeReport()
    preflight.check_shutdown(elsewhere, 4.0)
    assert elsewhere.problems == []


def test_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report = NodeReport()
    check_shared_memory(report)
    assert report.problems == []
    monkeypatch.setattr(preflight, "_LEAST_SHARED_BYTES", 2**62)
    check_shared_memory(report)
    assert "MiB are free in /dev/shm" in report.problems[0].text
    monkeypatch.setattr(preflight, "_SHARED_MEMORY", tmp_path / "none")
    check_shared_memory(report)
    assert len(report.problems) == 1


# -- GPUs ------------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An acting nvidia-smi; it prints what the files `gpu` and `rows` hold."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    case = f'case "$1" in --query-gpu=*) cat {directory}/gpu;; *) cat {directory}/rows;; esac'
    program(directory / "nvidia-smi", case)
    (directory / "gpu").write_text("GPU-a, 0, No\nGPU-b, 0, No\n")
    (directory / "rows").write_text("GPU-a, No, No\nGPU-b, No, No\n")
    return directory


def gpus(expected: int = 2) -> NodeReport:
    report = NodeReport()
    check_gpus(report, expected, 4.0)
    return report


def test_healthy_gpus(smi: Path) -> None:
    report = gpus()
    assert (report.problems, report.facts) == ([], {"gpus": ["GPU-a", "GPU-b"]})


def test_a_missing_gpu_is_broken_hardware(smi: Path) -> None:
    (fault,) = gpus(expected=8).problems
    assert (fault.text, fault.hard) == ("2 of 8 GPUs answer nvidia-smi", True)
    assert gpus(expected=0).problems == []


@pytest.mark.parametrize(
    ("rows", "hard", "gpu"),
    [
        ("GPU-a, No, Yes\nGPU-b, No, No\n", True, "GPU-a"),
        ("GPU-a, 0, 1\n", True, "GPU-a"),
        ("GPU-b, Yes, No\n", False, "GPU-b"),
        ("GPU-b, Yes, Yes\n", True, "GPU-b"),
    ],
)
def test_row_remapping(smi: Path, rows: str, hard: bool, gpu: str) -> None:
    (smi / "rows").write_text(rows)
    (fault,) = gpus().problems
    assert (fault.hard, fault.gpu) == (hard, gpu)


def test_gpus_without_these_fields(smi: Path) -> None:
    (smi / "gpu").write_text("GPU-a, [N/A], [N/A]\nGPU-b, [N/A], [N/A]\n")
    (smi / "rows").write_text("GPU-a, [N/A], [N/A]\n")
    assert gpus().problems == []


def test_memory_errors_are_a_fact_and_pages_that_wait_a_problem(smi: Path) -> None:
    (smi / "gpu").write_text("GPU-a, 3, No\nGPU-b, 0, Yes\n")
    report = gpus()
    assert report.facts["uncorrected_memory_errors"] == {"GPU-a": 3}
    assert [(fault.gpu, fault.hard) for fault in report.problems] == [("GPU-b", False)]


@pytest.mark.parametrize(
    ("script", "words", "hard"),
    [
        (
            "echo 'Unable to determine the device handle for GPU 0000:3B:00.0'; exit 6",
            "Unable to determine",
            True,
        ),
        ("echo 'GPU is lost. Reboot the system to recover this GPU' >&2; exit 15", "lost", True),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18",
            "mismatch",
            False,
        ),
        ("exit 9", "exit code 9", False),
        ("exec sleep 20", "no answer within 0.2 s", False),
    ],
)
def test_an_nvidia_smi_that_fails(smi: Path, script: str, words: str, hard: bool) -> None:
    program(smi / "nvidia-smi", script)
    report = NodeReport()
    check_gpus(report, 2, 0.4)
    (fault,) = report.problems
    assert words in fault.text and fault.hard is hard


def test_without_nvidia_smi_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert gpus() == NodeReport()


# -- fabric ----------------------------------------------------------------------------------


def test_active_ports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    monkeypatch.setattr(preflight, "_INFINIBAND", tmp_path)
    report = NodeReport()
    check_ports(report)
    assert (report.facts, report.problems) == ({"ports": ["mlx5_0/1"]}, [])


def test_a_node_without_fabric(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "_INFINIBAND", tmp_path / "none")
    report = NodeReport()
    check_ports(report)
    assert report.facts == {}


# -- the kernel's log ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "at"),
    [
        (f"[   12.500000] {XID}", BOOT + 12.5),
        (f"<3>[12.500000] {XID}", BOOT + 12.5),
        (f"1795257692.25 n1 kernel: {XID}", 1795257692.25),
        (f"2026-11-21T10:45:12,123456+00:00 {XID}", 1795257912.0),
        (f"2026-11-21T11:45:12+0100 {XID}", 1795257912.0),
        (XID, None),
        ("79 GPUs", None),
    ],
)
def test_when_a_line_was_logged(line: str, at: float | None) -> None:
    assert time_of(line, BOOT) == at


def test_interesting_lines_since_the_launch() -> None:
    lines = [
        f"[10.0] old {XID}",
        "[100.0] usb 1-1: new high-speed device",
        f"[95.5] {XID}",
        "[200.0] nfs: server a not responding",
        XID,
    ]
    found = select_lines(lines, BOOT + 100, BOOT)
    assert [text for _, text in found] == [lines[2], lines[3], XID]
    assert found[0][0] == BOOT + 95.5


def test_only_the_newest_lines() -> None:
    found = select_lines([f"[{n}.0] nfs {n}" for n in range(100)], 0.0, BOOT)
    assert len(found) == 40 and found[-1][1] == "[99.0] nfs 99"


@pytest.mark.parametrize(
    "text",
    [
        XID,
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028",
        "Out of memory: Killed process 7 (python)",
        "Memory cgroup out of memory: Killed process 7",
        "Buffer I/O error on dev sda",
        "LustreError: 11-0: operation failed",
        "mlx5_core 0000:a1:00.0: mlx5_0: Link down",
        "INFO: task python:7 blocked for more than 120 seconds.",
        "nvme nvme0: I/O 5 timeout, reset controller",
        "EXT4-fs (sda1): Remounting filesystem read-only",
        "mce: [Hardware Error]: CPU 0",
    ],
)
def test_lines_that_explain_failures(text: str) -> None:
    assert select_lines([text], 0.0, BOOT) == [(None, text)]


def test_a_file_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log-n1").write_text(f"harmless\n{XID}\n")
    monkeypatch.setenv("HPCTRAIN_KERNEL_LOG", f"{tmp_path}/log-{{node}}")
    report = NodeReport()
    check_kernel(report, 0.0, "n1", 300.0)
    assert report.kernel == [(None, XID)]
    other = NodeReport()
    check_kernel(other, 0.0, "n2", 300.0)
    assert other.kernel == []


def test_a_command_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "klog", 'echo "NVRM on $1"')
    monkeypatch.setenv("HPCTRAIN_KERNEL_LOG", f"{tmp_path}/klog {{node}}")
    report = NodeReport()
    check_kernel(report, 0.0, "n1", 300.0)
    assert report.kernel == [(None, "NVRM on n1")]
    monkeypatch.setenv("HPCTRAIN_KERNEL_LOG", f"{tmp_path}/klog")
    check_kernel(report, 0.0, "n1", 300.0)
    assert report.kernel == [(None, "NVRM on")], "a program without arguments is run, not read"


def test_journal_first_then_dmesg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCTRAIN_KERNEL_LOG", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program(tmp_path / "journalctl", "exit 0")
    program(tmp_path / "dmesg", "echo nvidia by dmesg")
    report = NodeReport()
    check_kernel(report, 0.0, "n1", 300.0)
    assert (report.facts["kernel_log"], report.kernel) == ("dmesg", [(None, "nvidia by dmesg")])
    program(tmp_path / "journalctl", 'echo "nvidia $*"')
    check_kernel(report, 5.0, "n1", 300.0)
    assert report.facts["kernel_log"] == "journalctl"
    assert "-k" in report.kernel[0][1] and "--since=@5" in report.kernel[0][1]


def test_a_log_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPCTRAIN_KERNEL_LOG", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("journalctl", "dmesg"):
        program(tmp_path / name, "echo 'nvidia: Operation not permitted'; exit 1")
    report = NodeReport()
    check_kernel(report, 0.0, "n1", 300.0)
    assert (report.facts["kernel_log"], report.kernel, report.problems) == ("not readable", [], [])


# -- the program -----------------------------------------------------------------------------


def run(directory: Path, **environment: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.supervise.preflight", f"--run-directory={directory}"],
        env={**os.environ, "SLURMD_NODENAME": "n7", "SLURM_STEP_ID": "4", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert all(line.startswith(preflight.MARK) for line in done.stdout.splitlines())
    return [json.loads(line.partition(preflight.MARK)[2]) for line in done.stdout.splitlines()]


def test_the_program_tells_all_and_is_quick(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"{XID}\nnvidia {chr(233) * 5000}\n")
    started, began_at = time.monotonic(), time.time()
    told = run(tmp_path, HPCTRAIN_KERNEL_LOG=str(log))
    assert time.monotonic() - started < 60
    assert {one["node"] for one in told} == {"n7"}
    kinds = [one["kind"] for one in told]
    assert (kinds[0], kinds[-1]) == ("begin", "end")
    assert told[0]["step"] == "4"
    assert began_at - 1 < float(str(told[0]["clock"])) < time.time() + 1
    texts = [str(one["text"]) for one in told if one["kind"] == "kernel"]
    assert texts[0] == XID
    assert texts[1].startswith("nvidia \u00e9") and len(texts[1]) > 50
    assert all(len(json.dumps(one)) < 880 for one in told), "srun passes on pieces of 1 KiB"


def test_a_hung_mount_is_a_finding_and_not_a_hang(tmp_path: Path) -> None:
    """Opening a pipe that nobody reads blocks like a file of a dead server."""
    os.mkfifo(tmp_path / ".preflight-n7")
    started = time.monotonic()
    told = run(tmp_path)
    assert 3.5 < time.monotonic() - started < 60
    (problem,) = [one for one in told if one["kind"] == "problem"]
    assert (problem["check"], problem["text"]) == ("run directory", "no answer within 4 s")
    assert told[-1]["kind"] == "end"
    assert stat.S_ISFIFO((tmp_path / ".preflight-n7").stat().st_mode)


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, report = preflight._start(lambda _: (_ for _ in ()).throw(RuntimeError("odd")))
    thread.join(300)
    assert [fault.text for fault in report.problems] == ["RuntimeError: odd"]


def test_the_program_imports_little() -> None:
    """It starts on all nodes at once, from a shared file system."""
    code = "import hpctrain.supervise.preflight, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    loaded = done.stdout.split()
    assert not {"pydantic", "click", "torch", "numpy", "rich"} & set(loaded)
    assert {name for name in loaded if name.startswith("hpctrain")} == {
        *("hpctrain", "hpctrain.version", "hpctrain.base", "hpctrain.base.clock"),
        "hpctrain.supervise",
        *("hpctrain.judge", "hpctrain.judge.preflight_format"),
        "hpctrain.supervise.preflight",
    }


# -- what the run reads ------------------------------------------------------------------------


def inputs(directory: Path, *paths: Path) -> NodeReport:
    settings, report = directory / "supervise.json", NodeReport()
    settings.write_text(json.dumps({"inputs": [str(path) for path in paths]}))
    preflight.check_inputs(report, settings)
    return report


def test_inputs_that_are_there(tmp_path: Path) -> None:
    (tmp_path / "text.bin").touch()
    assert inputs(tmp_path, tmp_path / "text.bin", tmp_path).problems == []


def test_inputs_that_are_not_there(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    (fault,) = inputs(tmp_path, tmp_path, gone / "text.bin", gone / "text.idx").problems
    assert fault.text == (
        f"cannot read {gone}/text.bin: [Errno 2] No such file or directory (and 1 more)"
    )
    assert not fault.hard


def test_without_a_list_nothing_is_looked_for(tmp_path: Path) -> None:
    """Where it cannot be read, the check of the run directory says so."""
    for settings in (None, tmp_path / "absent.json"):
        report = NodeReport()
        preflight.check_inputs(report, settings)
        assert report.problems == []
