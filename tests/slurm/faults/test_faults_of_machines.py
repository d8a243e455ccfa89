"""What the kernels of the nodes say: broken GPUs are left, complaints of programs are not.

The kernel's log of each node is a file that a rank writes into before it dies, as the driver
would; everything behind it (the probe of the nodes, the catalogue of XIDs, the ledger of nodes,
Slurm's list of excluded nodes) is real.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rehearsal import PlannedFault, Rehearsal, Stage
from survival import Fault, Survival

from hpctrain.records.find import RunFiles
from hpctrain.records.ledger import EventKind

pytestmark = pytest.mark.stand_in

XID = "NVRM: Xid (PCI:0000:3b:00): {code}, pid=4321, name=python, {words}"
# torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp
NCCL_TIMEOUT = (
    "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600012 milliseconds "
    "before timing out."
)


def xid(epoch: int, rank: int, step: int, code: int, words: str) -> tuple[PlannedFault, ...]:
    """The kernel of the rank's node says this, then the rank dies.

    A step later: ranks that both say something have both said it before one of them dies.
    """
    text = XID.format(code=code, words=words)
    return (
        PlannedFault(epoch=epoch, rank=rank, step=step - 1, do="kernel", text=text),
        PlannedFault(epoch=epoch, rank=rank, step=step, do="leave", code=1),
    )


def test_xids_are_told_apart_and_broken_nodes_are_left(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    planned = (
        *xid(1, rank=0, step=23, code=94, words="Contained ECC error"),
        PlannedFault(epoch=2, rank=0, step=42, do="say", text=NCCL_TIMEOUT),
        *xid(2, rank=1, step=43, code=79, words="GPU has fallen off the bus."),
    )
    own = stage.at(tmp_path)  # with a ledger of nodes of its own
    rehearsal = own.start("name=xids", "supervise.exclude_nodes=act", planned=planned)
    fault = Fault(26, "XID 94 (contained ECC error), then the rank leaves")
    contained = survival.recovered(rehearsal, fault, cause="gpu_error", action="relaunch", epoch=1)
    batch, broken = rehearsal.nodes(attempt=0)
    assert contained.end.node == batch, rehearsal.logs()
    fault = Fault(27, "XID 79 on one node, an NCCL timeout on the other")
    lost = survival.recovered(rehearsal, fault, cause="gpu_error", action="requeue", epoch=2)
    assert lost.end.node == broken and lost.end.hard, lost.end
    assert exclusions(rehearsal) == [(broken,)] and broken not in rehearsal.nodes()
    survival.shown(
        Fault(26, "XID 79 (GPU fell off the bus): the node is left"),
        cause="gpu_error",
        action=f"requeue, with {broken} in Slurm's ExcNodeList",
    )
    rehearsal.assert_done_exactly(reference)


@pytest.mark.variant("test_xids_are_told_apart_and_broken_nodes_are_left")
def test_three_of_four_nodes_are_bad_and_two_are_needed(
    stage: Stage, tmp_path: Path, reference: RunFiles, survival: Survival
) -> None:
    planned = (
        *xid(1, rank=1, step=13, code=63, words="Row remapping event"),
        *xid(2, rank=1, step=23, code=13, words="Graphics Exception"),
        *xid(3, rank=1, step=33, code=79, words="GPU has fallen off the bus."),
        *xid(4, rank=0, step=43, code=79, words="GPU has fallen off the bus."),
        *xid(4, rank=1, step=43, code=79, words="GPU has fallen off the bus."),
    )
    own = stage.at(tmp_path)
    rehearsal = own.start("name=many-xids", "supervise.exclude_nodes=act", planned=planned)
    fault = Fault(26, "XID 63 (rows remapped) in the kernel's log, then a rank leaves")
    survival.recovered(rehearsal, fault, cause="crash", action="relaunch", epoch=1)
    fault = Fault(26, "XID 13 (graphics exception), then the rank leaves")
    program = survival.recovered(rehearsal, fault, cause="gpu_error", action="relaunch", epoch=2)
    broken = rehearsal.nodes(attempt=0)[1]
    assert program.end.node == broken, rehearsal.logs()
    rehearsal.wait(lambda: rehearsal.epoch == 4, "off the broken node")
    assert exclusions(rehearsal) == [(broken,)], rehearsal.logs()
    fault = Fault(39, "XID 79 on both other nodes: three of four are bad, and two are needed")
    survival.recovered(rehearsal, fault, cause="gpu_error", action="requeue", epoch=4)
    avoided = exclusions(rehearsal)[-1]
    assert len(avoided) == 2 and not set(avoided) & set(rehearsal.nodes()), rehearsal.logs()
    rehearsal.assert_done_exactly(reference)


def exclusions(rehearsal: Rehearsal) -> list[tuple[str, ...]]:
    return [e.excluded for e in rehearsal.events(EventKind.ACTION) if e.action == "requeue"]
