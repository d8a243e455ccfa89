"""`srun` as a process, signals to ourselves, and ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import PATIENCE_SECONDS, wait_until

from hpctrain.base import reserved_ports
from hpctrain.base.errors import InvalidInputError
from hpctrain.sandbox.paths import HIGHEST
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.spec.loader import load_profile
from hpctrain.supervise.srun_launch import master_address
from hpctrain.supervise.srun_process import Signals, SrunProcess, reserve_port


def launch(program: str) -> SrunProcess:
    return SrunProcess([sys.executable, "-I", "-S", "-c", program], os.environ)


def test_lines_of_srun_are_passed_on_and_read(capfd: pytest.CaptureFixture[str]) -> None:
    lines = (
        "srun: error: n1: task 1: Killed\n"
        "srun: error: n0: task 0: Exited with exit code 75\n"
        "slurmstepd: error: *** STEP 5.0 ON n0 CANCELLED AT 2026-03-01T10:00:00 ***\n"
        "other\n"
        "srun: error: n0: tasks 0,2: Exited with exit code 1"
    )
    running = launch(f"import sys; sys.stderr.write({lines!r}); sys.exit(7)")
    running.process.wait(PATIENCE_SECONDS)
    running.finish_reading(PATIENCE_SECONDS)
    assert running.poll() == 7
    # 75 is the trainer's way to say that it has saved and left.
    assert [f.what for f in running.failures] == ["Killed", "Exited with exit code 1"]
    assert [notice.text[:21] for notice in running.notices] == ["slurmstepd: error: **"]
    assert capfd.readouterr().err == lines


def test_bytes_that_are_no_text_do_not_stop_the_reader() -> None:
    running = launch(
        "import sys; sys.stderr.buffer.write(b'\\xff\\xfe\\nsrun: error: n1: task 1: Killed\\n')"
    )
    running.process.wait(PATIENCE_SECONDS)
    running.finish_reading(PATIENCE_SECONDS)
    assert len(running.failures) == 1


def test_a_log_that_cannot_be_written_ends_nothing() -> None:
    """/dev/full refuses every byte, as a log does whose file system is read-only."""
    program = (
        "import os, sys\n"
        "from hpctrain.supervise.context import log_message\n"
        "from hpctrain.supervise.srun_process import SrunProcess\n"
        "log_message('first')\n"
        "words = 'import sys; sys.stderr.write(\"srun: error: n1: task 1: Killed\\\\n\")'\n"
        "running = SrunProcess([sys.executable, '-c', words], os.environ)\n"
        "running.process.wait(300)\n"
        "running.finish_reading(300)\n"
        "print(len(running.failures), flush=True)\n"
        "os._exit(0)\n"
    )
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    assert (ended.returncode, ended.stdout) == (0, "1\n")


def test_what_was_said_while_the_log_was_away_is_not_lost(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "from hpctrain.supervise.context import log_message\n"
        "log_message('while it is full')\n"
        f"os.dup2(os.open({str(tmp_path / 'log')!r}, os.O_WRONLY | os.O_CREAT), 2)\n"
        "log_message('when it is back')\n"
        "os._exit(0)\n"
    )
    with open("/dev/full", "w") as full:
        subprocess.run([sys.executable, "-c", program], stderr=full, timeout=60, check=True)
    log = (tmp_path / "log").read_text()
    assert [line.split(maxsplit=2)[2] for line in log.splitlines()] == [
        "while it is full",
        "when it is back",
    ]


def test_an_orphan_that_holds_the_pipe_does_not_hold_the_supervisor(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, pathlib\n"
        "orphan = subprocess.Popen(['sleep', '900'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(orphan.pid))\n"
        "sys.stderr.write('srun: error: n1: task 1: Killed\\n')\n"
    )
    running = launch(program)
    try:
        running.process.wait(PATIENCE_SECONDS)
        wait_until(lambda: running.failures)
        started = time.monotonic()
        running.finish_reading(0.3)
        assert 0.25 < time.monotonic() - started < 300
        assert len(running.failures) == 1
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_an_srun_that_ignores_signals_is_killed() -> None:
    running = launch(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "time.sleep(600)"
    )
    assert running.poll() is None
    running.kill()
    running.process.wait(PATIENCE_SECONDS)
    assert running.poll() == -9
    running.kill()  # a second time does no harm


def test_srun_gets_the_environment_and_no_stdin() -> None:
    running = SrunProcess(
        [
            sys.executable,
            "-I",
            "-c",
            "import os,sys; sys.exit(len(sys.stdin.read()) + int(os.environ['X']))",
        ],
        {"X": "9"},
    )
    assert running.process.wait(PATIENCE_SECONDS) == 9


@pytest.mark.parametrize(
    ("name", "final"), [("SIGUSR1", False), ("SIGTERM", True), ("SIGINT", True), ("SIGHUP", True)]
)
def test_signals_are_remembered(kept_signals: None, name: str, final: bool) -> None:
    signals = Signals()
    signals.install()
    assert (signals.names, signals.final) == ((), False)
    os.kill(os.getpid(), getattr(signal, name))
    assert (signals.names, signals.final) == ((name.removeprefix("SIG"),), final)


def test_signals_keep_their_order_and_usr2_is_for_ranks_only(kept_signals: None) -> None:
    signals = Signals()
    signals.install()
    for name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGUSR1"):
        os.kill(os.getpid(), getattr(signal, name))
    assert signals.names == ("USR1", "TERM", "USR1")


def test_signals_that_were_not_slurms_are_set_aside(kept_signals: None) -> None:
    """Each is taken once, and those that come later count again."""
    signals = Signals()
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    asked_at = len(signals.names)
    os.kill(os.getpid(), signal.SIGHUP)
    assert signals.take() == ("TERM", "HUP") and signals.take() == ()
    signals.dismiss(asked_at)
    assert (signals.final, signals.standing) == (True, ("HUP",)), "one came after the question"
    signals.dismiss(2)
    signals.dismiss(asked_at)
    assert (signals.final, signals.standing) == (False, ())
    assert signals.names == ("TERM", "HUP")
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.final and signals.take() == ("TERM",)


def test_a_signal_interrupts_neither_sleep_nor_reading(kept_signals: None) -> None:
    signals = Signals()
    signals.install()
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    while not signals.names:  # a late signal comes in one of the next sleeps
        started = time.monotonic()
        time.sleep(0.3)
        assert time.monotonic() - started >= 0.3
    timer.join()
    assert signals.names == ("TERM",)


def test_signals_held_back_during_start_arrive_later(kept_signals: None) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
    # To this thread only: others of the test process do not hold it back and would end it.
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    signals = Signals()
    signals.install()
    assert signals.names == ("USR1",)
    child = subprocess.run(["grep", "SigBlk", "/proc/self/status"], capture_output=True, text=True)
    assert int(child.stdout.split()[1], 16) == 0, "srun must not start with blocked signals"


def test_a_warning_before_the_supervisor_is_up_does_not_kill_it(tmp_path: Path) -> None:
    """A supervisor held at its first import: the job may be preempted right after its start."""
    gate = tmp_path / "supervisor_gate.py"
    gate.write_text(
        "import os, signal, sys\n"
        "class Gate:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'hpctrain.supervise.loop':\n"
        "            os.kill(os.getpid(), signal.SIGUSR1)\n"
        "sys.meta_path.insert(0, Gate())\n"
        "sys.argv = ['x', '--run-directory', '/nonexistent', '--', 'srun']\n"
        "import runpy; runpy.run_module('hpctrain.supervise', run_name='__main__')\n"
    )
    job = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n0", "PATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, gate], capture_output=True, text=True, timeout=60, env=job
    )
    assert ended.returncode == 1, ended.stderr
    assert "supervise.json cannot be read" in ended.stderr
    assert "stop: the run directory is away" in ended.stderr.splitlines()[-1]


def port_of(attempt: str, epoch: int) -> int:
    with reserve_port(attempt, epoch) as reserved:
        return int(reserved.getsockname()[1])


def test_ports_lie_below_the_ephemeral_range_and_above_those_of_a_sandbox() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {port_of(f"run {job}", epoch) for job in (1, 77, 4_000_000) for epoch in (1, 2, 3)}
    assert len(ports) == 9
    assert min(ports) > HIGHEST
    assert max(ports) < max(low, 30001)


@pytest.fixture
def own_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports of this worker alone: others reserve and release those of real launches meanwhile.

    Above the ports of launches, below the ephemeral ones.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    monkeypatch.setattr(reserved_ports, "FIRST", 30001 + 100 * (worker % 27))
    monkeypatch.setattr(reserved_ports, "COUNT", 100)


def test_two_launches_of_an_attempt_never_begin_at_one_number(own_ports: None) -> None:
    """`COUNT` of the ports is no multiple of the step between them."""
    for attempt in (f"runs/a {job}" for job in range(40)):
        assert port_of(attempt, 8) != port_of(attempt, 9)


def test_a_port_in_use_is_passed_over(own_ports: None) -> None:
    first = port_of("runs/a 123", 4)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        listener.listen()
        assert port_of("runs/a 123", 4) > first
    assert port_of("runs/a 123", 4) == first


def test_a_reserved_port_is_free_for_rank_0_and_for_nobody_else(own_ports: None) -> None:
    """Two launches whose search begins at one number, before either rank 0 listens."""
    with reserve_port("runs/a 123", 4) as reserved, socket.socket() as listener:
        first = reserved.getsockname()[1]
        assert port_of("runs/a 123", 4) > first
        listener.bind(("127.0.0.1", first))
        listener.listen()
    assert port_of("runs/a 123", 4) == first


def test_no_port_at_all_is_an_error(own_ports: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first = port_of("runs/a 1", 1)
    monkeypatch.setattr(reserved_ports, "FIRST", first)
    monkeypatch.setattr(reserved_ports, "COUNT", 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", first))
        with pytest.raises(OSError, match=f"no free port between {first} and {first}"):
            reserve_port("runs/a 1", 1)


# -- MASTER_ADDR and MASTER_PORT in the form that a site wants ----------------------------------


class Named(FakeSlurm):
    def node_address(self, node: str) -> str:
        self._present()
        return f"{node}-slurm"


@pytest.mark.parametrize(
    ("form", "expected"),
    [(None, "n1-slurm"), ("{node}i", "n1i"), ("{node}.ib.site", "n1.ib.site"), ("ip", "10.0.0.7")],
)
def test_the_form_that_the_site_wants(
    form: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(host: str, *_: object, **__: object) -> list[object]:
        assert host == "n1-slurm"
        return [(2, 1, 6, "", (ip, 0)) for ip in ("127.0.1.1", "10.0.0.7")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert master_address(Named(), "n1", form) == expected  # type: ignore[arg-type]


def test_without_an_answer_it_is_the_name_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    slurm = Named()
    slurm.away = True
    for form in (None, "ip"):
        assert master_address(slurm, "n1", form) == "n1"  # type: ignore[arg-type]


def test_the_port_is_one_that_the_site_allows(tmp_path: Path) -> None:
    with reserve_port(f"run {tmp_path}", 1) as usual:
        taken = usual.getsockname()[1]
        with pytest.raises(OSError, match=f"between {taken} and {taken}"):
            reserve_port("run", 1, (taken, taken))
        with reserve_port("run", 1, (taken, taken + 50)) as another:
            assert taken < another.getsockname()[1] <= taken + 50


@pytest.mark.parametrize(
    "network", ["ports: 80-90", "ports: 21000-20000", "ports: x", "master_address: '{node};id'"]
)
def test_what_is_no_form(tmp_path: Path, network: str) -> None:
    (tmp_path / "own.yaml").write_text(f"extends: sandbox\nname: own\nnetwork: {{{network}}}\n")
    with pytest.raises(InvalidInputError, match="expected") as caught:
        load_profile(tmp_path / "own.yaml")
    assert caught.value.problems[0].line == 3
