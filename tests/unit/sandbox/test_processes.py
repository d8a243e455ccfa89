"""Reading /proc, against text with known traps and against real processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.sandbox.daemons import find_job_processes
from hpctrain.sandbox.paths import SandboxPaths
from hpctrain.sandbox.processes import (
    ProcessId,
    all_processes,
    await_condition,
    descendants,
    end,
    find_process,
    is_alive,
    kill,
    parse_stat,
    read_command_line,
    read_environment,
)

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(900)"]
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(900)",
]


@pytest.fixture
def child(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    environment = {"SLURM_CONF": "/box/slurm.conf", "EMPTY": ""}
    process = subprocess.Popen(request.param, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def identity(process: subprocess.Popen[bytes]) -> ProcessId:
    found = find_process(process.pid)
    assert found is not None
    return found.identity


def test_a_name_may_hold_parentheses_and_spaces() -> None:
    tail = " ".join(str(number) for number in range(5, 22))
    process = parse_stat(f"42 (a (b) c) S 7 {tail} 987654 0 0")
    assert (process.pid, process.name, process.state, process.parent_pid) == (42, "a (b) c", "S", 7)
    own = find_process(os.getpid())
    assert own is not None
    assert own.parent_pid == os.getppid()


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_a_zombie_is_dead(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    assert is_alive(process)
    child.kill()
    # Not waited for, so that it stays as a zombie: kill -0 still succeeds.
    assert await_condition(lambda: not is_alive(process), timeout_seconds=300)
    os.kill(child.pid, 0)


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_a_pid_with_another_start_is_another_process(child: subprocess.Popen[bytes]) -> None:
    impostor = ProcessId(child.pid, identity(child).start_ticks - 1)
    assert not is_alive(impostor)
    kill([impostor])
    assert is_alive(identity(child))


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_end_reaches_a_stopped_process(child: subprocess.Popen[bytes]) -> None:
    process = identity(child)
    os.kill(child.pid, signal.SIGSTOP)
    end([process], grace_seconds=300)
    assert child.wait(timeout=300) == -signal.SIGTERM


@pytest.mark.parametrize("child", [DEAF], indirect=True)
def test_end_insists_when_sigterm_is_ignored(child: subprocess.Popen[bytes]) -> None:
    end([identity(child)], grace_seconds=0.2)
    assert child.wait(timeout=300) == -signal.SIGKILL


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_environment_and_command_line(child: subprocess.Popen[bytes]) -> None:
    environment = read_environment(child.pid)
    assert environment["SLURM_CONF"] == "/box/slurm.conf"
    assert environment["EMPTY"] == ""
    assert read_command_line(child.pid) == tuple(SLEEP)
    child.kill()
    child.wait()
    assert read_environment(child.pid) == {}
    assert read_command_line(child.pid) == ()


def test_descendants_are_found_at_every_depth() -> None:
    stat = "{pid} (x) S {parent}" + " 0" * 17 + " 5 0"
    parents = {2: 1, 3: 2, 4: 3, 5: 1}
    family = [parse_stat(stat.format(pid=pid, parent=parent)) for pid, parent in parents.items()]
    assert {process.pid for process in descendants([2], family)} == {3, 4}


@pytest.mark.parametrize("child", [SLEEP], indirect=True)
def test_all_processes_leaves_ourselves_out(child: subprocess.Popen[bytes]) -> None:
    pids = {process.pid for process in all_processes()}
    assert child.pid in pids
    assert os.getpid() not in pids


# -- Which processes of a job are ranks, by the environments that three releases of Slurm give --


@pytest.fixture
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SandboxPaths]:
    """A process with the variables of `request.param`, in a job on node n0 of a sandbox."""
    paths = SandboxPaths(tmp_path, tmp_path)
    job = {"SLURM_CONF": str(paths.slurm_conf), "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0"}
    process = subprocess.Popen(SLEEP, env=job | request.param, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield paths
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("started", "step_id", "rank"),
    [
        ({"SLURM_PROCID": "0"}, None, None),  # the batch step of 22.05 and 24.11
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "-5"}, None, None),  # that of 26.05
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "2"}, "2", 3),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "2", "RANK": "9"}, "2", 9),  # below an agent
    ],
    indirect=["started"],
)
def test_the_batch_step_is_no_rank(
    started: SandboxPaths, step_id: str | None, rank: int | None
) -> None:
    (found,) = find_job_processes(started, ("n0", "n1"))
    assert (found.job_id, found.node, found.step_id, found.rank) == ("7", "n0", step_id, rank)
    assert find_job_processes(started, ("n1",)) == ()
