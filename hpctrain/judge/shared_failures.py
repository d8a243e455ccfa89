"""Distinguish failures on all nodes of a launch from failures on a few of them. Pure.

A run is stopped for good only by what all nodes agree on: a file that is missing on one node is the
fault of that node. Belongs here: comparing nodes. Does not belong here: the failures of ranks
(`root_causes`), and the verdict (`rank_verdict`).
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from hpctrain.judge.blame import is_singular
from hpctrain.judge.documents import LaunchEvidence


class Extent(StrEnum):
    """How many nodes of a launch have the same failure.

    EVERYWHERE: all that could report; FEW: so few that it may be their own fault; MOST: so many
    that something between the nodes is at fault, although other nodes do not have it.
    """

    EVERYWHERE = "everywhere"
    FEW = "few"
    MOST = "most"


def extent(affected: Collection[str], evidence: LaunchEvidence) -> Extent:
    """Determine how far a failure reaches that ranks on the nodes `affected` have reported.

    Nodes whose ranks have reported something else, or have got further, contradict. Nodes without
    any report neither agree nor contradict: then more than half of all nodes have to agree.
    """
    nodes = {*evidence.nodes, *affected, *(exit_.node for exit_ in evidence.rank_exits)}
    if len(nodes) <= 1:
        return Extent.EVERYWHERE  # there is no other node to compare with
    # Nodes with a report of a rank, and that of rank 0 once it has reported progress.
    further = {exit_.node for exit_ in evidence.rank_exits}
    if evidence.last_step is not None and evidence.nodes:
        further.add(evidence.nodes[0])
    contradicting = further - set(affected)
    if not contradicting and 2 * len(affected) > len(nodes):
        return Extent.EVERYWHERE
    return Extent.FEW if is_singular(affected, nodes) else Extent.MOST
