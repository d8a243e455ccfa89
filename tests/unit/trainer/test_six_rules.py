"""Six rules that no trainer may break, each against a trainer that breaks it (docs/any-trainer.md).

Agents and trainers are real processes; tests/slurm/test_trainer_rules.py has the same on a Slurm.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from agent_runs import AgentLaunch, AgentRun, children
from waiting import wait_until

from hpctrain.records.epochs import claim_epoch
from hpctrain.records.manifest import checkpoint_name

SIGN = {"path": "step-{step}", "complete": {"json": ["state.json"]}, "keep": 9}


@pytest.fixture
def run(tmp_path: Path) -> AgentRun:
    return AgentRun.made(tmp_path / "run")


# -- 1: exit 0 is not done -----------------------------------------------------------------------


def test_exit_0_before_the_target_is_no_end(run: AgentRun) -> None:
    launch = run.start("--steps", "7")
    assert launch.wait() == 1
    assert (launch.ended.outcome, launch.ended.cause) == ("crash", "ended_early")
    assert launch.ended.message == "the trainer ended with exit code 0 at step 7 of 20"
    assert run.done() is None and run.published == [5]


def test_exit_0_at_the_target_is_the_end(run: AgentRun) -> None:
    launch = run.start()
    assert launch.wait() == 0, launch.printed
    done = run.done()
    assert done is not None and done["step"] == 20
    assert done["checkpoint"] == checkpoint_name(20) and run.published == [5, 10, 15, 20]
    assert [row.step for row in launch.rows] == [*range(1, 21)]


def test_exit_0_without_the_file_that_ends_the_run_is_no_end(run: AgentRun) -> None:
    assert run.start(done={"file": "final.bin"}).wait() == 1
    assert run.done() is None
    assert run.start("--steps", "5", done={"file": "step-5/state.json"}).wait() == 0


# -- 2: no signal before it is caught ------------------------------------------------------------


def test_a_signal_waits_until_the_rank_catches_it(run: AgentRun) -> None:
    launch = run.start("--import-seconds", "1.5", "--pause", "0.2")
    launch.wait_for(launch.output)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.wait() == 75, launch.printed
    assert launch.ended.outcome == "yielded"
    assert len(run.published) == 1, "it has saved, so it did not die of the signal"


def test_the_trainer_gets_the_signal_on_which_it_saves(run: AgentRun, tmp_path: Path) -> None:
    waits = ("--waits-at", f"7:{tmp_path / 'never'}")
    launch = run.start("--catches", "USR2", *waits, signal={"save": "USR2", "seconds": "60s"})
    launch.stop_after(5)
    assert "caught SIGUSR2" in launch.printed and run.published[-1] >= 7
    assert launch.ended.signal == "SIGTERM"


def ended_unsaved(run: AgentRun, tmp_path: Path, does: str) -> AgentLaunch:
    words = ("--waits-at", f"7:{tmp_path / 'never'}", "--when-asked", does, "--catches", "USR1")
    launch = run.start(*words, signal={"save": "USR1", "seconds": "1s"})
    wait_until(lambda: [row.step for row in launch.rows][-1:] == [7], launch.process.poll)
    launch.stop_after(5)
    assert "caught SIGUSR1" in launch.printed and run.published == [5]
    return launch


@pytest.mark.variant("test_a_signal_that_nobody_follows_costs_the_steps_since_the_last_save")
def test_a_save_that_hangs_in_the_handler_is_ended(run: AgentRun, tmp_path: Path) -> None:
    assert ended_unsaved(run, tmp_path, "hangs").ended.outcome == "yielded"


def test_a_signal_that_nobody_follows_costs_the_steps_since_the_last_save(
    run: AgentRun, tmp_path: Path
) -> None:
    launch = ended_unsaved(run, tmp_path, "goes on")
    assert "it saved nothing, and steps since 5 are lost" in str(launch.ended.message)


def test_a_save_that_was_on_its_way_is_no_answer(run: AgentRun, tmp_path: Path) -> None:
    words = (
        "--waits-at",
        f"7:{tmp_path / 'never'}",
        "--when-asked",
        "goes on",
        "--catches",
        "USR1",
    )
    signed = {"path": "step-{step}", "complete": {"json": ["whole.json"]}}
    launch = run.start(*words, signal={"save": "USR1", "seconds": "60s"}, checkpoint=signed)
    wait_until(lambda: [row.step for row in launch.rows][-1:] == [7], launch.process.poll)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.stdout is not None
    assert any("caught SIGUSR1" in line for line in launch.process.stdout)
    (launch.output / "step-5" / "whole.json").write_text('{"step": 5}')
    wait_until(lambda: run.published == [5], launch.process.poll)
    [rank] = children(launch.process.pid)
    os.kill(rank, signal.SIGKILL)
    assert launch.wait() == 75, launch.printed
    assert "it saved nothing, and steps since 5 are lost" in str(launch.ended.message)


def test_ranks_end_with_their_agent(run: AgentRun, tmp_path: Path) -> None:
    launch = run.start("--waits-at", f"7:{tmp_path / 'never'}")
    wait_until(lambda: run.published == [5], launch.process.poll)
    [rank] = children(launch.process.pid)
    launch.process.kill()
    launch.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{rank}"))


# -- 3: one requeues, the supervisor -------------------------------------------------------------


def test_a_requeue_of_the_trainers_own_does_not_reach_slurm(run: AgentRun, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "scontrol").write_text(f'#!/bin/sh\necho "$@" >>{asked}\n')
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    launch = run.start("--requeues-at", "7", environment={"PATH": path, "SLURM_JOB_ID": "41"})
    assert launch.wait() == 1
    assert not asked.exists()
    assert launch.ended.cause == "ended_early"
    assert "after it had asked Slurm for a requeue at step 7" in str(launch.ended.message)
    assert "no `scontrol requeue 41` here" in launch.printed


# -- 4: it resumes from where it was told to -----------------------------------------------------


def test_a_trainer_that_loads_its_own_newest_one_is_stopped(run: AgentRun) -> None:
    first = run.trained("--steps", "12")
    assert run.published == [5, 10]
    for name in ("step-10", "step-12"):  # damaged and gone, as retention of its own leaves them
        if (first.output / name).exists():
            (first.output / name).rename(first.output / f"x{name}")
    launch = run.start(
        "--own-newest", str(first.output), resume=10, checkpoint={**SIGN, "found": True}
    )
    assert launch.wait() == 1
    assert launch.ended.cause == "starts_over"
    assert "first report is of step 6" in str(launch.ended.message)


@pytest.mark.variant("test_a_trainer_that_loads_its_own_newest_one_is_stopped")
def test_a_trainer_that_begins_further_on_than_it_was_told_is_stopped(run: AgentRun) -> None:
    first = run.trained("--steps", "12")
    (first.output / "step-100").mkdir()
    words = ("--own-newest", str(first.output), "--steps", "110")
    launch = run.start(*words, resume=10, checkpoint={**SIGN, "found": True}, done={"step": 110})
    assert launch.wait() == 1
    assert launch.ended.cause == "starts_over"
    assert "another checkpoint" in str(launch.ended.message)


def test_a_trainer_that_resumes_as_told_goes_on(run: AgentRun) -> None:
    run.trained("--steps", "12")
    launch = run.start(resume=10)
    assert launch.wait() == 0, launch.printed
    assert [row.step for row in launch.rows] == [*range(11, 21)]


# -- 5: nothing is digested before it is complete and stands still -------------------------------


@pytest.mark.parametrize("more", [(), ("--sign-first",)], ids=["sign last", "sign first"])
def test_a_slow_save_is_published_whole(run: AgentRun, more: tuple[str, ...]) -> None:
    """A script that writes its sign first is found out by the sizes, if it does not rest."""
    launch = run.start(
        "--steps", "5", "--pieces", "12", "--piece-seconds", "0.15", *more, done={"step": 5}
    )
    assert launch.wait() == 0, launch.printed
    sizes = {file.name: file.size_bytes for file in run.manifest(5).files}
    assert sizes["step-5/weights.bin"] == 12 * 1000


def test_a_save_that_is_cut_short_is_not_published(run: AgentRun) -> None:
    launch = run.start("--pieces", "4", "--piece-seconds", "0.05", "--dies-in-save", "10")
    assert launch.wait() == 128 + signal.SIGKILL
    assert (launch.output / "step-10" / "weights.bin").exists()
    assert run.published == [5] and run.done() is None


# -- 6: a start from step 0 beside a checkpoint --------------------------------------------------


def test_without_a_rule_a_save_that_a_failure_has_left_does_not_count(run: AgentRun) -> None:
    unruled = {"path": "step-{step}"}
    launch = run.start("--pieces", "4", "--dies-in-save", "10", checkpoint=unruled)
    assert launch.wait() == 128 + signal.SIGKILL
    assert run.published == [5] and "step-10 is not complete: it changed" in launch.printed
    launch = run.start("--steps", "10", resume=5, checkpoint=unruled, done={"step": 10})
    assert launch.wait() == 0, launch.printed
    assert run.published == [5, 10], "it has ended well, so nobody writes any more"


@pytest.mark.parametrize("tells", [True, False], ids=["by its steps", "by what it saves"])
def test_a_start_from_the_beginning_beside_a_checkpoint_is_stopped(
    run: AgentRun, tmp_path: Path, tells: bool
) -> None:
    run.trained("--steps", "12")
    kept = run.manifest(10)
    (tmp_path / "old" / "step-0").mkdir(parents=True)
    words = ["--own-newest", str(tmp_path / "old"), *([] if tells else ["--quiet"])]
    words += ["--waits-at", f"7:{tmp_path / 'never'}", "--catches", ""]
    launch = run.start(
        *words,
        resume=10,
        checkpoint={**SIGN, "found": True},
        **({} if tells else {"metrics": None}),
    )
    assert launch.wait() == 1
    assert launch.ended.cause == "starts_over"
    assert ("step 1" if tells else "saved step 5") in str(launch.ended.message)
    assert run.manifest(10) == kept and run.published == [5, 10]


@pytest.mark.variant("test_ranks_end_with_their_agent")
def test_a_superseded_launch_ends_its_trainer(run: AgentRun, tmp_path: Path) -> None:
    launch = run.start("--waits-at", f"7:{tmp_path / 'never'}")
    wait_until(lambda: run.published == [5])
    claim_epoch(run.run.epochs, "another")
    assert launch.wait() == 1
    assert launch.ended.cause == "superseded"
