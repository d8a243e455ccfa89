"""Finding the checkpoint to resume from: the newest good one, and what is wrong with others.

Never trusts the tracker file or the highest number alone, and never reports "none" when there is
something that could not be used: starting from step 0 would lose work silently.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.checkpoints.manifest import (
    Manifest,
    checkpoint_name,
    read_manifest,
    what_is_wrong,
)
from hpctrain.checkpoints.publish import (
    QUARANTINE_NAME,
    TRACKER_NAME,
    point_tracker_to,
    published_steps,
    quarantine,
)
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
    deep = reads_content(manifest, level)
    problem = what_is_wrong(directory, manifest, deep=deep)
    return Checkpoint(directory, step, manifest, problem, deep)


def reads_content(manifest: Manifest | None, level: VerifyLevel) -> bool:
    """True if a check at this level reads every byte and not only names and sizes."""
    small = manifest is not None and manifest.total_bytes <= AUTO_DEEP_LIMIT_BYTES
    return level == "sha256" or (level == "auto" and small)


def checkpoints(root: Path, level: VerifyLevel = "size") -> list[Checkpoint]:
    """All published checkpoints, newest first. Reads only, moves nothing."""
    return [
        inspect(root / checkpoint_name(step), step, level)
        for step in reversed(published_steps(root))
    ]


@dataclass(frozen=True)
class Selection:
    """What to resume from (None: a fresh start) and what was put into quarantine on the way.

    `rolled_back` are the steps of newer checkpoints that were moved away because an older one was
    asked for, newest first.
    """

    checkpoint: Checkpoint | None
    rejected: tuple[Checkpoint, ...]
    rolled_back: tuple[int, ...] = ()


def select_for_resume(root: Path, level: VerifyLevel, at_most_step: int | None = None) -> Selection:
    """The newest good checkpoint; newer bad ones go into quarantine with the reason.

    `at_most_step` rolls back: the newest good one of at most that step is chosen, and once it is
    found, all newer ones go into quarantine too, so that their steps can be saved again.
    Raises CheckpointError when there are (or were) checkpoints but no good one is left; with
    `at_most_step` nothing newer is moved then. Raises OSError when the directory is away, which
    is not the same as a directory without checkpoints.
    """
    rejected: list[Checkpoint] = []
    os.listdir(root)
    for step in reversed(published_steps(root)):
        if at_most_step is not None and step > at_most_step:
            continue
        candidate = _inspect_twice(root, step, level)
        if candidate.good:
            newer = _move_newer(root, step) if at_most_step is not None else ()
            return Selection(candidate, tuple(rejected), newer)
        quarantine(root, candidate.directory, candidate.problem or "")
        rejected.append(candidate)
    if rejected or _something_was_published(root):
        limit = "" if at_most_step is None else f" of step {at_most_step} or before"
        raise CheckpointError(
            f"no good checkpoint{limit} is left in {root}, so a start from step 0 would lose work"
            + "".join(f"; step {bad.step}: {bad.problem}" for bad in rejected),
            hint=f"look into {root / QUARANTINE_NAME}; to start over on purpose, submit a new run",
        )
    return Selection(None, ())


def _inspect_twice(root: Path, step: int, level: VerifyLevel) -> Checkpoint:
    """One that seems bad is looked at again: the directory may just have been away."""
    candidate = inspect(root / checkpoint_name(step), step, level)
    if candidate.good:
        return candidate
    os.listdir(root)
    return inspect(root / checkpoint_name(step), step, level)


def _move_newer(root: Path, step: int) -> tuple[int, ...]:
    """Newest first: whatever an interruption leaves is still a row without a gap at its end."""
    newer = tuple(one for one in reversed(published_steps(root)) if one > step)
    for one in newer:
        quarantine(root, root / checkpoint_name(one), f"rolled back to step {step}")
    if newer:
        point_tracker_to(root, step)
    return newer


def _something_was_published(root: Path) -> bool:
    """True if anything says that there is or once was a published checkpoint."""
    shelf = root / QUARANTINE_NAME
    quarantined = shelf.is_dir() and any(path.is_dir() for path in shelf.iterdir())
    return quarantined or (root / TRACKER_NAME).exists() or bool(published_steps(root))
