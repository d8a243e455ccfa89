"""The live view beside a run on a real Slurm: a save and a stop by its keys."""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fcntl import ioctl

import pytest
from rehearsal import MADE_UP, PATIENCE_SECONDS, Rehearsal, Stage
from terminal_screen import TerminalScreen

from hpctrain.checkpoints.publish import published_steps
from hpctrain.runs.state import RunState

pytestmark = pytest.mark.stand_in

# Only people end it, and only people save.
_ENDLESS = ("budget.steps=100000", "checkpoint.every_steps=100000")


class Watcher:
    """Somebody who has `hpctrain top` in a terminal of 80x24."""

    def __init__(self, leader: int) -> None:
        self._leader, self.screen = leader, TerminalScreen(80, 24)

    def types(self, keys: str) -> None:
        os.write(self._leader, keys.encode())

    def sees(self, *texts: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not all(text in self.screen.text for text in texts):
            assert time.monotonic() < deadline, f"never {texts}:\n{self.screen.text}"
            if select.select([self._leader], [], [], 0.2)[0]:
                self.screen.feed(os.read(self._leader, 65536))


@contextmanager
def watching(rehearsal: Rehearsal) -> Iterator[tuple[Watcher, subprocess.Popen[bytes]]]:
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", "top", "--every", "1s"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={
            **os.environ,
            **rehearsal.sandbox.environment(),
            "HPCTRAIN_RUNS": str(rehearsal.run.layout.directory.parent),
            "TERM": "xterm",
        },
        start_new_session=True,
    )
    try:
        yield Watcher(leader), process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(leader)
        os.close(follower)


def test_a_run_is_saved_and_stopped_by_keys(stage: Stage) -> None:
    rehearsal = stage.start("name=live", MADE_UP, *_ENDLESS)
    rehearsal.wait_for_step(3)
    layout = rehearsal.run.layout
    with watching(rehearsal) as (person, process):
        person.sees("running", f"> {rehearsal.run.run_id}", "RUNNING", "step 1")
        person.types("sy")
        person.sees("Asked run")
        rehearsal.wait_for_checkpoint(1)
        saved = published_steps(layout.checkpoints)[-1]
        person.sees(f"step {saved:,} saved")
        person.types("Stest is over\ry")
        person.sees("Asked run", "to stop")
        row = rehearsal.wait_till_over()
        assert row.state is RunState.STOPPED and "test is over" in layout.ledger.read_text()
        person.sees("STOPPED", " stopped")
        person.types("q")
        deadline = time.monotonic() + PATIENCE_SECONDS
        while process.poll() is None:
            assert time.monotonic() < deadline, "never left"
            time.sleep(0.05)
        assert process.returncode == 0
    assert published_steps(layout.checkpoints)[-1] > saved, "it stops with a save"
