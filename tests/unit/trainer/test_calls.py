"""Calls of a script, `from hpctrain import trainer`: in a run, outside of one, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_runs import AgentRun
from trainer_contract import assert_done, assert_yielded
from waiting import wait_until

import hpctrain
from hpctrain.records.run_records import RankTimes, read_record
from hpctrain.trainer.ranks import Talk

PACKAGE = Path(hpctrain.__file__).parents[1]
SCRIPT = """
import sys, time
from hpctrain import trainer
ranks = int(sys.argv[1])
if ranks > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo")
t = trainer.start()
step = int((t.resume / "step").read_text()) if t.resume else 0
print("resumed at", step, flush=True)
while step < int(sys.argv[2]):
    step += 1
    time.sleep(0.02)
    request = t.step(step, loss=1 / step, samples=8 * step)
    if request or step % 10 == 0:
        with t.saving(step) as directory:
            (directory / ("step" if t.rank == 0 else f"of-{t.rank}")).write_text(str(step))
    if request is trainer.Request.STOP:
        print("asked at", step, flush=True)
        t.leave()
t.finish()
print("torch" if "torch" in sys.modules else "no torch", flush=True)
"""
LEVEL_4: dict[str, Any] = {
    "checkpoint": {"path": "step-{step}", "complete": {"files": ["hpctrain-complete"]}, "keep": 9},
    "signal": {"save": "USR2", "seconds": "60s"},
    "metrics": None,
    "talks": True,
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_without_hpctrain_around_it_the_calls_do_nothing(script: Path, tmp_path: Path) -> None:
    """`-S`: Python without any package; hpctrain's own directory is all that it has."""
    done = subprocess.run(
        [sys.executable, "-S", script, "1", "25"],
        env={"PYTHONPATH": str(PACKAGE), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("resumed at 0\nno torch\n", "")
    assert (tmp_path / "step-20" / "step").read_text() == "20"
    assert not (tmp_path / "step-20" / "hpctrain-complete").exists()


def test_nothing_but_the_standard_library_is_imported() -> None:
    code = (
        "import sys; before = {*sys.modules}; from hpctrain import trainer; "
        "names = {name.partition('.')[0] for name in {*sys.modules} - before}; "
        "print(sorted(names - {*sys.stdlib_module_names}))"
    )
    words = [sys.executable, "-c", code]
    found = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=PACKAGE)
    assert found.stdout.strip() == "['hpctrain']", found.stderr


def test_a_script_trains_stops_when_asked_and_resumes(script: Path, tmp_path: Path) -> None:
    run = AgentRun.made(tmp_path / "run")
    environment = {"PYTHONPATH": str(PACKAGE)}
    command = (sys.executable, str(script), "1")
    launch = run.start(
        command=(*command, "1000000000"), environment=environment, done={"step": 60}, **LEVEL_4
    )
    launch.stop_after(10)
    newest = run.published[-1]
    assert f"asked at {newest}" in launch.printed
    assert_yielded(run.run, newest)
    # rows of every step, with what was said of it
    assert [row.step for row in launch.rows] == [*range(1, newest + 1)]
    assert {row.consumed_samples for row in launch.rows} == {8 * n for n in range(1, newest + 1)}
    target = newest - newest % 10 + 30  # the script saves it, as the contract wants
    again = run.start(
        command=(*command, str(target)),
        environment=environment,
        resume=newest,
        done={"step": target},
        **LEVEL_4,
    )
    assert again.wait() == 0, again.printed
    assert f"resumed at {newest}" in again.printed
    assert [row.step for row in again.rows] == [*range(newest + 1, target + 1)]
    assert_done(run.run, target, epoch=2)


def test_two_ranks_agree_on_the_step_after_which_they_leave(script: Path, tmp_path: Path) -> None:
    run = AgentRun.made(tmp_path / "run")
    launch = run.start(
        command=(sys.executable, str(script), "2", "1000000000"),
        environment={"PYTHONPATH": str(PACKAGE), "MASTER_PORT": str(free_port())},
        ranks=2,
        done={"step": 60},
        **LEVEL_4,
    )
    wait_until(lambda: run.run.rank_times.exists(), launch.process.poll)
    launch.stop_after(10)
    newest = run.published[-1]
    assert launch.printed.count(f"asked at {newest}") == 2
    names = {file.name for file in run.manifest(newest).files}
    of_ranks = {f"step-{newest}/step", f"step-{newest}/of-1"}
    assert names == {*of_ranks, f"step-{newest}/hpctrain-complete"}
    times = read_record(run.run.rank_times, RankTimes)
    assert times is not None and len(times.compute_seconds) == 2


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# -- The agent's end -----------------------------------------------------------------------------


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Talk]:
    found = Talk(tmp_path / "talk")
    yield found
    found.close()


def connected(talk: Talk) -> Any:
    import socket

    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(talk.address)
    return stream


def heard(talk: Talk, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def enough() -> bool:
        found.extend(talk.messages())
        return len(found) >= count

    wait_until(enough)
    return found


def test_messages_may_come_in_pieces_and_what_is_none_is_left_out(talk: Talk) -> None:
    stream = connected(talk)
    line = json.dumps({"kind": "step", "step": 1}).encode()
    stream.sendall(b"{\n[1]\n\xff\n" + line[:5])
    assert list(talk.messages()) == []
    stream.sendall(line[5:] + b"\n" + line + b"\n")
    assert heard(talk, 2) == [{"kind": "step", "step": 1}] * 2
    stream.close()
    assert list(talk.messages()) == []


def test_a_rank_that_connects_after_the_stop_is_asked_too(talk: Talk) -> None:
    first = connected(talk)
    list(talk.messages())
    talk.ask("SAVE")
    talk.ask("STOP")
    assert first.recv(100) == b"SAVE\nSTOP\n"
    second = connected(talk)
    list(talk.messages())
    assert second.recv(100) == b"STOP\n"
    first.close()
    talk.ask("STOP")  # one that is gone harms nobody
