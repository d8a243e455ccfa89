"""Signals go past a profiler that would keep them to itself, to the rank below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from waiting import wait_until

# As nsys does it starts the program as a child. A signal that reaches it ends it.
PROFILER = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
RANK = """
import os, pathlib, signal, time
from hpctrain.train.launchers.nsight import report_pid_to_task
from hpctrain.train.stop import StopSignals
while not os.path.exists("begin"):
    time.sleep(0.01)
stop = StopSignals()
stop.install()
def stacks(number, frame):
    pathlib.Path("stacks").touch()
signal.signal(signal.SIGQUIT, stacks)
assert report_pid_to_task(os.environ)
written = pathlib.Path(f"rank-{os.getpid()}")
written.write_text(str(os.getpid()))
written.rename("rank")  # whole, or not there
while not stop.requested:
    time.sleep(0.01)
pathlib.Path("heard").write_text(stop.name)
os._exit(75)
"""
TASK = """
import os, sys
from hpctrain.train.launchers.nsight import record
from hpctrain.train.stop import StopSignals
stop = StopSignals()
stop.install()
profiler, rank, arrived = sys.argv[1:]
stop.name = arrived or stop.name
command = [sys.executable, profiler, sys.executable, rank]
open("task", "w").close()
os._exit(record(command, os.environ, stop))
"""


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., subprocess.Popen[bytes]]:
    for name, text in (("profiler.py", PROFILER), ("rank.py", RANK), ("task.py", TASK)):
        (tmp_path / name).write_text(text)

    def start(arrived: str = "") -> subprocess.Popen[bytes]:
        words = [sys.executable, "task.py", "profiler.py", "rank.py", arrived]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.Popen(words, cwd=tmp_path, env=environment, start_new_session=True)

    return start


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_stop_signal_reaches_the_rank(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path, name: str, whole_group: bool
) -> None:
    started = task()
    (tmp_path / "begin").touch()
    wait_until((tmp_path / "rank").exists)
    os.kill(started.pid, signal.SIGQUIT)
    wait_until((tmp_path / "stacks").exists)
    send = os.killpg if whole_group else os.kill
    send(started.pid, signal.Signals[name])
    assert started.wait(300) == 75
    assert (tmp_path / "heard").read_text() == name
    assert not list(tmp_path.glob("hpctrain-nsight-*"))


def test_what_comes_before_the_rank_listens_is_kept_for_it(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    early, handed = task(), task("SIGUSR1")
    wait_until(lambda: len(list(tmp_path.glob("hpctrain-nsight-*"))) == 2)
    os.kill(early.pid, signal.SIGTERM)
    (tmp_path / "begin").touch()
    assert [early.wait(300), handed.wait(300)] == [75, 75]


def test_a_rank_that_is_killed_is_told_by_the_code(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    started = task()
    (tmp_path / "begin").touch()
    wait_until((tmp_path / "rank").exists)
    rank = int((tmp_path / "rank").read_text())
    profiler = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(profiler, signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)
    assert started.wait(300) == 128 + signal.SIGKILL


def test_nothing_is_recorded_without_its_task(
    task: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    started = task()
    (tmp_path / "begin").touch()
    wait_until((tmp_path / "rank").exists)
    rank = int((tmp_path / "rank").read_text())
    profiler = Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1]
    started.kill()
    started.wait()
    wait_until(lambda: not Path(f"/proc/{profiler}").exists())
    os.kill(rank, signal.SIGKILL)
