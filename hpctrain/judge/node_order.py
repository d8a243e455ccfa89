"""Order the nodes of a launch by leaf, and count the groups of ranks that leave theirs. Pure.

Slurm numbers ranks along the names of nodes. Where names cross leaf switches or blocks (racks), a
group of neighbouring ranks lies in two of them although the job has whole ones. Belongs here:
counting such groups, an order with fewer, the sentence about it. Does not belong here: reading
Slurm's topology (`evidence.leaves`), starting srun in that order (`launch_nodes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hpctrain.records.supervise_config import TopologySettings

_MOST_LEAVES = 32  # in one event of the ledger
_WORDS = {"tree": ("leaf switch", "leaf switches"), "block": ("block", "blocks")}


@dataclass(frozen=True)
class GroupCount:
    """How many groups of an axis there are, and how many have ranks under several leaves."""

    axis: str
    ranks: int
    groups: int
    outside: int


@dataclass(frozen=True)
class NodePlacement:
    """The nodes of a launch in the order of its ranks, and what that order does to groups.

    `slurm`: counts in Slurm's own order, `launch`: in the order of `nodes`. `borders`: how many
    neighbouring nodes are under different leaves.
    """

    nodes: tuple[str, ...]
    per_leaf: tuple[tuple[str, int], ...]
    slurm: tuple[GroupCount, ...]
    launch: tuple[GroupCount, ...]
    slurm_borders: int
    launch_borders: int
    reordered: bool

    @property
    def outside(self) -> int:
        """Groups that leave their leaf in this launch."""
        return sum(count.outside for count in self.launch)


def judge_placement(
    topology: TopologySettings, nodes: Sequence[str], leaves: Mapping[str, str], count: int
) -> NodePlacement:
    """Choose `count` of `nodes` (in Slurm's order) and their order.

    Slurm's own choice stays unless another one brings groups inside, or shortens rings over thin
    links between leaves.
    """
    own, by_leaf = tuple(nodes[:count]), order_by_leaf(topology, nodes, leaves)[:count]
    before, after = count_groups(topology, own, leaves), count_groups(topology, by_leaf, leaves)
    ahead, behind = _borders(own, leaves), _borders(by_leaf, leaves)
    saved = sum(one.outside for one in before) - sum(one.outside for one in after)
    better = saved > 0 or (saved == 0 and topology.thin_uplinks and behind < ahead)
    chosen = by_leaf if better else own
    per_leaf = Counter(leaves.get(node, node) for node in chosen)
    return NodePlacement(
        nodes=chosen,
        per_leaf=tuple(sorted(per_leaf.items())),
        slurm=before,
        launch=after if better else before,
        slurm_borders=ahead,
        launch_borders=behind if better else ahead,
        reordered=better,
    )


def order_by_leaf(
    topology: TopologySettings, nodes: Sequence[str], leaves: Mapping[str, str]
) -> tuple[str, ...]:
    """Order nodes so that as many whole groups as possible are under one leaf.

    From each leaf first as many nodes as fill the widest groups, then those of narrower ones: every
    part begins where a group begins. A node that Slurm's topology does not contain is a leaf of
    its own.
    """
    left: dict[str, list[str]] = {}
    for node in nodes:
        left.setdefault(leaves.get(node, node), []).append(node)
    widths = {
        -(-(group.stride * group.ranks) // topology.gpus_per_node) for group in topology.groups
    }
    order: list[str] = []
    for width in (*sorted(widths, reverse=True), 1):
        for members in left.values():
            whole = len(members) // width * width
            order += members[:whole]
            del members[:whole]
    return tuple(order)


def count_groups(
    topology: TopologySettings, nodes: Sequence[str], leaves: Mapping[str, str]
) -> tuple[GroupCount, ...]:
    """Count the groups of each axis on `nodes` in this order; axes that do not tile them are out.

    A launch on fewer nodes than planned has other groups of dp and pp.
    """
    of_rank = [leaves.get(node, node) for node in nodes for _ in range(topology.gpus_per_node)]
    counts = []
    for group in topology.groups:
        block = group.stride * group.ranks
        if len(of_rank) % block:
            continue
        parts = [
            of_rank[start + offset : start + block : group.stride]
            for start in range(0, len(of_rank), block)
            for offset in range(group.stride)
        ]
        outside = sum(len(set(part)) > 1 for part in parts)
        counts.append(GroupCount(group.axis, group.ranks, len(parts), outside))
    return tuple(counts)


def summary(topology: TopologySettings, placement: NodePlacement) -> str:
    """Format where the launch is, which groups leave their leaf, and what that costs."""
    one, several = _WORDS[topology.plugin]
    number = len(placement.per_leaf)
    words = [f"{len(placement.nodes)} nodes in {number} {one if number == 1 else several}"]
    if placement.reordered:
        words.append("ranks follow them instead of the names of nodes")
    cut = [count for count in placement.launch if count.outside]
    if cut:
        names = ", ".join(f"{c.outside} of {c.groups} groups of {c.axis} {c.ranks}" for c in cut)
        words.append(f"{names} leave their {one}{_cost(topology)}")
    return "; ".join(words)


def details(topology: TopologySettings, placement: NodePlacement) -> tuple[str, ...]:
    """Format nodes per leaf, and groups outside in Slurm's order and in that of the launch."""
    shown = [f"{leaf}: {count}" for leaf, count in placement.per_leaf[:_MOST_LEAVES]]
    more = len(placement.per_leaf) - len(shown)
    lines = [f"nodes per {_WORDS[topology.plugin][0]}: {', '.join(shown)}"]
    if more:
        lines[0] += f" and {more} more"
    lines += [
        f"{own.axis} {own.ranks}: {own.outside} of {own.groups} groups outside in Slurm's order, "
        f"{now.outside} in the launch's"
        for own, now in zip(placement.slurm, placement.launch, strict=True)
    ]
    borders = f"{placement.slurm_borders} in Slurm's order, {placement.launch_borders}"
    lines.append(f"neighbouring nodes apart: {borders} in the launch's")
    return tuple(lines)


def _cost(topology: TopologySettings) -> str:
    step, scattered = topology.step_seconds, topology.scattered_step_seconds
    if step is None or scattered is None or scattered <= step:
        return ""
    return f": by the plan's model a step takes up to {scattered:.3g} s instead of {step:.3g} s"


def _borders(nodes: Sequence[str], leaves: Mapping[str, str]) -> int:
    return sum(leaves.get(a, a) != leaves.get(b, b) for a, b in pairwise(nodes))
