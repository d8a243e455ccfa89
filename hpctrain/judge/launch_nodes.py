"""Choose the nodes and the size of a launch. Pure.

A job may have more nodes than a launch needs (spares) or may continue with fewer (shapes). Belongs
here: choosing nodes and writing them into srun's command. Does not belong here: finding lost nodes
(`probe`), whether to launch at all (`policy`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpctrain.judge.node_order import NodePlacement, judge_placement
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig

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
    keep Slurm's order, which ranks follow, unless another one keeps groups together (`node_order`).
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


def host_file_lines(argv: Sequence[str], placement: Placement) -> list[str]:
    """List the node of each task, for SLURM_HOSTFILE (srun(1), --distribution=arbitrary)."""
    of_node = [word for word in argv if word.startswith(_TASKS_OPTION)]
    tasks = int(of_node[0].removeprefix(_TASKS_OPTION)) if of_node else 1
    return [node for node in placement.nodes for _ in range(tasks)]


def _in_given_order(argv: list[str]) -> list[str]:
    """Replace the distribution of tasks by that of a host file.

    Newer versions refuse `--nodes` beside it (24.11): the file has them. It has no second part, so
    tasks take CPUs of the sockets in turn, away from their GPUs (tests/slurm/
    test_task_affinity.py). Unbound, each rank takes those near its GPU by itself
    (`train.placement`).
    """
    replaced = ("--nodes=", "--distribution=", "--cpu-bind=")
    kept = [word for word in argv[1:] if not word.startswith(replaced)]
    return [argv[0], "--distribution=arbitrary", "--cpu-bind=none", *kept]


def _with_nodes(argv: list[str], placement: Placement) -> list[str]:
    if placement.reordered:
        return _in_given_order(argv)
    if not placement.nodes:
        return argv
    return [argv[0], f"--nodelist={','.join(placement.nodes)}", *argv[1:]]
