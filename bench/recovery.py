"""How long a run stands still after a fault, against a cold start of the bare trainer.

Three kinds, in turns, so that whatever else the machine does hits all of them: `cold` is plain
`srun` of the trainer in an allocation that is there (no supervisor, no checkpoint), from srun to
the end of the first step; `relaunch` is from the kill of a rank to the end of the first new step
in the same allocation; `requeue` the same by way of the queue. Slurm lets every requeued job wait
for cred_expire + 1 s (6 s here, 121 s by default) whatever we do: shown apart. Printed: the median
of each, and its ratio to `cold`.

    python -m bench.recovery [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable

from bench.rehearsals import MADE_UP, Rehearsal, Stage, own_stage
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import read_metrics

# Far more steps than the benchmark trains.
STEPS = 100_000
LONG = (f"budget.steps={STEPS}", MADE_UP, "supervise.storm_failures=100000")
# hpctrain.sandbox.config: cred_expire=5, and slurmctld adds a second.
QUEUE_SECONDS = 6.0
PATIENCE_SECONDS = 300.0


def cold_start(stage: Stage, rehearsal: Rehearsal, number: int) -> float:
    """Seconds from a plain srun of the trainer to the end of its first step, in a job of its own
    that has its nodes already."""
    run = RunLayout(stage.directory / f"bare{number}")
    run.create()
    shutil.copy(rehearsal.run.layout.train_config, run.train_config)
    claim_epoch(run.epochs, "bench")
    trainer = f"{shlex.quote(sys.executable)} -m hpctrain.train {run.train_config}"
    script = "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH -N2 -n2 --ntasks-per-node=1 -t 10 -J bare",
            f"#SBATCH -o {run.logs}/bare.out --chdir={run.directory}",
            "export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 HPCTRAIN_EPOCH=1",
            f"export MASTER_ADDR=127.0.0.1 MASTER_PORT={31000 + number}",
            f"date +%s.%N > {run.directory}/began",
            f"exec srun --mpi=none {trainer}",
        ]
    )
    job = stage.slurm.submit(script + "\n")
    wait(lambda: bool(read_metrics(run)), f"a first step; see {run.logs}")
    seconds = read_metrics(run)[0].time - float((run.directory / "began").read_text())
    stage.slurm.cancel(job.job_id)
    wait(lambda: ended(stage, job.job_id), "the end of the bare job")
    return seconds


def relaunch(rehearsal: Rehearsal) -> float:
    """Seconds from the kill of a rank to the end of the first new step, in place."""
    return recovered(rehearsal, lambda: rehearsal.kill_rank(1))


def requeue(rehearsal: Rehearsal) -> float:
    """The same when the job goes back into the queue."""
    job = str(rehearsal.job_id)
    return recovered(rehearsal, lambda: rehearsal.sandbox.command("scontrol", "requeue", job))


def recovered(rehearsal: Rehearsal, strike: Callable[[], object]) -> float:
    epoch = rehearsal.wait_for_progress()
    began_at = time.time()
    strike()
    wait(lambda: rehearsal.epoch > epoch and bool(rehearsal.rows(rehearsal.epoch)), "a new step")
    return rehearsal.rows(rehearsal.epoch)[0].time - began_at


def wait(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.1)


def ended(stage: Stage, job_id: int) -> bool:
    record = stage.slurm.show_job(job_id)
    return record is None or record.state.is_ended


def parts_of_relaunch(rehearsal: Rehearsal) -> dict[str, float]:
    """Seconds of the parts of the relaunch from launch 1 to launch 2."""
    ended_at = rehearsal.events(EventKind.LAUNCH_ENDED)[0].time
    launched_at = rehearsal.events(EventKind.LAUNCH_STARTED)[1].time
    return {
        "from the last step to the verdict": ended_at - rehearsal.rows(1)[-1].time,
        "from the verdict to srun": launched_at - ended_at,
        "from srun to the first step": rehearsal.rows(2)[0].time - launched_at,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds: dict[str, list[float]] = {"cold": [], "relaunch": [], "requeue": []}
    parts: list[dict[str, float]] = []
    with own_stage() as stage:
        for number in range(options.rounds):
            rehearsal = stage.start(f"name=recovery{number}", *LONG)
            seconds["relaunch"].append(relaunch(rehearsal))
            parts.append(parts_of_relaunch(rehearsal))
            seconds["requeue"].append(requeue(rehearsal))
            stage.slurm.cancel(rehearsal.job_id)
            wait(lambda job=rehearsal.job_id: ended(stage, job), "the end of the run")
            seconds["cold"].append(cold_start(stage, rehearsal, number))
    return report(seconds, parts)


def report(seconds: dict[str, list[float]], parts: list[dict[str, float]]) -> int:
    cold = statistics.median(seconds["cold"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        spread = f"{min(values):.1f} to {max(values):.1f} s of {len(values)}"
        print(f"{name:10} median {middle:6.1f} s ({spread}), {middle / cold:5.2f} x cold start")
    beyond = statistics.median(seconds["requeue"]) - QUEUE_SECONDS
    print(
        f"requeue without Slurm's wait of {QUEUE_SECONDS:.0f} s: {beyond / cold:.2f} x cold start"
    )
    print("a relaunch in place, in parts:")
    for name in parts[0]:
        print(f"  {statistics.median(one[name] for one in parts):6.1f} s {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
