"""Check for free space before a checkpoint is written.

A disk that fills up during a save breaks the save and other users of the disk. Nothing is deleted
to make room: old checkpoints may be all that is left of the run. Does not belong here: retention,
which deletes by age (see `hpctrain.checkpoints.publish`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.manifest import checkpoint_name, read_manifest

# Checkpoints of a run differ by little; the margin is for metadata and other users of the disk.
_MARGIN = 1.2
_EXHAUSTED_BYTES = 1 << 16
# Digests, metadata and records beside the shards.
_SPARE_INODES = 16


class NoSpaceError(CheckpointError):
    """The file system, or the quota, has no room for a checkpoint."""


@dataclass(frozen=True)
class Need:
    """Space for a checkpoint in bytes and files, and the source of these numbers."""

    size_bytes: int
    files: int
    source: str


def newest_size(root: Path, world_size: int) -> Need | None:
    """Return the size of the newest published checkpoint; None if there is none with a manifest."""
    for step in reversed(published_steps(root)):
        manifest = read_manifest(root / checkpoint_name(step))
        if manifest is not None:
            files = len(manifest.files) + world_size
            return Need(manifest.total_bytes, files, f"as much as {checkpoint_name(step)}")
    return None


def check_room(root: Path, need: Need) -> str | None:
    """Describe the missing space on the file system of `root`; None if there is room.

    statvfs(3): f_bavail is available to unprivileged users. File systems without a fixed number of
    inodes report 0. User quotas appear in neither.
    """
    state = os.statvfs(root)
    free_bytes, wanted_bytes = state.f_bavail * state.f_frsize, int(_MARGIN * need.size_bytes)
    if free_bytes < wanted_bytes:
        return (
            f"no room for a checkpoint: {_amount(wanted_bytes)} needed ({need.source}, and a fifth "
            f"more), {_amount(free_bytes)} free in {root}; nothing was written or deleted"
        )
    wanted_inodes = need.files + _SPARE_INODES
    if state.f_files and state.f_favail < wanted_inodes:
        return (
            f"no room for a checkpoint: {wanted_inodes} files needed, inodes for {state.f_favail} "
            f"free in {root}; nothing was written or deleted"
        )
    return None


def exhausted(path: Path) -> bool:
    """Check whether the file system of `path` is practically full.

    Libraries often lose the reason of a failed write (PyTorchStreamWriter's message has none).
    """
    try:
        state = os.statvfs(path)
    except OSError:
        return False
    full = state.f_bavail * state.f_frsize < _EXHAUSTED_BYTES
    return full or bool(state.f_files and not state.f_favail)


def _amount(size_bytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"
