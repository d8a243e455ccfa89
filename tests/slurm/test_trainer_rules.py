"""A trainer of one's own on a real Slurm: requeues, time limit, budgets, what a failure leaves.

Rules that need no Slurm are in tests/unit/trainer/test_six_rules.py, with the same small trainer.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rehearsal import Rehearsal, Stage, profile_text

from hpctrain.job.submit import submit
from hpctrain.job.trainer_run import prepare_any
from hpctrain.records.find import find_run
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import lineage, read_metrics
from hpctrain.runs.state import RunState

TINY = Path(__file__).parents[1] / "unit" / "trainer" / "misbehaving_trainer.py"
Start = Callable[..., Rehearsal]


@pytest.fixture
def start(stand_in_stage: Stage, tmp_path: Path) -> Start:
    def started(
        *words: str, trainer: dict[str, object] | None = None, gpus: int = 1, **resources: str
    ) -> Rehearsal:
        """Submit a run of the tiny trainer with these words, or of another one, on each node."""
        place, stage = tmp_path / "place", stand_in_stage.at(tmp_path)
        place.mkdir()
        command = [sys.executable, str(TINY), "--output", "{output}", "--resume", "{resume}"]
        document = {
            "name": "tiny",
            "trainer": trainer
            or {
                "command": [*command, *words],
                "checkpoint": {"path": "step-{step}", "complete": {"json": ["state.json"]}},
                "signal": {"save": "TERM", "seconds": "20s"},
                "metrics": [{"output": r"step (?P<step>\d+) loss (?P<loss>\S+)"}],
                "done": {"step": 20},
            },
            "resources": {"gpus": gpus, "walltime": "00:30:00", **resources},
        }
        spec, site = place / "spec.yaml", place / "profile.yaml"
        spec.write_text(json.dumps(document))
        site.write_text(profile_text(stage.sandbox.shape, sys.executable))
        prepared = prepare_any(spec, str(site), runs=stage.runs)
        submitted = submit(prepared, stage.runs, stage.slurm)
        run = find_run(stage.runs, submitted.run_id)
        return Rehearsal(stage.sandbox, stage.slurm, run, submitted.job_id, place)

    return started


def ended_at_20(run: Rehearsal) -> list[str | None]:
    """Wait until it is done, with every step once; returns the causes of its launches."""
    row = run.wait_till_over()
    assert row.state is RunState.DONE, run.logs()
    assert [one.step for one in lineage(read_metrics(run.run.layout))] == [*range(1, 21)]
    return run.causes


def test_exit_0_is_tried_again_and_not_for_ever(start: Start) -> None:
    run = start("--steps", "7")
    row = run.wait_till_over()
    assert row.state is RunState.FAILED, run.logs()
    assert set(run.causes) == {"ended_early"} and 1 < len(run.causes) < 6, run.causes
    assert [one.resume_step for one in run.events(EventKind.LAUNCH_STARTED)][1:] == [5] * (
        len(run.causes) - 1
    )


@pytest.mark.variant("test_a_preempted_trainer_saves_and_goes_on")
def test_a_trainer_that_requeues_itself_is_requeued_by_nobody_else(start: Start) -> None:
    """It asks Slurm in its first launch; there is one attempt, and a second launch in it."""
    run = start("--requeues-at", "7")
    assert ended_at_20(run) == ["ended_early", "done"]
    assert run.attempts == 1


def test_a_preempted_trainer_saves_and_goes_on(start: Start, tmp_path: Path) -> None:
    run = start("--waits-at", f"7:{tmp_path / 'go'}")
    run.wait_for_step(7)
    run.urgent_job()
    run.wait(lambda: len(run.causes) == 1, "preempted")
    (tmp_path / "go").touch()
    assert ended_at_20(run) == ["preempted", "done"]
    assert run.attempts == 2
    assert [one.resume_step for one in run.events(EventKind.LAUNCH_STARTED)] == [0, 8]


@pytest.mark.variant("test_a_preempted_trainer_saves_and_goes_on")
def test_what_a_lost_launch_has_left_complete_is_resumed_from(start: Start, tmp_path: Path) -> None:
    """Agent and trainer are killed while the save is complete and nobody has published it."""
    run = start("--waits-at", f"7:{tmp_path / 'go'}")
    run.wait_for_step(7)
    agents = [
        one
        for one in run.processes()
        if list(one.command_line[1:3]) == ["-m", "hpctrain.trainer.agent"]
    ]
    left = run.run.layout.launch_output(1) / "step-7"
    run.kill(agents, signal.SIGSTOP)  # it looks at nothing any more
    (left.parent / ".writing").mkdir()
    (left.parent / ".writing" / "weights.bin").write_bytes(bytes(1000))
    (left.parent / ".writing" / "state.json").write_text('{"step": 7}')
    (left.parent / ".writing").rename(left)
    run.kill(agents)
    (tmp_path / "go").touch()
    causes = ended_at_20(run)
    assert causes[-1] == "done" and len(causes) == 2
    assert [one.resume_step for one in run.events(EventKind.LAUNCH_STARTED)] == [0, 7]


@pytest.mark.nightly("two minutes: Slurm's shortest time limit is one")
def test_a_trainer_goes_on_after_its_time_limit(start: Start, tmp_path: Path) -> None:
    run = start("--waits-at", f"7:{tmp_path / 'go'}", walltime="00:01:00")
    run.wait(lambda: len(run.causes) == 1, "at its limit")
    (tmp_path / "go").touch()
    assert ended_at_20(run) == ["time_limit", "done"]
    assert [one.resume_step for one in run.events(EventKind.LAUNCH_STARTED)] == [0, 8]


# On two nodes; only the second one prints, until it is told to be quiet.
STANDS_STILL = """
import os, sys, time
output, place = sys.argv[1:]
if os.path.exists(place + "/quiet"):
    open(output + "/final", "w").close()
    sys.exit()
print("begins", flush=True)
while True:
    time.sleep(0.2)
    if os.environ["RANK"] == "1" and not os.path.exists(place + "/quiet"):
        print("works", flush=True)
"""
SILENCE_SECONDS = 15


@pytest.mark.nightly("a minute of silence, and of what looks like it")
def test_a_trainer_of_level_0_that_stands_still_is_started_again(
    start: Start, tmp_path: Path
) -> None:
    trainer = {
        "command": [sys.executable, "-c", STANDS_STILL, "{output}", str(tmp_path)],
        "done": {"file": "final"},
        "silence": f"{SILENCE_SECONDS}s",
    }
    run = start(trainer=trainer, gpus=2)
    run.wait(lambda: run.events(EventKind.LAUNCH_STARTED), "started")
    begun = time.time()
    run.wait(lambda: time.time() > begun + 3 * SILENCE_SECONDS, "past three silences")
    assert run.causes == [], "rank 1 prints"
    (tmp_path / "quiet").touch()
    row = run.wait_till_over()
    assert row.state is RunState.DONE, run.logs()
    assert run.causes == ["hang", "done"] and run.attempts == 1, run.logs()
    reason = run.events(EventKind.LAUNCH_ENDED)[0].reason or ""
    assert reason.startswith("no line of output and no file changed in `output/` for 1"), reason
