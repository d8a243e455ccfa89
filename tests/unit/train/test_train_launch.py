"""Reading the launcher's environment, and remembering stop signals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.layout import RunLayout
from hpctrain.records.requests import is_requested
from hpctrain.train.rank_environment import Launch, host_threads, quiet_defaults, read_launch

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURMD_NODENAME": "n002",
}


def test_srun_says_who_we_are() -> None:
    environment = {**SLURM, "HPCTRAIN_EPOCH": "3", "HPCTRAIN_RESUME": "iter_0000012"}
    assert read_launch(environment) == Launch(5, 16, 1, "n002", 3, "iter_0000012")


def test_another_launcher_wins_over_srun() -> None:
    launch = read_launch({**SLURM, "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0"})
    assert (launch.rank, launch.world_size, launch.local_rank) == (2, 4, 0)
    assert (launch.epoch, launch.resume) == (0, "")
    assert not launch.leads


def test_what_is_missing_or_wrong_is_named() -> None:
    with pytest.raises(InvalidInputError, match="none of RANK, SLURM_PROCID is set"):
        read_launch({})
    with pytest.raises(InvalidInputError, match="HPCTRAIN_EPOCH is not a number: 'two'"):
        read_launch({**SLURM, "HPCTRAIN_EPOCH": "two"})


def test_whether_the_speed_is_checked() -> None:
    given = {"2": 2, "0": 0, "off": None}
    for text, expected in given.items():
        assert read_launch({**SLURM, "HPCTRAIN_SPEED_CHECK": text}).speed_check == expected
    assert read_launch(SLURM).speed_check == 0, "without a supervisor nobody replaces nodes"
    with pytest.raises(InvalidInputError, match="HPCTRAIN_SPEED_CHECK is not a number: 'on'"):
        read_launch({**SLURM, "HPCTRAIN_SPEED_CHECK": "on"})


def test_what_the_supervisor_tells() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    told = {"HPCTRAIN_MTTF_SECONDS": "28440.5", "HPCTRAIN_PINNED_STEPS": "400 1200"}
    assert read_launch(place).mttf_seconds == float("inf")
    assert read_launch(place).pinned_steps == frozenset()
    launch = read_launch(place | told)
    assert (launch.mttf_seconds, launch.pinned_steps) == (28440.5, {400, 1200})
    for name, text in (
        ("HPCTRAIN_MTTF_SECONDS", "0"),
        ("HPCTRAIN_MTTF_SECONDS", "nan"),
        ("HPCTRAIN_MTTF_SECONDS", "often"),
        ("HPCTRAIN_PINNED_STEPS", "4,8"),
    ):
        with pytest.raises(InvalidInputError, match=name):
            read_launch(place | {name: text})


def test_the_user_may_choose_the_number_of_threads() -> None:
    assert quiet_defaults("ddp", {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in quiet_defaults("ddp", {"OMP_NUM_THREADS": "8"})
    assert quiet_defaults("ddp", {}, host_threads=16)["OMP_NUM_THREADS"] == "16"


def test_an_optimizer_on_the_host_has_the_cpus_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert host_threads({}) == 16
    assert host_threads({"LOCAL_WORLD_SIZE": "8"}) == 2
    assert host_threads({"LOCAL_WORLD_SIZE": "32"}) == 1
    # a task that Slurm has not bound sees the CPUs of all
    assert host_threads({"SLURM_CPUS_PER_TASK": "4"}) == 4
    assert host_threads({"SLURM_CPUS_PER_TASK": "16", "LOCAL_WORLD_SIZE": "8"}) == 2


def test_kernels_start_in_launch_order_where_megatron_needs_it() -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert quiet_defaults("megatron", {})[name] == "1"
    assert name not in quiet_defaults("fsdp", {})


def test_signals_are_remembered_and_do_not_kill() -> None:
    program = (
        "import os, signal\n"
        "from hpctrain.train.stop import StopSignals\n"
        "stop = StopSignals()\n"
        "stop.install()\n"
        "assert not stop.requested\n"
        "os.kill(os.getpid(), signal.SIGCONT)\n"
        "assert not stop.requested\n"
        "for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2):\n"
        "    os.kill(os.getpid(), number)\n"
        "print(stop.requested, stop.name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "True SIGUSR1\n"


def test_the_stop_file(tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "r1")
    run.create()
    assert not is_requested(run, "stop")
    run.stop_request.touch()
    assert is_requested(run, "stop") and not is_requested(run, "save")
    assert not is_requested(RunLayout(Path(os.devnull)), "stop")
