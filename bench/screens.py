"""Pictures of what people see on a terminal of 80 columns: docs/images/screen-*.svg.

Each picture is one command on a pseudo-terminal, beside a real Slurm with four runs: one trains,
one is done, one has failed, and one waits to be started by hand. Times are those of this machine.

    python -m bench.screens
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from bench.rehearsals import MADE_UP, Stage, TerminalScreen, own_stage
from hpctrain.runs.state import RunState

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "images"
COLUMNS, LINES = 80, 24
_PATIENCE_SECONDS = 60.0
_ENDLESS = ("budget.steps=100000", "checkpoint.every_steps=20")
# A terminal as it is, without the fonts that rich would fetch from elsewhere.
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{ font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>{lines}</defs>
<rect fill="#0c0c0c" width="100%" height="100%" rx="8"/>
<g transform="translate({terminal_x}, {terminal_y})">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def screen(words: list[str], environment: Mapping[str, str], directory: Path) -> str:
    """Run a command on a terminal; return all that it shows, with the codes of colours."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", *words],
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=subprocess.DEVNULL,  # `busy` lines, which go away
        cwd=directory,
        env=dict(environment),
    )
    os.close(follower)
    shown = b"".join(_read(leader))
    os.close(leader)
    assert process.wait() == 0, f"hpctrain {' '.join(words)}\n{shown.decode()}"
    return shown.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(descriptor, 65536)
        except OSError:  # EIO: the command has ended
            return
        if not data:
            return
        yield data


def picture(words: list[str], shown: str) -> str:
    """Draw a command and what it showed."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(Text(f"$ hpctrain {' '.join(words)}", style="bold"))
    console.print(Text.from_ansi(shown.rstrip("\n")))
    return console.export_svg(theme=MONOKAI, code_format=_FORMAT, unique_id="screen", title="")


def runs_of(stage: Stage, environment: Mapping[str, str]) -> tuple[str, str]:
    """Start the four runs; return the names of the one that trains and of the one that failed."""
    done = stage.start("name=gpt-1b", MADE_UP)
    done.wait_till_over()
    failed = stage.start("name=llama-7b", MADE_UP, "optimizer.lr=1e30", "optimizer.min_lr=0")
    failed.wait_until(lambda row: row.state is RunState.FAILED, "failed")
    trains = stage.start(
        "name=gpt-13b", MADE_UP, "budget.steps=100000", "checkpoint.every_steps=20"
    )
    trains.wait_for_step(60)
    _, place = stage.prepared("name=gpt-175b")
    words = ["-p", str(place / "profile.yaml"), str(place / "rehearsal.yaml"), "--prepare", "-y"]
    screen(["submit", *words, "--set", "name=gpt-175b", "--set", MADE_UP], environment, ROOT)
    return trains.run.run_id, failed.run.run_id


def live_screen(words: list[str], environment: Mapping[str, str], until: str) -> str:
    """Run `top` on a terminal until it shows a text; return the screen with its colours."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "hpctrain", *words],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=ROOT,
        env=dict(environment),
        start_new_session=True,
    )
    os.close(follower)
    seen, deadline = TerminalScreen(COLUMNS, LINES), time.monotonic() + _PATIENCE_SECONDS
    while until not in seen.text:
        assert time.monotonic() < deadline, f"never {until}:\n{seen.text}"
        seen.feed(os.read(leader, 65536))
    os.write(leader, b"q")
    shown = seen.coloured_text
    for _ in _read(leader):
        pass  # what restores the terminal
    assert process.wait() == 0
    os.close(leader)
    return shown


def main() -> int:
    """Write the pictures, and print their paths."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    with own_stage() as stage:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
            **stage.sandbox.environment(),
            "HPCTRAIN_RUNS": str(stage.runs),
            "TERM": "xterm-256color",
            "COLUMNS": str(COLUMNS),
            "PYTHONPATH": str(ROOT),
        }
        trains, failed = runs_of(stage, environment)
        shown = {
            "status": ["status", "-a"],
            "page": ["status", trains],
            "errors": ["logs", "--errors", failed],
            "why": ["why", failed],
            "plan": ["plan", "-p", "a100x64", "examples/gpt175b.yaml"],
        }
        for name, words in shown.items():
            path = PICTURES / f"screen-{name}.svg"
            path.write_text(picture(words, screen(words, environment, ROOT)))
            print(path.relative_to(ROOT))
        words = ["top", "--all"]
        path = PICTURES / "screen-top.svg"
        path.write_text(picture(words, live_screen(words, environment, "step 1 ")))
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
