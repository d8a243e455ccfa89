"""CPU time of what people type on a login node, as a ratio to importing click and pydantic.

Seconds differ from machine to machine and with its load; the ratios of one run hardly do. Every
command is measured several times in turns with its peer; the medians are printed.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fabricated_runs import STARTED, SUBMITTED, fabricate  # noqa: E402

ROUNDS = 7
RUNS = 20
# `import pydantic` alone loads next to nothing: the first model pulls in the rest.
PEER = [sys.executable, "-c", "import click, pydantic; pydantic.BaseModel"]
MAIN = "from hpctrain.cli.main import main; main()"
FAKE = f"""
import hpctrain.slurm.client
from hpctrain.slurm.fake import FakeSlurm
hpctrain.slurm.client.SlurmClient = FakeSlurm
{MAIN}"""


def cpu_seconds(command: list[str], directory: Path, environment: dict[str, str]) -> float:
    """User and system time of one process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands() -> dict[str, list[str]]:
    """What is measured."""
    program = [sys.executable, "-c", MAIN]
    spec = str(ROOT / "examples/gpt175b.yaml")
    return {
        "--help": [*program, "--help"],
        f"status, {RUNS} runs, no Slurm": [*program, "status", "-a"],
        f"status, {RUNS} runs, Slurm": [sys.executable, "-c", FAKE, "status", "-a"],
        "submit --dry-run gpt175b": [
            *program,
            *("submit", "--profile", "a100x64", spec, "--dry-run"),
            *("--set", "data.sources=[]", "--set", "data.tokenizer=null"),
            *("--set", "data.made_up=true"),
        ],
    }


def main() -> int:
    """Print one line per command."""
    environment = {**os.environ, "PATH": "/nowhere", "NO_COLOR": "1"}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for number in range(RUNS):
            fabricate(directory / "runs", f"gpt-{number:04x}", [*SUBMITTED, STARTED], steps=64)
        print(f"{'command':28}  {'CPU s':>6}  {'peer s':>6}  {'ratio':>5}")
        for title, command in commands().items():
            pairs = [
                (
                    cpu_seconds(command, directory, environment),
                    cpu_seconds(PEER, directory, environment),
                )
                for _ in range(ROUNDS)
            ]
            own, peer = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(mine / other for mine, other in pairs)
            print(f"{title:28}  {own:6.3f}  {peer:6.3f}  {ratio:5.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
