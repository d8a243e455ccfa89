"""Agents of a launch by Ray, with a small program in place of Ray; the real one: `tests/slurm`.

The program registers, starts a process in a session of its own, and dies when it is told to.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from hpctrain.engines.trainer import TrainerSettings
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.exit_records import read_exit_records
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import DoneMarker, TrainerExit, read_record
from hpctrain.trainer.ray_cluster import ray_directory

RAY = """
import os, subprocess, sys, time

def main():
    words = sys.argv[1:]
    assert words[0] == "start" and "--block" in words, words
    assert os.path.exists(os.environ["RAY_AUTH_TOKEN_PATH"]) and "MASTER_PORT" not in os.environ
    directory = next(w for w in words if w.startswith("--temp-dir=")).partition("=")[2]
    if "--head" not in words:
        assert "--address=127.0.0.1:20001" in words, words
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep, start_new_session=True)
    pids, node = os.environ["PIDS"], os.environ["SLURMD_NODENAME"]
    open(os.path.join(pids, f"{child.pid}-{node}"), "w").close()
    print("INFO Local node IP: 127.0.0.1")
    print("SUCC Ray runtime started.", flush=True)
    while not os.path.exists(os.path.join(pids, f"die-{node}")):
        time.sleep(0.02)
    print("ERR scripts.py:87 -- raylet [exit code=-9]")
    print("ERR Remaining processes will be killed.")
    return 1
"""
DRIVER = """
import os, sys, time
assert os.environ["RAY_ADDRESS"] == "127.0.0.1:20001"
while os.path.exists(os.path.join(os.environ["PIDS"], "hold")):
    time.sleep(0.02)
print("step 3 loss 0.5", flush=True)
sys.exit(int(os.environ.get("DRIVER_CODE", "0")))
"""


class RayLaunch:
    """Two agents, as on two nodes."""

    def __init__(self, place: Path, **environment: str) -> None:
        self.run, self.pids = RunLayout(place / "run"), place / "pids"
        self.run.create()
        self.pids.mkdir()
        package = place / "python" / "ray" / "scripts"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").touch()
        (package / "__init__.py").touch()
        (package / "scripts.py").write_text(RAY)
        (place / "driver.py").write_text(DRIVER)
        trainer: dict[str, Any] = {
            "command": [sys.executable, "driver.py"],
            "launch": "ray",
            "done": {"step": 3},
            "metrics": [{"output": r"step (?P<step>\d+) loss (?P<loss>\S+)"}],
        }
        settings = TrainerSettings.model_validate(
            dict(run_name="r", trainer=trainer, directory=str(place), gpus_per_node=1)
            | dict(accelerator="cpu", logs="node")
        )
        self.run.train_config.write_text(settings.model_dump_json(by_alias=True))
        self.epoch = claim_epoch(self.run.epochs, "test")
        self.agents = [self._agent(node, str(place / "python"), environment) for node in range(2)]

    def _agent(self, node: int, path: str, more: dict[str, str]) -> subprocess.Popen[str]:
        own = {
            **dict(SLURM_PROCID=str(node), SLURM_NODEID=str(node), SLURM_NTASKS="2"),
            **dict(SLURM_LOCALID="0", SLURMD_NODENAME=f"n{node}", HPCTRAIN_EPOCH=str(self.epoch)),
            **dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="20001", PIDS=str(self.pids)),
            **dict(PYTHONPATH=path),
        }
        return subprocess.Popen(
            [sys.executable, "-m", "hpctrain.trainer.agent", str(self.run.train_config)],
            env={**os.environ, **own, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait(self) -> list[int]:
        """Wait for the end of all agents; returns their exit codes."""
        self.printed = [one.communicate(timeout=PATIENCE_SECONDS)[0] for one in self.agents]
        return [one.returncode for one in self.agents]

    def wait_until_up(self) -> None:
        wait_until((self.run.launch_output(self.epoch) / ".ray" / "000001").exists)

    def assert_nothing_left(self) -> None:
        for path in self.pids.glob("[0-9]*-n*"):
            assert not Path("/proc", path.name.partition("-")[0]).exists(), path
        marks = self.run.launch_output(self.epoch) / ".ray"
        assert not (marks / "token").exists()
        assert not ray_directory(marks.parent).exists()


def test_the_end_of_the_driver_ends_ray_on_all_nodes(tmp_path: Path) -> None:
    launch = RayLaunch(tmp_path)
    assert launch.wait() == [TrainerExit.DONE, TrainerExit.DONE], launch.printed
    assert read_record(launch.run.done, DoneMarker) is not None
    launch.assert_nothing_left()


@pytest.mark.variant("test_a_node_whose_ray_has_died_is_named_and_not_the_driver")
def test_the_exit_code_of_the_driver_is_that_of_the_launch(tmp_path: Path) -> None:
    launch = RayLaunch(tmp_path, DRIVER_CODE="3")
    assert launch.wait() == [TrainerExit.CRASH, TrainerExit.DONE], launch.printed
    (record,) = read_exit_records(launch.run, launch.epoch)
    assert (record.rank, record.node, record.message) == (0, "n0", "step 3 loss 0.5")
    launch.assert_nothing_left()


def test_a_node_whose_ray_has_died_is_named_and_not_the_driver(tmp_path: Path) -> None:
    """The driver fails first, as it does when its actors are gone."""
    launch = RayLaunch(tmp_path, DRIVER_CODE="1")
    (launch.pids / "hold").touch()
    launch.wait_until_up()
    (launch.pids / "die-n1").touch()
    (launch.pids / "hold").unlink()
    assert launch.wait() == [TrainerExit.CRASH, TrainerExit.CRASH], launch.printed
    (record,) = read_exit_records(launch.run, launch.epoch)
    assert (record.rank, record.node) == (1, "n1")
    assert record.message == "Ray on n1 has ended: raylet (killed by signal 9)"
    launch.assert_nothing_left()


@pytest.mark.variant("test_a_node_whose_ray_has_died_is_named_and_not_the_driver")
def test_a_head_that_has_died_ends_the_driver(tmp_path: Path) -> None:
    launch = RayLaunch(tmp_path)
    (launch.pids / "hold").touch()
    launch.wait_until_up()
    (launch.pids / "die-n0").touch()
    assert launch.wait() == [TrainerExit.CRASH, TrainerExit.DONE], launch.printed
    (record,) = read_exit_records(launch.run, launch.epoch)
    assert record.message == "Ray on n0 has ended: raylet (killed by signal 9)"
    launch.assert_nothing_left()


def test_a_stop_while_ray_starts_leaves_nothing(tmp_path: Path) -> None:
    launch = RayLaunch(tmp_path)
    (launch.pids / "hold").touch()
    launch.wait_until_up()
    for agent in launch.agents:
        agent.send_signal(signal.SIGTERM)
    assert launch.wait() == [TrainerExit.YIELDED, TrainerExit.DONE], launch.printed
    launch.assert_nothing_left()


@pytest.mark.variant("test_a_stop_while_ray_starts_leaves_nothing")
def test_what_killed_agents_have_left_goes_with_the_next_launch_on_the_node(tmp_path: Path) -> None:
    """And nothing of those that live."""
    launches = {}
    for name in ("alive", "killed", "next"):
        (tmp_path / name).mkdir()
        launches[name] = launch = RayLaunch(tmp_path / name)
        if name != "next":
            (launch.pids / "hold").touch()
            launch.wait_until_up()
        if name == "killed":
            for agent in launch.agents:
                agent.kill()
                agent.wait(PATIENCE_SECONDS)
    places = {name: one.run.launch_output(one.epoch) for name, one in launches.items()}
    assert launches["next"].wait() == [TrainerExit.DONE, TrainerExit.DONE]
    there = [name for name, place in places.items() if ray_directory(place).exists()]
    assert there == ["alive"]
    for name in ("alive", "killed"):
        (launches[name].pids / "hold").unlink()
    assert launches["alive"].wait() == [TrainerExit.DONE, TrainerExit.DONE]
    launches["alive"].assert_nothing_left()
    for path in launches["killed"].pids.glob("[0-9]*-n*"):  # as Slurm does
        pid, _, node = path.name.partition("-")
        os.kill(int(pid), signal.SIGKILL)
        (path.parent / f"die-{node}").touch()
