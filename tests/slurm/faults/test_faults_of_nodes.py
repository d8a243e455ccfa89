"""Nodes crash, hang on to a job they have lost, or are drained: the run goes on elsewhere."""

from __future__ import annotations

import pytest
from rehearsal import Rehearsal, Stage, held
from survival import BY_SLURM, Fault, Survival

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.sandbox import faults

pytestmark = pytest.mark.stand_in


def test_nodes_that_die_are_left_for_others(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """First a node with ranks only, then the batch node with the supervisor."""
    rehearsal = stage.start("name=nodes", planned=(*held(1, 14), *held(2, 24, rank=0)))
    epoch = rehearsal.wait_for_progress()
    lost = rehearsal.nodes()[1]
    faults.crash_node(stage.sandbox, lost)
    fault = Fault(11, "a node without the batch script loses power")
    survival.recovered(rehearsal, fault, cause="node_failure", action=BY_SLURM, epoch=epoch)
    assert lost not in rehearsal.nodes()
    epoch = rehearsal.wait_for_progress()
    batch = rehearsal.nodes()[0]
    faults.crash_node(stage.sandbox, batch)
    faults.restart_node(stage.sandbox, lost, rebooted=False)
    fault = Fault(12, "the batch node loses power, and with it the supervisor")
    survival.recovered(
        rehearsal, fault, cause="node_failure", action="restarted by Slurm", epoch=epoch
    )
    assert batch not in rehearsal.nodes()
    rehearsal.assert_done_exactly(reference)


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_a_dead_slurmd_with_living_ranks_cannot_publish(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """The zombie: Slurm requeues the job while supervisor and ranks of the dead slurmd live."""
    rehearsal = stage.start("name=zombie", planned=held(1, 14))
    rehearsal.wait_for_progress()
    node = rehearsal.nodes()[0]
    zombies = {process.identity for process in rehearsal.processes() if process.rank is not None}
    faults.kill_slurmd(stage.sandbox, node)
    fault = Fault(13, "the slurmd of the batch node dies, and its ranks live on")
    survival.recovered(rehearsal, fault, cause="node_failure", action=BY_SLURM, epoch=1)
    rehearsal.wait(
        lambda: not zombies & {process.identity for process in rehearsal.processes()},
        "rid of the ranks of the first launch",
    )
    rehearsal.assert_done_exactly(reference)
    found = checkpoints(rehearsal.run.layout.checkpoints, "sha256")
    assert all(one.good for one in found), rehearsal.logs()
    later = [one.manifest.epoch for one in found if one.manifest and one.step > 10]
    assert set(later) == {2}, rehearsal.logs()


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
@pytest.mark.usefixtures("patient_slurm")
def test_a_drained_node_is_left_by_a_requeue(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    rehearsal = stage.start("name=left", planned=held(1, 14, do="await_warning"))
    epoch = rehearsal.wait_for_progress()
    leave_when_drained(rehearsal, survival, drain(rehearsal), epoch)
    rehearsal.assert_done_exactly(reference)


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
@pytest.mark.usefixtures("patient_slurm")
def test_a_drained_node_is_used_to_the_end_and_then_left(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    planned = (*held(1, 14), *held(2, 24, do="await_warning"))
    rehearsal = stage.start("name=drained", planned=planned)
    epoch = rehearsal.wait_for_progress()
    drained = drain(rehearsal)
    rehearsal.kill_rank(1)
    fault = Fault(17, "a node is drained, then a rank on it dies")
    survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=epoch)
    leave_when_drained(rehearsal, survival, drained, rehearsal.wait_for_progress())
    rehearsal.assert_done_exactly(reference)


def drain(rehearsal: Rehearsal) -> str:
    """The node of rank 1."""
    node = rehearsal.nodes()[1]
    rehearsal.sandbox.command(
        "scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=rehearsal"
    )
    return node


def leave_when_drained(rehearsal: Rehearsal, survival: Survival, drained: str, epoch: int) -> None:
    rehearsal.sandbox.command("scontrol", "requeue", str(rehearsal.job_id))
    fault = Fault(17, "the job of a drained node is requeued")
    survival.recovered(rehearsal, fault, cause="requeued", action="leave", epoch=epoch)
    assert drained not in rehearsal.nodes()


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_a_spare_node_takes_the_place_of_a_dead_one(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    rehearsal = stage.start("name=spare", "resources.spare_nodes=1", planned=held(1, 14))
    epoch = rehearsal.wait_for_progress()
    lost = rehearsal.nodes()[1]
    faults.crash_node(stage.sandbox, lost)
    fault = Fault(14, "a node loses power in a job with one spare node")
    survival.recovered(rehearsal, fault, cause="node_failure", action="relaunch", epoch=epoch)
    started = rehearsal.events(EventKind.LAUNCH_STARTED)[-1]
    assert lost not in (started.nodes or lost), rehearsal.logs()
    rehearsal.assert_done_exactly(reference)
    assert rehearsal.attempts == 1, "no queue for a node that has a spare"
