"""Choose the nodes of a launch, their order and its size. Pure.

A job may have more nodes than a launch needs (spares) or may continue with fewer (shapes). Belongs
here: choosing nodes and writing them into srun's command. Does not belong here: finding lost nodes
(`probe`), whether to launch at all (`policy`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig, TopologySettings

# -- Order the nodes of a launch by leaf, and count the groups of ranks that leave theirs. Pure -
# Slurm numbers ranks along the names of nodes. Where names cross leaf switches or blocks (racks), a
# group of neighbouring ranks lies in two of them although the job has whole ones.


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
        step, scattered = topology.step_seconds, topology.scattered_step_seconds
        cost = ""
        if step is not None and scattered is not None and scattered > step:
            cost = f": by the plan's model a step takes up to {scattered:.3g} s instead of "
            cost += f"{step:.3g} s"
        words.append(f"{names} leave their {one}{cost}")
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


def _borders(nodes: Sequence[str], leaves: Mapping[str, str]) -> int:
    return sum(leaves.get(a, a) != leaves.get(b, b) for a, b in pairwise(nodes))


# ----------------------------------------------------------------------------------------------


_TASKS_OPTION = "--ntasks-per-node="
# Of `hpctrain.train.agent`: the nodes of the launch.
_AGENT_OPTION = "--nnodes="


@dataclass(frozen=True)
class Placement:
    """Nodes and size of one launch. `nodes` empty: all of the job's, as the script says.

    `overlap`: beside a step of a lost node, which Slurm lists until it gives the node up.
    `spares`: nodes of the job that are wanted, too, and not needed. `leaves`: where these nodes are
    in Slurm's topology; None where it is not known.
    """

    shape: LaunchShape | None
    nodes: tuple[str, ...]
    overlap: bool = False
    spares: int = 0
    leaves: NodePlacement | None = None

    @property
    def reordered(self) -> bool:
        """Whether ranks follow `nodes` instead of Slurm's order, by a host file."""
        return self.leaves is not None and self.leaves.reordered


@dataclass(frozen=True)
class Allocation:
    """The nodes of the job in Slurm's order, those that do not answer and those to avoid.

    `leaves`: the leaf switch or block of each node; empty where that is not known.
    """

    nodes: tuple[str, ...]
    lost: frozenset[str] = frozenset()
    avoided: frozenset[str] = frozenset()
    leaves: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def healthy(self) -> tuple[str, ...]:
        return tuple(node for node in self.nodes if node not in self.lost)

    def without(self, lost: Collection[str]) -> Allocation:
        return replace(self, lost=self.lost | frozenset(lost))

    def avoiding(self, nodes: Collection[str]) -> Allocation:
        return replace(self, avoided=frozenset(nodes))

    def with_lost(self, lost: Collection[str]) -> Allocation:
        """Replace the lost nodes by exactly `lost`: one that came back is used again."""
        return replace(self, lost=frozenset(lost))


def full_nodes(config: SuperviseConfig, allocation: Allocation) -> int:
    """Return the number of nodes of a launch at the planned size."""
    if config.shapes:
        return config.shapes[0].nodes
    return max(1, len(allocation.nodes) - config.spare_nodes)


def least_nodes(config: SuperviseConfig, allocation: Allocation) -> int:
    """Return the number of nodes of a launch at the smallest size that the spec allows."""
    return config.shapes[-1].nodes if config.shapes else full_nodes(config, allocation)


def place(config: SuperviseConfig, allocation: Allocation) -> Placement | None:
    """Choose the largest launch that the healthy nodes allow; None when there is none.

    Avoided nodes are used only where a launch of that size does not exist without them. The nodes
    keep Slurm's order, which ranks follow, unless another one keeps groups together.
    """
    located = config.topology if allocation.leaves else None
    wanted = [node for node in allocation.healthy if node not in allocation.avoided]
    reserve = [node for node in allocation.healthy if node in allocation.avoided]
    planned = LaunchShape(nodes=full_nodes(config, allocation), tasks=0, train_config="")
    for shape in config.shapes or (planned,):
        for pool in (wanted, wanted + reserve):
            if len(pool) >= shape.nodes:
                spares = max(0, len(wanted) - shape.nodes)
                leaves, chosen = None, set(pool[: shape.nodes])
                nodes = tuple(node for node in allocation.nodes if node in chosen)
                everything = shape.nodes == len(allocation.nodes)
                if located is not None:
                    own_order = (*nodes, *(node for node in pool if node not in chosen))
                    leaves = judge_placement(located, own_order, allocation.leaves, shape.nodes)
                    nodes = leaves.nodes
                if everything and not (leaves and leaves.reordered):
                    nodes = ()
                return Placement(shape, nodes, spares=spares, leaves=leaves)
    return None


def place_command(argv: Sequence[str], placement: Placement) -> list[str]:
    """Adapt the srun command of the script to this placement.

    srun(1): a `--nodelist` of as many nodes as `--nodes` is exactly those, in Slurm's order; a host
    file (`host_file_lines`) has its own. The last word of the command is the trainer's file.
    """
    argv, shape = list(argv), placement.shape
    if placement.overlap:
        # srun(1): shares all resources with other steps, which else keep theirs until they end
        argv.insert(1, "--overlap")
    if shape is None or not shape.train_config:
        return _with_nodes(argv, placement)
    argv[-1] = shape.train_config
    # Tasks of srun are ranks, or one agent per node that starts them.
    agents = any(word.startswith(_AGENT_OPTION) for word in argv)
    values = {
        "--nodes=": shape.nodes,
        "--ntasks=": shape.nodes if agents else shape.tasks,
        _AGENT_OPTION: shape.nodes,
    }
    for option, value in values.items():
        argv = [f"{option}{value}" if word.startswith(option) else word for word in argv]
    return _with_nodes(argv, placement)


def nodes_of_ranks(nodes: Sequence[str], tasks: int) -> dict[int, str]:
    """Map ranks to nodes in this order; empty if that is not known.

    Slurm gives each node consecutive ranks (srun(1), --distribution=block, its default).
    """
    per_node, rest = divmod(tasks, len(nodes)) if nodes else (0, 1)
    return {} if rest else {rank: nodes[rank // per_node] for rank in range(tasks)}


def host_file_lines(argv: Sequence[str], placement: Placement) -> list[str]:
    """List the node of each task, for SLURM_HOSTFILE (srun(1), --distribution=arbitrary)."""
    of_node = [word for word in argv if word.startswith(_TASKS_OPTION)]
    tasks = int(of_node[0].removeprefix(_TASKS_OPTION)) if of_node else 1
    return [node for node in placement.nodes for _ in range(tasks)]


def _with_nodes(argv: list[str], placement: Placement) -> list[str]:
    if placement.reordered:
        # A host file has its own distribution of tasks. Newer versions refuse `--nodes` beside it
        # (24.11): the file has them. It has no second part, so tasks take CPUs of the sockets in
        # turn, away from their GPUs (tests/slurm/test_task_affinity.py). Unbound, each rank takes
        # those near its GPU by itself (`train.placement`).
        replaced = ("--nodes=", "--distribution=", "--cpu-bind=")
        kept = [word for word in argv[1:] if not word.startswith(replaced)]
        return [argv[0], "--distribution=arbitrary", "--cpu-bind=none", *kept]
    if not placement.nodes:
        return argv
    return [argv[0], f"--nodelist={','.join(placement.nodes)}", *argv[1:]]
