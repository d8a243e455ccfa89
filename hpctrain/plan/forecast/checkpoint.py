"""Compute the cost of one checkpoint: bytes, seconds until it is durable, seconds of stall.

Belongs here: sizes and rates of a save. Does not belong here: how often to save (`intervals`).
"""

from __future__ import annotations

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.plan.forecast.documents import CheckpointCost, RunFacts
from hpctrain.plan.forecast.published import (
    FP32_CHECKPOINT_BYTES,
    MIXED_PRECISION_CHECKPOINT_BYTES,
    ONE_COPY_CHECKPOINT_BYTES,
    SAVE_OVERHEAD_SECONDS,
    STAGING_BYTES_PER_SECOND,
)
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import FilesystemProfile
from hpctrain.spec.run import RunSpec


def bytes_per_parameter(spec: RunSpec) -> float:
    """Return bytes per parameter of a full checkpoint with Adam, by engine and precision."""
    if spec.engine.abilities.one_copy_checkpoints:
        return ONE_COPY_CHECKPOINT_BYTES
    if spec.precision == "fp32":
        return FP32_CHECKPOINT_BYTES
    return MIXED_PRECISION_CHECKPOINT_BYTES


def checkpoint_cost(spec: RunSpec, profile: ClusterProfile, facts: RunFacts) -> CheckpointCost:
    """Compute size and times of one save.

    Write rate: the slower of the file system and the network cards of the run's nodes (a node's
    own disk needs no cards). All GPUs copy equal shares to main memory first; an asynchronous save
    waits for that only. At most one save is under way (`hpctrain.train.saving.saver`).
    """
    each = facts.checkpoint_bytes_per_parameter or bytes_per_parameter(spec)
    total = facts.parameters * each
    filesystem = _filesystem(profile, facts.filesystem)
    write, limit = _write_seconds(profile, filesystem, facts.nodes, total)
    staging = _staging_seconds(facts.gpus, total)
    in_background = spec.checkpoint.asynchronous
    return CheckpointCost(
        total_bytes=round(total),
        write_seconds=write,
        stall_seconds=staging if in_background else staging + write,
        last_save_seconds=staging + write,
        write_limit=limit,
        asynchronous=in_background,
    )


def longest_save_seconds(
    spec: RunSpec, profile: ClusterProfile, *, parameters: int, gpus: int, nodes: int
) -> float:
    """Compute the time until a save is durable on the slowest file system of the site.

    Where a run directory will be is known only when it is made. `parameters`: those that learn.
    """
    total = parameters * bytes_per_parameter(spec)
    writes = (_write_seconds(profile, one, nodes, total)[0] for one in profile.filesystems)
    return _staging_seconds(gpus, total) + max(writes)


def load_seconds(profile: ClusterProfile, facts: RunFacts, total_bytes: float) -> float:
    """Compute the time to read a checkpoint, limited like the write."""
    filesystem = _filesystem(profile, facts.filesystem)
    rate = float(filesystem.read_bandwidth)
    if filesystem.kind != "local":
        rate = min(rate, _cards_bytes_per_second(profile, facts.nodes))
    return total_bytes / rate


def _filesystem(profile: ClusterProfile, name: str | None) -> FilesystemProfile:
    for filesystem in profile.filesystems:
        if name in (None, filesystem.name):
            return filesystem
    names = ", ".join(filesystem.name for filesystem in profile.filesystems)
    message = f"cluster {profile.name} has no file system `{name}`"
    raise InvalidInputError([Problem(message, hint=f"it has {names}")])


def _cards_bytes_per_second(profile: ClusterProfile, nodes: int) -> float:
    network = profile.network
    return nodes * network.nics_per_node * float(network.nic_bandwidth)


def _staging_seconds(gpus: int, total_bytes: float) -> float:
    """The copy to main memory, and what one save takes besides it."""
    return SAVE_OVERHEAD_SECONDS + total_bytes / gpus / STAGING_BYTES_PER_SECOND


def _write_seconds(
    profile: ClusterProfile, filesystem: FilesystemProfile, nodes: int, total_bytes: float
) -> tuple[float, str]:
    """The time to write, and what limits it."""
    rate, limit = float(filesystem.write_bandwidth), f"file system {filesystem.name}"
    cards = _cards_bytes_per_second(profile, nodes)
    if filesystem.kind != "local" and cards < rate:
        rate, limit = cards, f"network cards of {nodes} node{'s' if nodes > 1 else ''}"
    return total_bytes / rate, limit
