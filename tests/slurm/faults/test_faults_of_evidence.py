"""Whose fault it was: what one node alone lacks is its own, what people and programs do is not."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage, held
from survival import Fault, Survival
from token_files import write_tokens

from hpctrain.base.errors import SlurmError
from hpctrain.job.supervisor_settings import NODE_LEDGER_NAME
from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind
from hpctrain.records.node_record import EvidenceKind, NodeLedger
from hpctrain.runs.node_evidence import node_rows
from hpctrain.sandbox import faults
from hpctrain.sandbox.daemons import JobProcess
from hpctrain.sandbox.processes import is_alive

pytestmark = pytest.mark.stand_in


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_what_one_node_lacks_is_its_own_fault(
    stage: Stage, tmp_path: Path, survival: Survival
) -> None:
    """Nobody has allowed the run to exclude nodes for what they did before; this is no such case.

    The second launch has the first save of rank 1 stand still in its writer.
    """
    own = stage.at(tmp_path)  # with a ledger of nodes of its own
    own.data.mkdir()
    write_tokens(own.data / "text")
    source = f"data.sources=[{{path: {own.data / 'text'}}}]"
    reference = own.start("name=whole", source)
    unmounted = reference_nodes(reference)[1]
    reference.wait_till_over()
    # Slurm gives the same nodes again only if they are free again.
    idle = {"idle"}
    reference.wait(lambda: {*stage.sandbox.node_states().values()} == idle, "off its nodes")
    own.unmount_data("lacking", unmounted)
    rehearsal = own.start(
        "name=lacking",
        source,
        "supervise.setup_stall=90s",  # for saves, too; imports take long on a busy machine
        "checkpoint.asynchronous=false",
        planned=(PlannedFault(epoch=2, rank=1, step=5, do="stop_writer"),),
    )
    fault = Fault(63, "the file system of the data is not mounted on one of two nodes")
    lacking = survival.recovered(rehearsal, fault, cause="node_failure", action="requeue", epoch=1)
    assert lacking.end.node == unmounted and "not found" in (lacking.end.reason or ""), lacking.end
    excluded = [e.excluded for e in rehearsal.events(EventKind.ACTION) if e.action == "requeue"]
    assert excluded == [(unmounted,)] and unmounted not in rehearsal.nodes(), rehearsal.logs()
    fault = Fault(67, "the process that writes rank 1's part of a checkpoint is stopped")
    stopped = survival.recovered(rehearsal, fault, cause="hang", action="relaunch", epoch=2)
    assert (stopped.end.rank, stopped.end.node) == (1, rehearsal.nodes()[1]), stopped.end
    assert "writer" in (stopped.end.reason or ""), stopped.end
    rehearsal.assert_done_exactly(reference.run)
    evidence = NodeLedger(own.runs / NODE_LEDGER_NAME).read()
    kinds = {one.kind for one in evidence if one.node == unmounted}
    assert kinds == {EvidenceKind.UNHEALTHY}, evidence


def reference_nodes(rehearsal: Rehearsal) -> list[str]:
    rehearsal.wait(lambda: rehearsal.attempts > 0, "started")
    return rehearsal.nodes()


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_what_people_and_programs_do_is_no_evidence_against_a_node(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    own = stage.at(tmp_path)  # with a ledger of nodes of its own
    planned = (
        PlannedFault(epoch=1, rank=-1, step=13, do="settle"),
        PlannedFault(epoch=1, rank=1, step=13, do="misspell"),
        *held(2, 24),
    )
    first = own.start("name=first", planned=planned)
    fault = Fault(72, "AttributeError in the user's code, on one rank")
    survival.recovered(first, fault, cause="crash", action="relaunch", epoch=1)
    assert not node_rows(own.runs / NODE_LEDGER_NAME), first.logs()
    kill_rank_1(first, survival, epoch=2)
    first.assert_done_exactly(reference)
    assert_no_evidence(own)


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_kills_in_two_runs_are_no_evidence_either(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    own = stage.at(tmp_path)
    for name in ("one", "another"):
        rehearsal = own.start(f"name={name}", planned=held(1, 14))
        kill_rank_1(rehearsal, survival, epoch=1)
        rehearsal.assert_done_exactly(reference)
    assert_no_evidence(own)


def assert_no_evidence(own: Stage) -> None:
    rows = node_rows(own.runs / NODE_LEDGER_NAME)
    assert not [row for row in rows if row.admin_hint or row.avoided], rows
    assert {row.kind for row in rows} == {EvidenceKind.SIGNALLED}, rows


def kill_rank_1(rehearsal: Rehearsal, survival: Survival, epoch: int) -> None:
    rehearsal.wait(lambda: rehearsal.epoch == epoch, f"in launch {epoch}")
    rehearsal.wait_for_progress()
    rehearsal.kill_rank(1)
    fault = Fault(72, f"a person kills rank 1 of run `{rehearsal.run.run_id[:-5]}`")
    survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=epoch)


@pytest.mark.variant("test_nodes_that_die_are_left_for_others")
def test_a_node_that_thaws_hurts_nobody(
    stage: Stage, reference: RunFiles, survival: Survival
) -> None:
    """The srun of the lost attempt ends its step by an id that the present attempt does not use.

    srun gets to run before the slurmstepd above it, which would kill it first. Whether it then asks
    slurmctld to end the step hangs on which of the messages that wait for it it reads first, so the
    test asks the same besides.
    """
    waits = (
        PlannedFault(epoch=2, rank=-1, step=24, do="settle"),
        PlannedFault(epoch=2, rank=1, step=24, do="await_word", text="thawed"),
    )
    rehearsal = stage.start("name=thaw", planned=(*held(1, 14), *waits))
    rehearsal.wait_for_progress()
    frozen = rehearsal.nodes()[0]
    old = [process for process in rehearsal.processes() if process.node == frozen]
    sruns = [process for process in old if "".join(process.command_line[:1]).endswith("srun")]
    faults.freeze_node(stage.sandbox, frozen)
    fault = Fault(68, "the batch node freezes, and thaws once the job runs elsewhere")
    survival.recovered(rehearsal, fault, cause="node_failure", action="restarted by Slurm", epoch=1)
    rehearsal.wait_for_progress()
    rehearsal.kill(sruns, signal.SIGCONT)
    wait_till_gone(rehearsal, sruns)
    with contextlib.suppress(SlurmError):
        rehearsal.slurm.kill_step(rehearsal.job_id, "0")
    faults.thaw_node(stage.sandbox, frozen)
    wait_till_gone(rehearsal, old)
    rehearsal.say("thawed")
    rehearsal.assert_done_exactly(reference)
    ends = [e for e in rehearsal.events(EventKind.LAUNCH_ENDED) if e.restart_count == 1]
    assert [end.cause for end in ends] == ["done"], rehearsal.logs()


def wait_till_gone(rehearsal: Rehearsal, processes: list[JobProcess]) -> None:
    old = [process.identity for process in processes]
    rehearsal.wait(lambda: not any(map(is_alive, old)), "rid of old ones")
