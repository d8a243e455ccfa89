"""Faults of both tables at random, several runs at a time: exact, ended as asked, told truly?

Small Megatron jobs train on a real Slurm under N strikes (seeded; each run has dice of its own):
once undisturbed, then several at a time, beside another cluster with the same job ids and a user
who may not read the runs. All the while `hpctrain status` is asked, here and there. Printed:
every strike with what it cost, the account of the wall time of each run, and three answers. Exit
code 1 unless all losses and the final weights are equal bit by bit, nothing ended that nobody had
ended, nothing was left behind, and no statement was false.

    python -m bench.chaos [--strikes 100] [--seed 1] [--at-a-time 3] [--only NAME]...
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.rehearsals import MADE_UP, Stage, own_sandbox

import storm_report  # isort: skip
from another_user import another_user_attending, public_directory  # isort: skip
from other_cluster import OtherCluster, other_shape  # isort: skip
from storm import EVALUATIONS, Struck, draw, rage, steps_for  # isort: skip
from storm_witness import Witness  # isort: skip
from strikes import BY_NAME, CANCELS  # isort: skip
from targets import Field, Target  # isort: skip
from trainer_stage import TRAINER_STRIKES, TrainerStage  # isort: skip

from hpctrain.records.find import RunFiles
from hpctrain.runs.state import RunState
from hpctrain.sandbox.shape import SandboxShape, default_shape

STRIKES_PER_RUN = 17
# A tenth of a second: 2 cores train three runs without keeping each other waiting.
PACE_SECONDS = 0.08
# Slurm misses a node after twice this; what is shorter than a busy machine's pauses misses all.
_SLURMD_TIMEOUT_SECONDS = 8
_GRACE_SECONDS = 6


def main() -> int:
    """Run the storm; 0 only if nothing was wrong."""
    options = _parsed()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs = options.runs or max(1, round(options.strikes / STRIKES_PER_RUN))
    ordeals = draw(options.strikes, options.seed, runs=runs, names=tuple(options.only))
    steps = steps_for(-(-options.strikes // runs))
    _say(f"{options.strikes} strikes on {runs} runs of {steps} steps, seed {options.seed}")
    with _field(options.at_a_time, options.slurm) as field:
        reference = undisturbed(field.stage, steps)
        began_at = time.monotonic()
        targets: list[Target] = []
        with Witness(field, lambda: list(targets)) as witness:
            fates = rage(
                field,
                ordeals,
                steps,
                at_a_time=options.at_a_time,
                pace_seconds=PACE_SECONDS,
                joined=targets.append,
                tell=print_one,
            )
        report = storm_report.conclude(field, fates, reference, witness, steps)
        _say(f"wall time {time.monotonic() - began_at:.0f} s")
        wrong = _told(report)
        if options.trainer_strikes:
            wrong += _told(_trainers(field, options.trainer_strikes, options.seed))
        if wrong and options.keep:
            _keep(field.stage, options.keep)
        return 1 if wrong else 0


def _told(report: storm_report.Report) -> list[str]:
    for line in report.lines:
        _say(line)
    for words in report.wrong:
        _say(f"WRONG: {words}")
    return report.wrong


def _trainers(field: Field, strikes: int, seed: int) -> storm_report.Report:
    """The same for runs of somebody's own trainer, two at a time."""
    runs = max(1, round(strikes / STRIKES_PER_RUN))
    steps = steps_for(-(-strikes // runs))
    _say(f"{strikes} strikes on {runs} runs of a trainer of one's own, {steps} steps")
    place = field.stage.directory / "trainers"
    place.mkdir()
    own = Field(TrainerStage(field.sandbox, place), field.other, field.bystander)
    reference = undisturbed(own.stage, steps)
    ordeals = draw(strikes, seed, runs=runs, names=TRAINER_STRIKES, cancels=False)
    targets: list[Target] = []
    with Witness(own, lambda: list(targets)) as witness:
        fates = rage(
            own,
            ordeals,
            steps,
            at_a_time=2,
            pace_seconds=PACE_SECONDS,
            joined=targets.append,
            tell=print_one,
        )
    return storm_report.conclude(own, fates, reference, witness, steps)


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--strikes", type=int, default=100)
    parser.add_argument("--trainer-strikes", type=int, default=0, help="at trainers of one's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-a-time", type=int, default=3, help="runs at a time")
    parser.add_argument("--runs", type=int, help="runs in all; default: one for 17 strikes")
    parser.add_argument("--slurm", type=Path, help="the directory of an unpacked Slurm")
    parser.add_argument("--keep", type=Path, help="copy the runs there if something was wrong")
    known = sorted(set(BY_NAME) - {strike.name for strike in CANCELS})
    parser.add_argument("--only", action="append", default=[], choices=known, metavar="NAME")
    return parser.parse_args()


@contextlib.contextmanager
def _field(at_a_time: int, slurm: Path | None) -> Iterator[Field]:
    """Two Slurms, and a user who may not read what the other one writes."""
    with (
        public_directory() as place,
        own_sandbox(_shape(at_a_time), slurm) as sandbox,
        own_sandbox(other_shape(), slurm) as there,
        another_user_attending(sandbox) as bystander,
    ):
        if bystander is None:
            _say("not rehearsed: another user, for only root can become one")
        yield Field(Stage(sandbox, place), OtherCluster(there), bystander)


def _shape(at_a_time: int) -> SandboxShape:
    """Two nodes for each run, one that may be down, and one more."""
    shape = default_shape(nodes=3 * at_a_time + 1, gpus_per_node=1)
    train = replace(shape.partitions[0], grace_seconds=_GRACE_SECONDS)
    return replace(
        shape,
        partitions=(train, *shape.partitions[1:]),
        slurmd_timeout_seconds=_SLURMD_TIMEOUT_SECONDS,
    )


def undisturbed(stage: Stage, steps: int) -> RunFiles:
    """The same run without any fault."""
    began_at = time.monotonic()
    rehearsal = stage.start("name=undisturbed", f"budget.steps={steps}", MADE_UP, *EVALUATIONS)
    row = rehearsal.wait_until(lambda row: row.state.over, "over", 300.0 + steps)
    assert row.state is RunState.DONE, row
    _say(f"undisturbed: {time.monotonic() - began_at:.0f} s")
    return rehearsal.run


def print_one(struck: Struck) -> None:
    went_on = "" if struck.resumed_step is None else f", resumed at {struck.resumed_step}"
    causes = ", ".join(struck.causes) or "-"
    _say(
        f"{struck.run_id:14} {struck.step:5} {struck.name:32} {causes}{went_on}, "
        f"{struck.lost_steps} lost, {struck.seconds:.1f} s"
    )


def _keep(stage: Stage, place: Path) -> None:
    import shutil

    shutil.copytree(stage.directory, place, dirs_exist_ok=True, symlinks=True)
    _say(f"the runs are in {place}")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
