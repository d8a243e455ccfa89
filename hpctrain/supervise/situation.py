"""What there is to work with when the supervisor decides: nodes, blame, checkpoints.

Belongs here: putting it together from the ledger of nodes and the run directory. Does not belong
here: deciding (`policy`).
"""

from __future__ import annotations

from hpctrain.checkpoints.discover import checkpoints
from hpctrain.errors import SlurmError
from hpctrain.supervise.allocation import Allocation, full_nodes, least_nodes
from hpctrain.supervise.context import AttemptContext
from hpctrain.supervise.documents import Evidence, Situation, Verdict
from hpctrain.supervise.gather import keeps_nodes

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
    evidence: Evidence | None = None,
) -> Situation:
    """The situation after a launch. What it says about nodes goes into their ledger first."""
    config = context.config
    return Situation(
        keeps_nodes=evidence is None or keeps_nodes(evidence),
        allocated_nodes=len(allocation.nodes),
        healthy_nodes=len(allocation.healthy),
        needed_nodes=full_nodes(config, allocation),
        least_nodes=least_nodes(config, allocation),
        good_checkpoints=_good_checkpoints(context),
    )


def _good_checkpoints(context: AttemptContext) -> tuple[int, ...]:
    found = checkpoints(context.run_layout.checkpoints)
    return tuple(one.step for one in found if one.good)[:_GOOD_CHECKPOINTS]
