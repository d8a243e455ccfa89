"""Finding the checkpoint to resume from: the newest good one, and what is wrong with others.

Never trusts the tracker file or the highest number alone, and never reports "none" when there is
something that could not be used: starting from step 0 would lose work silently.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.checkpoints.manifest import (
    Manifest,
    checkpoint_name,
    read_manifest,
    what_is_wrong,
)
from hpctrain.checkpoints.publish import QUARANTINE_NAME, TRACKER_NAME, published_steps, quarantine
from hpctrain.errors import CheckpointError

VerifyLevel = Literal["auto", "size", "sha256"]
AUTO_DEEP_LIMIT_BYTES = 64 * 2**30


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint directory and whether it can be used."""

    directory: Path
    step: int
    manifest: Manifest | None
    problem: str | None
    deep: bool

    @property
    def good(self) -> bool:
        return self.problem is None


def inspect(directory: Path, step: int, level: VerifyLevel) -> Checkpoint:
    """Check one checkpoint; `auto` reads everything up to 64 GiB, above that sizes only."""
    manifest = read_manifest(directory)
    deep = level == "sha256" or (
        level == "auto" and manifest is not None and manifest.total_bytes <= AUTO_DEEP_LIMIT_BYTES
    )
    problem = what_is_wrong(directory, manifest, deep=deep)
    return Checkpoint(directory, step, manifest, problem, deep)


def checkpoints(root: Path, level: VerifyLevel = "size") -> list[Checkpoint]:
    """All published checkpoints, newest first. Reads only, moves nothing."""
    return [
        inspect(root / checkpoint_name(step), step, level)
        for step in reversed(published_steps(root))
    ]


@dataclass(frozen=True)
class Selection:
    """What to resume from (None: a fresh start) and what was put into quarantine on the way."""

    checkpoint: Checkpoint | None
    rejected: tuple[Checkpoint, ...]


def select_for_resume(root: Path, level: VerifyLevel) -> Selection:
    """The newest good checkpoint; newer bad ones go into quarantine with the reason.

    Raises CheckpointError when there are (or were) checkpoints but no good one is left.
    """
    rejected: list[Checkpoint] = []
    for step in reversed(published_steps(root)):
        candidate = inspect(root / checkpoint_name(step), step, level)
        if candidate.good:
            return Selection(candidate, tuple(rejected))
        quarantine(root, candidate.directory, candidate.problem or "")
        rejected.append(candidate)
    if rejected or _something_was_published(root):
        raise CheckpointError(
            f"no good checkpoint is left in {root}, so a start from step 0 would lose work"
            + "".join(f"; step {bad.step}: {bad.problem}" for bad in rejected),
            hint=f"look into {root / QUARANTINE_NAME}; to start over on purpose, submit a new run",
        )
    return Selection(None, ())


def _something_was_published(root: Path) -> bool:
    """True if a tracker or a quarantined published checkpoint says that there once was one."""
    shelf = root / QUARANTINE_NAME
    quarantined = shelf.is_dir() and any(path.is_dir() for path in shelf.iterdir())
    return quarantined or (root / TRACKER_NAME).exists()
