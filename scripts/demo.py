"""`make demo`: a real Megatron job on a real Slurm loses its nodes and finishes exactly.

Starts a four-node Slurm on this machine, makes a dataset from real text, trains the same small
GPT (TP 2 x PP 2 over two nodes) twice, the second time with an urgent job that preempts it in the
middle, and compares the losses of all steps bit by bit.

    demo.py [--slurm RELEASE|DIRECTORY]     another Slurm, as `hpctrain sandbox up --slurm`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.job.datasets import DatasetRequest, prepare_dataset
from hpctrain.job.prepare import prepare
from hpctrain.job.submit import submit
from hpctrain.page.output import table
from hpctrain.records.find import RunFiles, find_run
from hpctrain.records.ledger import EventKind
from hpctrain.runs.bitwise import BitwiseComparison, compare_runs
from hpctrain.runs.state import RunState
from hpctrain.runs.status import RunStatus, statuses
from hpctrain.sandbox.debian import fetch_slurm
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import shape_from_profile
from hpctrain.slurm.client import SlurmClient
from hpctrain.spec.loader import find_profile, load_profile

SPEC = Path("examples/gpt-tiny.yaml")
PROFILE = "sandbox"
HOME = Path(".demo")
SLURMS = Path(".slurm")
DATA = Path("data/text")
PREEMPT_AT_STEP = 20
PATIENCE_SECONDS = 600.0
URGENT_SECONDS = 6


def main() -> int:
    """Run the demo; 0 only if the run was preempted, lost no step and repeated every loss."""
    parser = argparse.ArgumentParser(description="A real job loses its nodes and finishes exactly.")
    parser.add_argument("--slurm", metavar="RELEASE|DIRECTORY")
    slurm = parser.parse_args().slurm
    os.chdir(Path(__file__).resolve().parent.parent)
    tell("1/5", f"dataset from real text: the source of Python's standard library, {DATA}.bin")
    text = DatasetRequest(output=DATA, builtin="stdlib", vocab_size=1024, max_bytes=2_000_000)
    prepare_dataset(text)
    sandbox = start_sandbox(None if slurm is None else fetch_slurm(slurm, SLURMS))
    try:
        os.environ.update(sandbox.environment())
        return rehearse(SlurmClient(), HOME / "runs" / time.strftime("%Y%m%d-%H%M%S"))
    finally:
        sandbox.down()


def start_sandbox(slurm: Path | None) -> Sandbox:
    """A fresh Slurm in the shape of the profile; one that an interrupted demo left is removed."""
    shape = shape_from_profile(load_profile(find_profile(PROFILE)).document)
    tell("2/5", f"a real Slurm: slurmctld, munged and {shape.nodes} slurmds on this machine")
    directory = HOME / "sandbox"
    HOME.mkdir(exist_ok=True)
    with contextlib.suppress(UsageError):
        Sandbox.open(directory).down()
    sandbox = Sandbox.create(directory, shape, slurm)
    sandbox.up()
    return sandbox


def rehearse(slurm: SlurmClient, runs: Path) -> int:
    """Both runs, then the comparison."""
    tell("3/5", f"{SPEC} without interruption: real megatron-core, TP 2 x PP 2 over 2 nodes")
    reference = start(slurm, runs, "uninterrupted")
    wait_until(slurm, reference, lambda row: row.state.over)
    tell("4/5", f"the same run, preempted by an urgent job after step {PREEMPT_AT_STEP}")
    run = start(slurm, runs, "preempted")
    wait_until(slurm, run, lambda row: (row.step or 0) >= PREEMPT_AT_STEP or row.state.over)
    preempt(slurm)
    wait_until(slurm, run, lambda row: row.state.over)
    wait_until(slurm, run, lambda row: is_recorded(run))
    tell("5/5", "what happened")
    return summarise(
        run, compare_runs(reference, run), [status(slurm, r) for r in (reference, run)]
    )


def start(slurm: SlurmClient, runs: Path, name: str) -> RunFiles:
    """Submit the example under another name."""
    prepared = prepare(SPEC, PROFILE, [f"name={name}"], runs=runs)
    submitted = submit(prepared, runs, slurm)
    say(f"submitted run {submitted.run_id} as job {submitted.job_id}")
    return find_run(runs, submitted.run_id)


def preempt(slurm: SlurmClient) -> None:
    """An urgent job that wants every node; Slurm takes them from the run after its grace time."""
    options = "-J urgent -p urgent -N4 --exclusive -t 2 -o /dev/null"
    job = slurm.submit(f"#!/bin/sh\n#SBATCH {options}\nsleep {URGENT_SECONDS}\n")
    say(f"urgent job {job.job_id} asks for all four nodes: Slurm preempts the run")


def status(slurm: SlurmClient, run: RunFiles) -> RunStatus:
    return statuses([run], slurm)[0]


def wait_until(slurm: SlurmClient, run: RunFiles, reached: object) -> None:
    """Wait, telling changes. Raises HpctrainError when it takes too long or the run fails."""
    assert callable(reached)
    deadline = time.monotonic() + PATIENCE_SECONDS
    last = ""
    while time.monotonic() < deadline:
        row = status(slurm, run)
        now = f"{row.state.value.lower()}{': ' + row.reason if row.reason else ''}"
        if now != last:
            step = "" if row.step is None else f" at step {row.step}/{row.target_step}"
            say(f"{row.run_id} is {now}{step}")
            last = now
        if reached(row):
            return
        time.sleep(0.5)
    raise HpctrainError(
        f"run {run.run_id} did not get there within {PATIENCE_SECONDS:.0f} s",
        hint=f"look into {run.layout.logs}",
    )


def is_recorded(run: RunFiles) -> bool:
    """Whether the supervisor has written down how every launch ended; a run is done before that."""
    kinds = [event.event for event in run.ledger.events()]
    return kinds.count(EventKind.LAUNCH_ENDED) >= kinds.count(EventKind.LAUNCH_STARTED)


def summarise(run: RunFiles, result: BitwiseComparison, rows: list[RunStatus]) -> int:
    """Print the attempts and the verdict."""
    table(
        ["ATTEMPT", "STEPS", "LOSS", "ENDED", "WHY"],
        [
            [
                str(launch.number),
                f"{launch.first_step}-{launch.last_step}",
                f"{launch.first_loss:.4f} -> {launch.last_loss:.4f}",
                launch.cause,
                launch.reason,
            ]
            for launch in result.launches
        ],
    )
    preempted = any(
        event.event is EventKind.LAUNCH_ENDED and event.cause == "preempted"
        for event in run.ledger.events()
    )
    done = all(row.state is RunState.DONE for row in rows)
    say(f"run directory: {os.path.relpath(run.layout.directory)}")
    print(f"both runs done: {'yes' if done else 'no'}")
    print(f"preempted and resumed: {'yes' if preempted and len(result.launches) > 1 else 'no'}")
    print(f"steps compared: {result.steps_compared}")
    print(f"steps lost: {result.steps_lost}")
    print(f"loss identical: {'yes' if result.identical else 'no'}")
    if result.first_difference:
        print(f"first difference: {result.first_difference}")
    good = done and preempted and result.identical and result.steps_lost == 0
    return 0 if good else 1


def tell(number: str, text: str) -> None:
    print(f"\n[{number}] {text}", flush=True)


def say(text: str) -> None:
    print(f"      {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except HpctrainError as error:
        print(f"error: {error}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
    except subprocess.CalledProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
