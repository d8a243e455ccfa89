"""Tell what a Slurm does from what it says of itself, for behaviour that releases differ in. Pure.

Where `scontrol show config` has a key only in releases that behave so, the key decides: packagers
carry changes back. The number of the release decides where nothing else tells. Belongs here: every
comparison of releases. Does not belong here: spellings that are read in any case (`parse`,
`reasons`).

Seen with 22.05.8, 24.11.5 and 26.05.5 (docs/slurm-versions.md); the rest is from the RELEASE_NOTES
of Slurm.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.slurm.records import SlurmConfig

# 24.05: a job that exits in its grace period is requeued (seen from 24.11 on).
_REQUEUES_WHO_LEAVES = (24, 5)
# 23.11: slurmctld and slurmd start themselves anew to read their configuration.
_REPLACES_DAEMONS = (23, 11)
# 24.05: without a usable cgroup file system a slurmd needs to be told so (CgroupPlugin).
_NEEDS_CGROUP_PLUGIN = (24, 5)
# 23.02: slurm.conf has PreemptParameters; before, its option was one of SlurmctldParameters.
_HAS_PREEMPT_PARAMETERS = (23, 2)
# 23.11: topology/block.
_HAS_BLOCKS = (23, 11)
# 25.05: topology.yaml, of which `scontrol show config` does not tell.
_HIDES_TOPOLOGY = (25, 5)


@dataclass(frozen=True)
class Capabilities:
    """What a Slurm does.

    `requeues_who_leaves_in_a_grace`: a job that exits in its grace period comes back whatever its
    exit code, unless it may not be requeued. `replaces_daemons`: `scontrol reconfigure` gives
    daemons new processes. `needs_cgroup_plugin`: cgroup.conf has to switch cgroups off where there
    are none. `has_preempt_parameters`: slurm.conf has PreemptParameters. `has_blocks`: the plugin
    topology/block. `hides_topology`: TopologyPlugin says `flat` in the place of what topology.yaml
    describes.
    """

    requeues_who_leaves_in_a_grace: bool
    replaces_daemons: bool
    needs_cgroup_plugin: bool
    has_preempt_parameters: bool
    has_blocks: bool
    hides_topology: bool


def capabilities(config: SlurmConfig) -> Capabilities:
    """Derive them from `scontrol show config`."""
    told = "PreemptParameters" in config.values
    return _capabilities(config.version, told or config.version >= _HAS_PREEMPT_PARAMETERS)


def capabilities_of_release(version: tuple[int, ...]) -> Capabilities:
    """Derive them from the release alone, for a Slurm that does not run yet."""
    return _capabilities(version, version >= _HAS_PREEMPT_PARAMETERS)


def _capabilities(version: tuple[int, ...], has_preempt_parameters: bool) -> Capabilities:
    return Capabilities(
        requeues_who_leaves_in_a_grace=version >= _REQUEUES_WHO_LEAVES,
        replaces_daemons=version >= _REPLACES_DAEMONS,
        needs_cgroup_plugin=version >= _NEEDS_CGROUP_PLUGIN,
        has_preempt_parameters=has_preempt_parameters,
        has_blocks=version >= _HAS_BLOCKS,
        hides_topology=version >= _HIDES_TOPOLOGY,
    )
