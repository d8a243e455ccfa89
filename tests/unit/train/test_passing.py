"""What an agent does with signals: they reach the ranks that listen, and never end anybody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from hpctrain.records.old_launches import lines_of_rank
from hpctrain.train.launchers.agent_rank_setup import LOG_VARIABLE, set_up_under_agent
from hpctrain.train.launchers.labelled_output import LabelledOutput
from hpctrain.train.launchers.signal_forwarding import FORWARDED_SIGNALS, SignalForwarder, catches
from hpctrain.train.stop import STOP_SIGNALS

# Deaf until the file `listen` exists; from then on every signal leaves its name in a file.
RANK = """
import os, pathlib, signal, time
def heard(number, frame):
    pathlib.Path("heard-" + signal.Signals(number).name).touch()
pathlib.Path("started").touch()
while not os.path.exists("listen"):
    time.sleep(0.01)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
    signal.signal(number, heard)
while not os.path.exists("leave"):
    time.sleep(0.01)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", RANK], cwd=tmp_path)
    wait_until((tmp_path / "started").exists)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def forwarder() -> Iterator[SignalForwarder]:
    before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    found = SignalForwarder()
    found.install()
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGQUIT"])
def test_a_signal_waits_for_the_rank_to_listen(
    name: str, forwarder: SignalForwarder, rank: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    os.kill(os.getpid(), signal.Signals[name])  # this process is the agent, and lives on
    forwarder.forward([])
    for _ in range(3):
        forwarder.forward([rank.pid])
    assert rank.poll() is None, "a rank that is still starting would have died"
    (tmp_path / "listen").touch()
    wait_until(lambda: catches(rank.pid, signal.SIGQUIT))
    forwarder.forward([rank.pid])
    wait_until((tmp_path / f"heard-{name}").exists)
    (tmp_path / f"heard-{name}").unlink()
    forwarder.forward([rank.pid])
    (tmp_path / "leave").touch()
    assert rank.wait(300) == 0
    assert list(tmp_path.glob("heard-*")) == [], "once for each signal"
    os.kill(os.getpid(), signal.Signals[name])
    forwarder.forward([rank.pid])  # nobody is left


def test_what_stops_a_rank_and_what_asks_for_stacks_is_passed_on() -> None:
    assert set(FORWARDED_SIGNALS) == {*STOP_SIGNALS, signal.SIGQUIT}


def test_a_rank_below_an_agent_writes_its_own_log(tmp_path: Path) -> None:
    program = (
        "import os, subprocess\n"
        "from hpctrain.train.launchers.agent_rank_setup import set_up_under_agent\n"
        "set_up_under_agent()\n"
        "print('one', flush=True)\n"
        "os.write(2, b'two\\n')\n"
        "subprocess.run(['echo', 'three'])\n"
    )
    log = tmp_path / "step0-rank0003.log"
    log.write_text("zero\n")
    for name, said in ((log, ""), (tmp_path / "absent" / "log", "one\nthree\n")):
        environment = {**os.environ, LOG_VARIABLE: str(name)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout) == (0, said)
    assert log.read_text() == "zero\none\ntwo\nthree\n"


def test_an_agent_puts_the_rank_before_each_line(tmp_path: Path) -> None:
    """As srun does for its own tasks; also of a rank that is killed within a line."""
    program = (
        "import os, subprocess, sys\n"
        "from hpctrain.train.launchers.agent_rank_setup import set_up_under_agent\n"
        "set_up_under_agent()\n"
        "print('one', flush=True)\n"
        "subprocess.run(['sh', '-c', 'echo two >&2'])\n"
        "print('x' * 200_000)\n"
        "print('last', end='', flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    log = tmp_path / "step0-node0000.log"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    output = LabelledOutput(descriptor)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, LOG_VARIABLE: str(output.pipe_of(rank))},
        )
        for rank in (8, 11)
    ]
    assert [rank.wait(300) for rank in ranks] == [-signal.SIGKILL] * 2
    directory = output.pipe_of(12).parent
    output.close()
    os.close(descriptor)
    for rank in (8, 11):
        lines = list(lines_of_rank(log, rank))
        assert [lines[0], lines[1], lines[-1]] == [b"one", b"two", b"last"]
        assert b"".join(lines[2:-1]) == b"x" * 200_000
    assert not directory.exists()


def test_a_rank_of_srun_has_its_log_from_slurm() -> None:
    before = os.fstat(1)
    set_up_under_agent({})
    assert os.path.samestat(before, os.fstat(1))


# Starts a rank that would live for minutes, and is killed.
AGENT = """
import os, subprocess, sys
program = (
    "import time; from hpctrain.train.launchers.agent_rank_setup import set_up_under_agent; "
    "set_up_under_agent(); print('settled', flush=True); time.sleep(300)"
)
rank = subprocess.Popen([sys.executable, "-c", program])
print(rank.pid, flush=True)
rank.wait()
"""


def test_a_rank_does_not_outlive_its_agent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, LOG_VARIABLE: str(log)}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    wait_until(lambda: log.exists() and "settled" in log.read_text())
    agent.kill()
    agent.wait()
    wait_until(lambda: not is_alive(rank))


def is_alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
