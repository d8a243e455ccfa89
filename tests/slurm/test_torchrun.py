"""`launcher: torchrun` on the real Slurm: preempted, killed, and with a node gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rehearsal import PATIENCE_SECONDS, STEPS, Rehearsal, Stage

from bench import prefork
from hpctrain.records.exit_records import read_agent_records
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.run_records import TrainerExit, lineage, read_metrics
from hpctrain.runs.logs import rank_logs
from hpctrain.runs.state import RunState
from hpctrain.sandbox import faults
from hpctrain.sandbox.daemons import JobProcess

# fp32, and sums over one or two halves of a batch in another order, over 60 steps of Adam.
BOUND = 5e-6


@pytest.mark.variant("test_ranks_that_die_are_named_and_relaunched_in_place")
def test_a_preempted_and_killed_run_is_the_same_run(
    strict_stage: Stage, reference: RunFiles
) -> None:
    """Two ranks below one agent, compared with two tasks on two nodes."""
    words = ("name=agents", "launcher=torchrun")
    rehearsal = strict_stage.start(*words, gpus_per_node=2, held_at="1:14,2:34")
    rehearsal.wait_for_step(13)
    rehearsal.urgent_job()
    rehearsal.wait(lambda: rehearsal.epoch == 2, "in its second launch")
    rehearsal.wait_for_step(33, epoch=2)
    rehearsal.wait_for_checkpoint(30)
    kill_worker(rehearsal, rank=1)
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.causes == ["preempted", "crash", "done"], rehearsal.logs()
    starts = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert [start.epoch for start in starts] == [1, 2, 3]
    preempted, killed, _ = rehearsal.events(EventKind.LAUNCH_ENDED)
    assert starts[1].resume_step == preempted.last_step, "the ranks heard TERM through their agent"
    assert preempted.exit_code == TrainerExit.YIELDED, "the agent's code is that of its ranks"
    assert killed.rank == 1, "the number of the rank, not of the agent"
    assert killed.reason is not None and "Killed" in killed.reason
    assert starts[2].resume_step == killed.checkpoint_step == 30
    told = read_agent_records(rehearsal.run.layout, 2)
    assert (1, -9) in [(end.rank, end.code) for end in told[0].ended]  # the other may be gone too
    logs = [(log.path.parent.name, log.path.name) for log in rank_logs(rehearsal.run, 1)]
    first, second = (f"{rehearsal.job_id}.{restarts}" for restarts in (0, 1))
    assert logs == [  # between the last two the nodes were asked, by a step of its own
        (first, "step0-rank0001.log"),
        (second, "step0-rank0001.log"),
        (second, "step2-rank0001.log"),
    ]


@pytest.mark.variant("test_a_run_goes_on_with_fewer_nodes")
def test_a_run_goes_on_with_fewer_agents(stage: Stage, tmp_path: Path) -> None:
    """One rank per node; what it trains is what one rank alone trains, but for the rounding."""
    layout = ("parallel.pp=1", "resources.min_nodes=1", "model.dropout=0")
    words = ("name=range", "launcher=torchrun", "logging.files=node")
    rehearsal = stage.start(*words, *layout, held_at="1:14")
    rehearsal.wait_for_checkpoint(10)
    batch_node, other = rehearsal.nodes()
    faults.crash_node(stage.sandbox, other)
    row = rehearsal.wait_till_over()
    assert row.state is RunState.DONE, rehearsal.logs()
    assert rehearsal.attempts == 1, "no queue for a run that may shrink"
    starts = rehearsal.events(EventKind.LAUNCH_STARTED)
    assert [start.launch_nodes for start in starts] == [2, 1], rehearsal.logs()
    ended = rehearsal.events(EventKind.LAUNCH_ENDED)[0]
    assert ended.cause == "node_failure", rehearsal.logs()
    assert starts[1].nodes == batch_node
    assert starts[1].resume_step == ended.checkpoint_step >= 10
    logs = rank_logs(rehearsal.run, 0)
    assert {log.path.name.partition("-")[2] for log in logs} == {"node0000.log"}, logs
    text = logs[-1].path.read_text()
    assert f"0: event=step step={STEPS}/{STEPS} " in text, "the agent names the rank"
    assert losses(rehearsal.run.layout) == pytest.approx(
        alone(rehearsal, tmp_path), rel=0, abs=BOUND
    )


def kill_worker(rehearsal: Rehearsal, rank: int) -> None:
    """The process of the rank; its agent stays."""
    workers = [p for p in rehearsal.rank_processes(rank) if is_worker(p)]
    assert len(workers) == 1, rehearsal.processes()
    rehearsal.kill(workers)


def is_worker(process: JobProcess) -> bool:
    return "hpctrain.train" in process.command_line


def alone(rehearsal: Rehearsal, place: Path) -> dict[int, float]:
    """The losses of one process that trains the same batches from the beginning."""
    run = RunLayout(place / "alone")
    run.create()
    shutil.copy(rehearsal.run.layout.train_config_for(1), run.train_config)
    ranks = prefork.start(run.train_config, 1, run.logs / "ranks")
    assert ranks.wait(PATIENCE_SECONDS) == [0], ranks.log()
    return losses(run)


def losses(run: RunLayout) -> dict[int, float]:
    found = {row.step: float.fromhex(row.loss_hex) for row in lineage(read_metrics(run))}
    assert sorted(found) == list(range(1, STEPS + 1))
    return found
