"""The trainers of examples/any-trainer on a real Slurm: each fault, and the losses of a quiet run.

Rank 1 waits after step 34 of the first launch, where something is done to the run; with Ray the
driver does, which is its only rank.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from ray_environment import ray_python
from rehearsal import Rehearsal, Stage, profile_text

from hpctrain.checkpoints.foreign import own_name
from hpctrain.job.submit import submit
from hpctrain.job.trainer_run import prepare_any
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.records.manifest import checkpoint_name
from hpctrain.records.run_records import read_metrics
from hpctrain.runs.state import RunState
from hpctrain.sandbox import faults

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "any-trainer"
HELD_TRAINERS = Path(__file__).resolve().parent / "held_trainers"
STEPS, HELD_STEP, SAVED_STEP = 60, 34, 30
SCRIPTS: Mapping[str, str] = {
    "hf": "hf.py",
    "accelerate": "accelerate_loop.py",
    "lightning": "lightning_fit.py",
    "dcp": "dcp_loop.py",
    "level4": "level4.py",
    "ray": "ray_loop.py",
}


def preempt(rehearsal: Rehearsal) -> None:
    rehearsal.urgent_job()


def reach_limit(rehearsal: Rehearsal) -> None:
    """What `--signal=B:USR1@N` does before the time limit."""
    rehearsal.sandbox.command("scancel", "--batch", "--signal=USR1", str(rehearsal.job_id))


def kill_rank(rehearsal: Rehearsal) -> None:
    ranks = [one for one in rehearsal.processes() if is_script(one.command_line)]
    os.kill(max(ranks, key=lambda one: one.rank or 0).pid, signal.SIGKILL)


def lose_node(rehearsal: Rehearsal) -> None:
    faults.crash_node(rehearsal.sandbox, rehearsal.nodes()[1])


def lose_head(rehearsal: Rehearsal) -> None:
    faults.crash_node(rehearsal.sandbox, rehearsal.nodes()[0])


def truncate_and_kill(rehearsal: Rehearsal) -> None:
    """Cut the largest file of the newest checkpoint in half, as a full disk does."""
    directory = rehearsal.run.layout.checkpoints / checkpoint_name(SAVED_STEP)
    own = directory / (own_name(directory) or "")
    files = [own] if own.is_file() else [path for path in own.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    kill_rank(rehearsal)


@dataclass(frozen=True)
class Deed:
    """What is done to a run, how it is judged, and the step from which the next launch resumes."""

    do: Callable[[Rehearsal], None]
    cause: str
    resumed_step: int


DEEDS: Mapping[str, Deed] = {
    "preempted": Deed(preempt, "preempted", HELD_STEP),
    "limit": Deed(reach_limit, "time_limit", HELD_STEP),
    "killed": Deed(kill_rank, "crash", SAVED_STEP),
    "node": Deed(lose_node, "node_failure", SAVED_STEP),
    "head": Deed(lose_head, "node_failure", SAVED_STEP),
    "truncated": Deed(truncate_and_kill, "crash", SAVED_STEP - 10),
}
# Ranks import a framework for ten seconds, in each launch, so most are for the night. In every run
# a smaller trainer is disturbed, too (test_trainer_rules.py).
IN_EVERY_RUN = (("hf", "killed"),)
CASES = [
    pytest.param(
        name,
        deed,
        id=f"{name}-{deed}",
        marks=()
        if (name, deed) in IN_EVERY_RUN
        else pytest.mark.nightly("each framework x each fault"),
    )
    for name in SCRIPTS
    for deed in DEEDS
    if deed != "head" or name == "ray"  # nodes of the others are alike
]


@pytest.fixture(scope="module")
def quiet_losses() -> dict[str, dict[int, float]]:
    """By the name of an example, the losses of a run to which nothing is done; filled as needed."""
    return {}


@pytest.mark.parametrize(("name", "deed"), CASES)
def test_a_trainer_ends_at_its_target_whatever_happens(
    stage: Stage,
    tmp_path: Path,
    quiet_losses: dict[str, dict[int, float]],
    name: str,
    deed: str,
) -> None:
    rehearsal = start(stage.at(tmp_path), name)
    rehearsal.wait_for_checkpoint(SAVED_STEP)
    rehearsal.wait(lambda: newest_row(rehearsal) >= HELD_STEP - 1, "held")
    DEEDS[deed].do(rehearsal)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, f"{row}\n{rehearsal.logs()}"
    ends = (EventKind.LAUNCH_ENDED, EventKind.ATTEMPT_LOST)  # the latter with its batch node
    causes = [one.cause for one in rehearsal.run.ledger.events() if one.event in ends]
    assert causes == [DEEDS[deed].cause, "done"], rehearsal.logs()
    second = rehearsal.events(EventKind.LAUNCH_STARTED)[1]
    # It has saved: nothing is lost. The driver of Ray does so also when Slurm ends the rest.
    if DEEDS[deed].cause in ("preempted", "time_limit") or (name, deed) == ("ray", "node"):
        assert second.resume_step is not None and second.resume_step >= HELD_STEP
    else:
        assert second.resume_step == DEEDS[deed].resumed_step, rehearsal.logs()
    first, again = (losses(rehearsal, epoch) for epoch in (1, 2))
    assert [*again] == [*range(second.resume_step + 1, STEPS + 1)], rehearsal.logs()
    if (name, deed) in IN_EVERY_RUN:
        expected = first  # steps that were trained twice show whether it is the same run
        assert ({*first} & {*again}) or second.resume_step >= HELD_STEP
    else:
        if name not in quiet_losses:
            (tmp_path / "quiet").mkdir()
            quiet = start(stage.at(tmp_path / "quiet"), name, held_step=0)
            quiet.wait_till_over()
            quiet_losses[name] = losses(quiet, 1)
        expected = quiet_losses[name]
        assert [*expected] == [*range(1, STEPS + 1)]
    wrong = {step: loss for step, loss in again.items() if expected.get(step, loss) != loss}
    assert not wrong, f"{wrong} is not of {expected}\n{rehearsal.logs()}"


def start(stage: Stage, name: str, held_step: int = HELD_STEP) -> Rehearsal:
    """Submit an example as it is, on two nodes; its Python is that of the tests, or has Ray."""
    python = ray_python() if name == "ray" else Path(sys.executable)
    site = stage.directory / "profile.yaml"
    site.write_text(profile_text(stage.sandbox.shape, sys.executable))
    overrides = [
        f"environment.variables.PATH={python.parent}:{os.environ['PATH']}",
        f"environment.variables.PYTHONPATH={HELD_TRAINERS}",
        f"environment.variables.HELD_TRAINER=1:{held_step}",
    ]
    prepared = prepare_any(EXAMPLES / f"{name}.yaml", str(site), overrides, runs=stage.runs)
    submitted = submit(prepared, stage.runs, stage.slurm)
    run = find_run(stage.runs, submitted.run_id)
    return Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id, stage.directory)


def losses(rehearsal: Rehearsal, epoch: int) -> dict[int, float]:
    return {row.step: row.loss for row in rehearsal.rows(epoch) if row.loss is not None}


def newest_row(rehearsal: Rehearsal) -> int:
    return max((row.step for row in read_metrics(rehearsal.run.layout)), default=0)


def is_script(words: tuple[str, ...]) -> bool:
    return any(word.endswith(tuple(SCRIPTS.values())) for word in words[:3])
