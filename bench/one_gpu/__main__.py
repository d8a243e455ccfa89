"""What the planner says of jobs on one GPU, against what the trainer does on a real one.

Each job is planned for the profile, trained for some steps by `python -m hpctrain.train`, and
measured as every run is: the median step after the first four, the peak of allocated memory and the
peak of what PyTorch has taken from the GPU (reserved). The planner's memory is without what the
profile reserves for driver and libraries, and with the allocator's slack. A ratio above 1: the
planner says more.

    python -m bench.one_gpu [NAME ...] [--profile bench/one_gpu/h200x1.yaml]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.one_gpu.jobs import CASES, Case
from bench.prefork import free_port
from hpctrain.actions.plan import load, plan_option
from hpctrain.engines.documents import train_config
from hpctrain.errors import HpctrainError
from hpctrain.plan.documents import Plan
from hpctrain.store.layout import RunLayout
from hpctrain.store.run_records import RankTimes, read_metrics, read_record

HERE = Path(__file__).parent
STEPS, WARM_UP = 12, 4
GIB = 2**30
LIMIT_SECONDS = 300.0


@dataclass(frozen=True)
class Found:
    """What one run did: seconds per step, bytes."""

    seconds: float
    allocated: int
    reserved: int


def planned(case: Case, profile: str, run: RunLayout) -> Plan:
    """The plan; the trainer's document lies in the run directory. Raises HpctrainError."""
    inputs = load(HERE / "base.yaml", profile, case.settings)
    option = plan_option(inputs, "time")
    if option.refusal is not None:
        raise option.refusal
    assert option.decision is not None
    plan, peak = option.decision.plan, inputs.profile.gpu.peak.get(inputs.spec.precision)
    config = train_config(option.decision.request.spec, plan, None if peak is None else float(peak))
    frequent = config.model_copy(update={"rank_times_interval_steps": STEPS - WARM_UP})
    run.create()
    run.train_config.write_text(frequent.model_dump_json())
    return plan


def trained(run: RunLayout) -> Found | None:
    """One launch; None where it failed, which is shown."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": str(os.cpu_count())}
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.train", str(run.train_config)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    times = read_record(run.rank_times, RankTimes)
    seconds = [row.step_seconds for row in read_metrics(run) if row.step > WARM_UP]
    if times is None or not seconds:
        print(f"exit code {done.returncode}\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
        return None
    assert times.peak_memory_bytes and times.reserved_memory_bytes
    return Found(
        statistics.median(seconds), times.peak_memory_bytes[0], times.reserved_memory_bytes[0]
    )


def told(case: Case, plan: Plan, found: Found) -> str:
    memory = plan.memory[0]
    said = memory.total_bytes - memory.reserved_bytes
    assert plan.step_seconds is not None
    return (
        f"{case.name:24}{plan.step_seconds:8.3f} s{found.seconds:8.3f} s"
        f"{plan.step_seconds / found.seconds:7.2f}"
        f"{said / GIB:9.1f}{found.allocated / GIB:9.1f}{found.reserved / GIB:9.1f} GiB"
        f"{said / found.reserved:7.2f}"
    )


def compared(case: Case, profile: str) -> str | None:
    with tempfile.TemporaryDirectory() as name:
        run = RunLayout(Path(name) / "run")
        try:
            plan = planned(case, profile, run)
        except HpctrainError as error:
            print(f"{case.name:24}{error}")
            return None
        found = trained(run)
        return None if found is None else told(case, plan, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--profile", default=str(HERE / "h200x1.yaml"))
    options = parser.parse_args()
    if unknown := set(options.names) - {case.name for case in CASES}:
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    print(
        f"{'job':24}{'planned':>10}{'measured':>10}{'ratio':>7}"
        f"{'planned':>9}{'alloc.':>9}{'reserved':>13}{'ratio':>7}"
    )
    good = True
    for case in CASES:
        if not options.names or case.name in options.names:
            row = compared(case, options.profile)
            good = row is not None and good
            print(row or f"{case.name:24} failed", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
