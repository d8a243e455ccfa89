"""What the supervisor costs: memory, CPU time, calls of Slurm, and the step beside it.

One rehearsal trains; for some minutes its supervisor is stopped (SIGSTOP) and let go on in short
turns, so that a step with it and a step without it see the same machine. The ratio is the median
of all pairs of turns, its interval holds the true median with 95 %. Slurm's commands are counted by
small scripts in front of them in the job's PATH. Exit code 1 above the limits: 60 MB resident,
1 % of a step (beyond doubt: the whole interval), two calls per minute.

    python -m bench.supervisor_cost [--blocks 120] [--seconds 1.5]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

from bench.pairs import ratio
from bench.rehearsals import MADE_UP, Rehearsal, Stage, own_stage
from hpctrain.records.run_records import read_metrics

LIMIT_BYTES = 60e6
LIMIT_RATIO = 1.01
LIMIT_CALLS_PER_MINUTE = 2.0
COMMANDS = ("squeue", "scontrol", "sacct", "scancel", "sinfo", "sbatch")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def counting_commands(directory: Path, log: Path) -> Path:
    """Scripts that write down that they were called, and then are what they stand for."""
    directory.mkdir()
    for name in COMMANDS:
        real = shutil.which(name)
        assert real, f"{name} is not installed"
        script = directory / name
        script.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\nexec {real} "$@"\n')
        script.chmod(0o755)
    return directory


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no VmRSS")


def cpu_seconds(pid: int) -> float:
    """User and system time, with children that have ended: proc(5), stat, fields 14 to 17."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS_PER_SECOND


def block(rehearsal: Rehearsal, seconds: float) -> float:
    """The median step of the next `seconds` seconds."""
    began_at = time.time()
    time.sleep(seconds)
    rows = [row for row in read_metrics(rehearsal.run.layout) if row.time > began_at]
    return statistics.median(row.step_seconds for row in rows)


def compare(rehearsal: Rehearsal, pid: int, blocks: int, seconds: float) -> list[float]:
    """Ratios of steps with the supervisor to steps without it, of neighbouring blocks."""
    ratios = []
    for number in range(blocks):
        values = {}
        for running in (True, False) if number % 2 else (False, True):
            os.kill(pid, signal.SIGCONT if running else signal.SIGSTOP)
            values[running] = block(rehearsal, seconds)
        os.kill(pid, signal.SIGCONT)
        ratios.append(values[True] / values[False])
    return ratios


def watch_alone(pid: int, log: Path, seconds: float) -> tuple[float, float]:
    """CPU seconds per second, and calls of Slurm per minute, while nothing happens."""
    calls, spent = count(log), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - spent) / seconds, (count(log) - calls) / seconds * 60


def count(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def start(stage: Stage, shims: Path) -> Rehearsal:
    path = f"environment.variables.PATH={shims}:{os.environ['PATH']}"
    return stage.start(
        "name=cost", "budget.steps=1000000", MADE_UP, "checkpoint.every_steps=1000", path
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=1.5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with own_stage() as stage:
        log = stage.directory / "calls"
        rehearsal = start(stage, counting_commands(stage.directory / "bin", log))
        rehearsal.wait_for_step(50)
        found = [p.pid for p in rehearsal.processes() if "hpctrain.supervise" in p.command_line]
        share, calls_per_minute = watch_alone(found[0], log, 60.0)
        ratios = compare(rehearsal, found[0], options.blocks, options.seconds)
        size_bytes = resident_bytes(found[0])
        return report(size_bytes, share, calls_per_minute, ratios)


def report(size_bytes: int, share: float, calls_per_minute: float, ratios: list[float]) -> int:
    step = ratio(ratios)
    print(f"memory        {size_bytes / 1e6:6.1f} MB resident (limit {LIMIT_BYTES / 1e6:.0f})")
    print(f"CPU           {share * 100:6.2f} % of one core")
    print(
        f"calls         {calls_per_minute:6.2f} of Slurm per minute while it watches "
        f"(limit {LIMIT_CALLS_PER_MINUTE:.0f})"
    )
    print(f"step          {step} with / without (limit {LIMIT_RATIO})")
    good = size_bytes <= LIMIT_BYTES and step.low <= LIMIT_RATIO
    return 0 if good and calls_per_minute <= LIMIT_CALLS_PER_MINUTE else 1


if __name__ == "__main__":
    sys.exit(main())
