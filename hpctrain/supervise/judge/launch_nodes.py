"""Choose the nodes and the size of a launch. Pure.

A job may have more nodes than a launch needs (spares) or may continue with fewer (shapes). Belongs
here: choosing nodes and writing them into srun's command. Does not belong here: finding lost nodes
(`probe`), whether to launch at all (`policy`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hpctrain.store.supervise_config import LaunchShape, SuperviseConfig

# Of `hpctrain.train.agent`: the nodes of the launch.
_AGENT_OPTION = "--nnodes="


@dataclass(frozen=True)
class Placement:
    """Nodes and size of one launch. `nodes` empty: all of the job's, as the script says.

    `overlap`: beside a step of a lost node, which Slurm lists until it gives the node up.
    `spares`: nodes of the job that are wanted, too, and not needed.
    """

    shape: LaunchShape | None
    nodes: tuple[str, ...]
    overlap: bool = False
    spares: int = 0


@dataclass(frozen=True)
class Allocation:
    """The nodes of the job in Slurm's order, those that do not answer and those to avoid."""

    nodes: tuple[str, ...]
    lost: frozenset[str] = frozenset()
    avoided: frozenset[str] = frozenset()

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
    keep Slurm's order, because ranks follow it.
    """
    wanted = [node for node in allocation.healthy if node not in allocation.avoided]
    reserve = [node for node in allocation.healthy if node in allocation.avoided]
    planned = LaunchShape(nodes=full_nodes(config, allocation), tasks=0, train_config="")
    for shape in config.shapes or (planned,):
        for pool in (wanted, wanted + reserve):
            if len(pool) >= shape.nodes:
                chosen = set(pool[: shape.nodes])
                nodes = tuple(node for node in allocation.nodes if node in chosen)
                everything = shape.nodes == len(allocation.nodes)
                spares = max(0, len(wanted) - shape.nodes)
                return Placement(shape, () if everything else nodes, spares=spares)
    return None


def place_command(argv: Sequence[str], placement: Placement) -> list[str]:
    """Adapt the srun command of the script to this placement.

    srun(1): a `--nodelist` of as many nodes as `--nodes` is exactly those. The last word of the
    command is the trainer's file.
    """
    argv, shape = list(argv), placement.shape
    if placement.overlap:
        # srun(1): shares all resources with other steps, which else keep theirs until they end
        argv.insert(1, "--overlap")
    if shape is None or not shape.train_config:
        return _with_nodelist(argv, placement.nodes)
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
    return _with_nodelist(argv, placement.nodes)


def _with_nodelist(argv: list[str], nodes: tuple[str, ...]) -> list[str]:
    if not nodes:
        return argv
    return [argv[0], f"--nodelist={','.join(nodes)}", *argv[1:]]
