"""The program itself on a pseudo-terminal, as over ssh: what it shows, keys, and how it leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, fabricate
from terminal_screen import TerminalScreen
from variants import varied
from waiting import wait_until

PATIENCE_SECONDS = 60.0
_ALTERNATE_SCREEN, _MOUSE = 1049, 1000


class Terminal:
    """`hpctrain top` in a terminal of 80x24, and somebody who types."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str]) -> None:
        self._leader, self.follower = pty.openpty()
        fcntl.ioctl(self.follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(self.follower)
        self.screen = TerminalScreen(80, 24)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpctrain", "top", *arguments],
            stdin=self.follower,
            stdout=self.follower,
            stderr=self.follower,
            env=dict(environment),
            start_new_session=True,
        )

    def read(self) -> None:
        while select.select([self._leader], [], [], 0.05)[0]:
            self.screen.feed(os.read(self._leader, 65536))

    def sees(self, *texts: str, without: str = "\0") -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(text in self.screen.text for text in texts) or without in self.screen.text:
            assert time.monotonic() < deadline, f"never {texts}:\n{self.screen.text}"
            self.read()

    def types(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def leaves(self) -> int:
        """Wait for the end; the terminal is as it was before."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "never left"
            self.read()
        self.read()
        assert termios.tcgetattr(self.follower) == self.before
        assert _ALTERNATE_SCREEN not in self.screen.modes and 25 in self.screen.modes
        return self.process.returncode

    def hang_up(self) -> None:
        """The window is closed, or the connection lost."""
        for descriptor in (self._leader, self.follower):
            if descriptor >= 0:
                os.close(descriptor)
        self._leader = self.follower = -1

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.hang_up()


@contextmanager
def terminal(runs: Path, *arguments: str, **variables: str) -> Iterator[Terminal]:
    kept = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    nothing = runs.parent / "no-programs"  # and so no Slurm
    nothing.mkdir(exist_ok=True)
    environment = {
        **kept,
        "PATH": str(nothing),
        "TERM": "xterm-256color",
        "COLUMNS": "90",
        **variables,
    }
    opened = Terminal(["--runs", str(runs), *arguments], environment)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    place = tmp_path / "runs"
    place.mkdir()
    for number in (1, 2):
        name = f"gpt-{number}111"
        run = fabricate(place, name, (*SUBMITTED, STARTED, LAUNCHED), steps=20 * number)
        (run.layout.logs / "slurm-1.out").write_text(f"the log of {name}\n")
    return place


TERMS = ("xterm", "xterm-256color", "screen", "tmux-256color", "linux")
ENDS: dict[str, str | signal.Signals] = {
    "ctrl-c": "\x03",
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGHUP": signal.SIGHUP,
}


@pytest.mark.parametrize("term", varied(TERMS, "xterm"))
def test_rows_keys_and_the_way_out(runs: Path, term: str) -> None:
    with terminal(runs, TERM=term) as seat:
        seat.sees("> gpt-1111", "  gpt-2111", "20/60 33%", "SLURM DOES NOT ANSWER", "step 1")
        assert _ALTERNATE_SCREEN in seat.screen.modes
        assert _MOUSE not in seat.screen.modes, "text can be marked with the mouse"
        assert ("⠉" in seat.screen.text) == (term != "linux")
        seat.types("\x1b[B")
        seat.sees("> gpt-2111", without="> gpt-1111")
        seat.types("l")
        seat.sees("the log of gpt-2111", "q back")
        seat.types("qd")
        seat.sees("Attempt 1", without="the log of")
        seat.types("q")
        seat.sees("> gpt-2111")
        seat.types("q")
        assert seat.leaves() == 0


@pytest.mark.parametrize("end", varied(ENDS, "SIGTERM"))
def test_every_way_out_restores_the_terminal(runs: Path, end: str) -> None:
    how = ENDS[end]
    with terminal(runs) as seat:
        seat.sees("> gpt-1111")
        if isinstance(how, str):
            seat.types(how)
        else:
            seat.process.send_signal(how)
        assert seat.leaves() == 0


def test_it_ends_when_its_terminal_is_gone(runs: Path) -> None:
    """Without the signal, which only a controlling terminal sends: nobody asks Slurm for ever."""
    with terminal(runs) as seat:
        seat.sees("> gpt-1111")
        seat.hang_up()
        assert seat.process.wait(PATIENCE_SECONDS) in (0, 1)


@pytest.mark.variant("test_rows_keys_and_the_way_out")
def test_no_color_means_none(runs: Path) -> None:
    for variables, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with terminal(runs, **variables) as seat:
            seat.sees("> gpt-1111", "UNKNOWN")
            codes = {
                int(number or 0)
                for code in seat.screen.codes_of_colours
                for number in code.split(";")
            }
            used = {one for one in codes if 30 <= one <= 38 or 40 <= one <= 48 or 90 <= one <= 107}
            assert bool(used) == coloured, used
            assert not used & {38, 48}, "the sixteen colours of the terminal only"
            seat.types("q")
            assert seat.leaves() == 0


def test_control_z_gives_the_shell_back_and_fg_returns(runs: Path) -> None:
    with terminal(runs) as seat:
        seat.sees("> gpt-1111")
        seat.types("\x1a")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while _ALTERNATE_SCREEN in seat.screen.modes:
            assert time.monotonic() < deadline, "never left the screen"
            seat.read()
        seat.screen = TerminalScreen(80, 24)
        stat = Path(f"/proc/{seat.process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "stopped")
        seat.process.send_signal(signal.SIGCONT)
        seat.sees("> gpt-1111")
        seat.types("q")
        assert seat.leaves() == 0
