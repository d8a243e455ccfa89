"""Number the launches of a run; the launch with the highest number (epoch) owns the run.

A stale launch (its node came back, its `srun` was orphaned) can see that it is stale, and must no
longer publish a checkpoint. Belongs here: taking and reading the number.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.base.durable import create_exclusive

_SUFFIX = ".json"


def current_epoch(epochs: Path) -> int:
    """The highest epoch taken so far, 0 before the first launch.

    Raises OSError when the directory cannot be listed: a directory that is away does not
    show who owns the run.
    """
    stems = (name.removesuffix(_SUFFIX) for name in os.listdir(epochs) if name.endswith(_SUFFIX))
    return max((int(stem) for stem in stems if stem.isdigit()), default=0)


def claim_epoch(epochs: Path, claimant: str) -> int:
    """Take the next epoch; two claimants never get the same one (link(2) is exclusive).

    Raises OSError when the directory is away; it is never made anew, because the count would
    begin again.
    """
    epoch = current_epoch(epochs) + 1
    while not create_exclusive(epochs / f"{epoch:06d}{_SUFFIX}", claimant):
        epoch += 1
    return epoch


def is_superseded(epochs: Path, epoch: int, claimant: str) -> bool:
    """True if somebody else has taken an epoch beyond `epoch`.

    A claim whose caller was told that it had failed may have gone through: one in the name of
    `claimant` supersedes nobody. Raises OSError when the epochs cannot be read.
    """
    newest = current_epoch(epochs)
    if newest <= epoch:
        return False
    return (epochs / f"{newest:06d}{_SUFFIX}").read_text() != claimant
