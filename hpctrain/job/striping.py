"""Spread the files of a run's checkpoints over the servers of a Lustre file system.

Belongs here: the layout of the directory of checkpoints, which new files inherit. Does not belong
here: what a profile may say of it (`hpctrain.spec.profile.hardware`).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from hpctrain.base.errors import UsageError
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import FilesystemProfile

_TIMEOUT_SECONDS = 60.0


def stripe(directory: Path, profile: ClusterProfile) -> None:
    """Set the stripes of a new directory as the profile says for its file system, if it does.

    Raises UsageError if `lfs setstripe` (lfs-setstripe(1)) cannot be run or refuses.
    """
    filesystem = profile.filesystem_of(directory)
    if filesystem is None or filesystem.stripe_count is None:
        return
    try:
        ended = subprocess.run(
            stripe_command(directory, filesystem),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        failure = ended.stderr.strip() if ended.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        failure = str(error)
    if failure is not None:
        raise UsageError(
            f"the stripes of {directory} cannot be set: {failure}",
            hint=f"without `stripe_count` of {filesystem.name} in the profile none are set",
        )


def stripe_command(directory: Path, filesystem: FilesystemProfile) -> list[str]:
    """Write the command: `-c` OSTs per file, `-S` bytes on one before the next."""
    words = ["lfs", "setstripe", "-c", str(filesystem.stripe_count)]
    if filesystem.stripe_size is not None:
        words += ["-S", str(int(filesystem.stripe_size))]
    return [*words, str(directory)]
