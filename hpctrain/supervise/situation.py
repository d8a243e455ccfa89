"""What there is to work with when the supervisor decides: nodes, blame, checkpoints.

Belongs here: putting it together from the ledger of nodes and the run directory. Does not belong
here: deciding (`policy`), weighing what is in the ledger of nodes (`hpctrain.nodes`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.errors import SlurmError
from hpctrain.nodes.blame import Avoid, Witness, blame, blame_problem, nodes_to_avoid
from hpctrain.nodes.record import EvidenceKind, NodeEvidence, NodeLedger
from hpctrain.supervise.allocation import Allocation, full_nodes, least_nodes
from hpctrain.supervise.answers import ProbeResult
from hpctrain.supervise.causes import FAILURE_CAUSES, Cause
from hpctrain.supervise.context import AttemptContext, say
from hpctrain.supervise.documents import Situation, Verdict
from hpctrain.supervise.gather import keeps_nodes

if TYPE_CHECKING:
    from hpctrain.supervise.launching import Ended

_GOOD_CHECKPOINTS = 16


def allocation_of(context: AttemptContext) -> Allocation:
    """The nodes that Slurm has given to this attempt, in its order."""
    nodes = context.attempt.nodes
    try:
        return Allocation(tuple(context.slurm.hostnames(nodes)))
    except SlurmError:
        return Allocation((nodes,))


def assess(
    context: AttemptContext,
    allocation: Allocation,
    verdict: Verdict,
    ended: Ended | None = None,
) -> Situation:
    """The situation after a launch. What it says about nodes goes into their ledger first."""
    config = context.config
    evidence = ended.evidence if ended is not None else None
    if ended is not None:
        _blame(context, allocation, ended)
    probe = ended.probe if ended is not None else None
    avoid = _avoid(context, allocation, probe)
    return Situation(
        keeps_nodes=evidence is None or keeps_nodes(evidence),
        allocated_nodes=len(allocation.nodes),
        healthy_nodes=len(allocation.healthy),
        needed_nodes=full_nodes(config, allocation),
        least_nodes=least_nodes(config, allocation),
        exclude=avoid.nodes,
        exclude_here=tuple(node for node in avoid.here if node in allocation.healthy),
        why_exclude=avoid.why,
        good_checkpoints=_good_checkpoints(context),
    )


def _good_checkpoints(context: AttemptContext) -> tuple[int, ...]:
    found = checkpoints(context.run_layout.checkpoints)
    return tuple(one.step for one in found if one.good)[:_GOOD_CHECKPOINTS]


def _ledger(context: AttemptContext) -> NodeLedger | None:
    path = context.config.node_ledger
    return NodeLedger(Path(path)) if path else None


def _blame(context: AttemptContext, allocation: Allocation, ended: Ended) -> None:
    """Write down what the launch says about nodes; a ledger that cannot be written is no reason
    to stop."""
    ledger = _ledger(context)
    if ledger is None or ended.verdict.cause not in FAILURE_CAUSES:
        return
    if ended.verdict.cause is Cause.STORAGE and ended.evidence is None:
        return  # nothing was launched: no node has been tried
    try:
        ledger.append(_evidence(context, allocation, ended))
    except OSError as error:
        say(f"the node ledger cannot be written: {error.strerror}")


def _evidence(context: AttemptContext, allocation: Allocation, ended: Ended) -> list[NodeEvidence]:
    verdict, evidence = ended.verdict, ended.evidence
    witness = Witness(time.time(), context.config.cluster, context.config.run_id, context.job_id)
    progressed = evidence is not None and (evidence.checkpoint_step or 0) > evidence.resume_step
    found = blame(
        witness,
        cause=str(verdict.cause),
        reason=verdict.reason,
        nodes=verdict.nodes,
        job_nodes=allocation.nodes,
        hard=verdict.hard,
        lost=evidence.lost_nodes if evidence is not None else (),
        short_launch=not progressed,
    )
    broken = ended.probe.broken if ended.probe is not None else ()
    checks = [
        blame_problem(
            witness,
            one.node,
            str(problem),
            hard=problem.hard,
            blocks=problem.blocks,
            gpu=problem.gpu,
        )
        for one in broken
        for problem in one.problems
    ]
    slow = [
        witness.says(EvidenceKind.SLOW, one.node, f"rank {one.rank} computes {one.factor:.2f} x")
        for one in ended.slow_ranks
        if one.node
    ]
    return [*found, *checks, *slow]


def _avoid(context: AttemptContext, allocation: Allocation, probe: ProbeResult | None) -> Avoid:
    ledger, config = _ledger(context), context.config
    if ledger is None:
        return Avoid()
    try:
        evidence = ledger.read()
    except OSError:
        return Avoid()
    return nodes_to_avoid(
        evidence,
        config.cluster,
        time.time(),
        usable_nodes=config.cluster_nodes,
        needed_nodes=least_nodes(config, allocation),
        allocated=allocation.nodes,
        homes=probe.homes if probe is not None else None,
    )
