"""Find the leaf switch or block of each node of the job.

Belongs here: one query of Slurm at the start of an attempt, and only where the profile has a
topology plugin. Does not belong here: Slurm's texts (`hpctrain.slurm`), what follows from them
(`judge.node_order`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpctrain.base.errors import SlurmError
from hpctrain.slurm.parse import has_leaves
from hpctrain.supervise.context import AttemptContext, log_message

_PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"


def leaves_of(
    context: AttemptContext, nodes: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Query where the nodes of the job are; empty if nothing depends on it, or Slurm cannot tell.

    Slurm sets the pattern of the batch node's address (sbatch(1)): without a switch or a block in
    it the controller is not asked.
    """
    if context.config.topology is None or len(nodes) < 2:
        return {}
    plugin = context.config.topology.plugin
    pattern = environment.get(_PATTERN)
    if pattern is not None and not has_leaves(pattern):
        log_message(f"Slurm has no topology/{plugin} in force: where nodes are is not known")
        return {}
    try:
        known = context.slurm.leaves()
    except SlurmError as error:
        log_message(f"where nodes are is not known: {error}")
        return {}
    return {node: known[node] for node in nodes if node in known}
