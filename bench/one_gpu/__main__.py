"""What the planner says of jobs on one GPU, against what the trainer does on a real one.

Each job is planned for the profile, trained for some steps by `python -m hpctrain.train`, and
measured as every run is: the median step after the first four, the peak of allocated memory and the
peak of what PyTorch has taken from the GPU (reserved). The planner's memory is without what the
profile reserves for driver and libraries, and with the allocator's slack. A ratio above 1: the
planner says more.

A job that does not fit the profile's GPU is planned with half of its micro-batch, until it does.
The GPU has to be the profile's: one of 80 GB must not get jobs planned for 141 GB.

    python -m bench.one_gpu [NAME ...] --profile bench/one_gpu/h200x1.yaml [--result FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.free_ports import free_port
from bench.gpu.planned_spec import planned_spec
from bench.one_gpu.jobs import CASES, Case
from hpctrain.base.errors import DoesNotFitError, HpctrainError
from hpctrain.engines.train_json import train_config
from hpctrain.job.plan import load, plan_option
from hpctrain.plan.documents import Plan
from hpctrain.records.gpu_report import StepTime
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import RankTimes, read_metrics, read_record
from hpctrain.spec.catalogue import MEMORY_TOLERANCE
from hpctrain.spec.loader import load_named_profile
from hpctrain.spec.profile import ClusterProfile

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


@dataclass(frozen=True)
class Planned:
    """A plan and its spec, made explicit as JSON."""

    plan: Plan
    spec: str


def planned(case: Case, profile: str, run: RunLayout) -> Planned:
    """Plan with the largest micro-batch up to the case's that fits, and write `train.json`.

    Raises HpctrainError where none fits.
    """
    micro = case.micro
    while True:
        inputs = load(HERE / "base.yaml", profile, case.settings_with(micro))
        option = plan_option(inputs, "time")
        if option.refusal is None:
            break
        if not isinstance(option.refusal, DoesNotFitError) or micro == 1:
            raise option.refusal
        micro //= 2
    assert option.decision is not None
    plan, config = option.decision.plan, train_config(option.decision.job)
    frequent = config.model_copy(update={"rank_times_interval_steps": STEPS - WARM_UP})
    run.create()
    run.train_config.write_text(frequent.model_dump_json())
    return Planned(plan, planned_spec(option.decision.request.spec, plan))


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
    name = f"{case.name}, micro {plan.batch.micro_batch}"
    return (
        f"{name:32}{plan.step_seconds:8.3f} s{found.seconds:8.3f} s"
        f"{plan.step_seconds / found.seconds:7.2f}"
        f"{said / GIB:9.1f}{found.allocated / GIB:9.1f}{found.reserved / GIB:9.1f} GiB"
        f"{said / found.reserved:7.2f}"
    )


def compared(case: Case, profile: str, steps: list[StepTime]) -> str | None:
    """Plan and train one job: its line, None where it failed; a measured one joins `steps`."""
    with tempfile.TemporaryDirectory() as name:
        run = RunLayout(Path(name) / "run")
        try:
            made = planned(case, profile, run)
        except DoesNotFitError as error:
            return f"{case.name:32}not run: {str(error).splitlines()[0]}"
        except HpctrainError as error:
            print(f"{case.name:32}{error}")
            return None
        found = trained(run)
        if found is None:
            return None
        assert made.plan.step_seconds is not None
        steps.append(
            StepTime(
                name=case.name,
                spec=made.spec,
                gpus=1,
                nodes=1,
                planned_seconds=made.plan.step_seconds,
                measured_seconds=found.seconds,
            )
        )
        return told(case, made.plan, found)


def other_gpu(profile: ClusterProfile, memory_bytes: int | None) -> str | None:
    """Return why this machine's GPU is not the profile's; None if it is, or a CPU takes its place.

    Memory identifies it: no two GPUs of one name are nearer than `MEMORY_TOLERANCE`.
    """
    if profile.gpu.emulated:
        return None
    if memory_bytes is None:
        return "there is no usable GPU: `make gpu RUNG=1` says why"
    wanted = float(profile.gpu.memory)
    if abs(memory_bytes / wanted - 1) <= MEMORY_TOLERANCE:
        return None
    return (
        f"the GPU has {memory_bytes / GIB:.0f} GiB, and profile {profile.name} plans for "
        f"{wanted / GIB:.0f} GiB: give the profile of this machine"
    )


def memory_of_gpu() -> int | None:
    """Read the memory of GPU 0 in a process of its own; None where it cannot be used."""
    ask = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=False
    )
    return int(done.stdout) if done.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--profile", required=True, help="that of this machine: name or file")
    parser.add_argument("--result", type=Path, help="write the step times there, as JSON")
    options = parser.parse_args()
    if unknown := set(options.names) - {case.name for case in CASES}:
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    profile = load_named_profile(options.profile).document
    problem = other_gpu(profile, memory_of_gpu())
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    print(
        f"{'job':32}{'planned':>10}{'measured':>10}{'ratio':>7}"
        f"{'planned':>9}{'alloc.':>9}{'reserved':>13}{'ratio':>7}"
    )
    good, steps = True, list[StepTime]()
    for case in CASES:
        if not options.names or case.name in options.names:
            row = compared(case, options.profile, steps)
            good = row is not None and good
            print(row or f"{case.name:32}failed", flush=True)
            if options.result is not None:  # after each: the time on a GPU may end at any job
                documents = [step.model_dump(mode="json") for step in steps]
                options.result.write_text(json.dumps(documents))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
