"""Publish a checkpoint: write its manifest last, then rename its partial directory.

Fencing: a launch publishes only while it owns the run (its epoch is the highest). A newer launch
first takes its epoch and then renames the partial directories of older ones away, so a stale
writer that passed the check an instant before finds nothing left to rename. Belongs here: this
protocol and retention. Does not belong here: how an engine writes its shards.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.durable import fsync_directory, fsync_file, replace_text
from hpctrain.base.errors import CheckpointError, StorageError
from hpctrain.records.manifest import (
    MANIFEST_NAME,
    Manifest,
    checkpoint_name,
    partial_name,
    read_manifest,
    step_of,
    unpublished_epoch,
    what_is_wrong,
)

TRACKER_NAME = "latest_checkpointed_iteration.txt"
QUARANTINE_NAME = "quarantine"
_DISCARDED = ".discarded-"


class StaleEpochError(CheckpointError):
    """A newer launch owns the run, so this one must not publish."""


@dataclass(frozen=True)
class Fence:
    """The launch that publishes, and how to read which launch owns the run (may raise OSError)."""

    epoch: int
    current_epoch: Callable[[], int]

    def check(self) -> None:
        """Return only if this launch owns the run.

        Raises StaleEpochError when a newer launch does. Raises OSError when nobody can tell: the
        epochs cannot be read, or they do not reach up to this launch, which has taken its own.
        """
        owner = self.current_epoch()
        if owner > self.epoch:
            raise StaleEpochError(f"launch epoch {self.epoch} is stale: epoch {owner} owns the run")
        if owner < self.epoch:
            raise StorageError(
                f"the newest launch in the run directory is {owner}, and this is launch "
                f"{self.epoch}: the directory is not what it was"
            )


def publish(root: Path, manifest: Manifest, fence: Fence) -> Path:
    """Make the partial directory of this step and epoch a checkpoint that counts.

    Writes the manifest, flushes everything, renames the directory and then points Megatron's
    tracker file to it. A good checkpoint of the same step that is already there is kept.
    Raises StaleEpochError when a newer launch owns the run, CheckpointError when the files are
    not as the manifest says, and OSError when the file system keeps it from being done: then it
    can be called again, and continues where it was.
    """
    partial = root / partial_name(manifest.step, manifest.epoch)
    final = root / checkpoint_name(manifest.step)
    fence.check()
    os.stat(root)
    # An earlier call may have renamed the directory and have failed after that.
    if partial.exists() or read_manifest(final) != manifest.sealed():
        _complete(partial, manifest, fence)
        fence.check()
        if final.exists() and not _is_good(final):
            quarantine(root, final, "replaced by a new save of the same step")
        if final.exists():
            shutil.rmtree(partial, ignore_errors=True)  # what stays, the next launch deletes
            return final
        _rename(partial, final, manifest, fence)
    fsync_directory(root)
    point_tracker_to(root, manifest.step)
    return final


def point_tracker_to(root: Path, step: int) -> None:
    """Name `step` in Megatron's tracker file, for its tools; nothing of ours trusts it."""
    replace_text(root / TRACKER_NAME, str(step))


def _complete(partial: Path, manifest: Manifest, fence: Fence) -> None:
    try:
        for file in manifest.files:
            fsync_file(partial / file.name)
        replace_text(partial / MANIFEST_NAME, manifest.sealed().model_dump_json(indent=1))
    except FileNotFoundError as error:
        if not partial.is_dir():
            raise _gone(manifest, fence) from error
        raise CheckpointError(f"step {manifest.step} lacks {error.filename}") from error


def _gone(manifest: Manifest, fence: Fence) -> CheckpointError:
    """The files of a save are gone: taken by a newer launch, with the whole directory (raises
    OSError), or by somebody else."""
    fence.check()
    return CheckpointError(f"the files of step {manifest.step} are gone, and nobody says why")


def _rename(partial: Path, final: Path, manifest: Manifest, fence: Fence) -> None:
    try:
        os.rename(partial, final)
    except FileNotFoundError as error:
        raise _gone(manifest, fence) from error
    problem = what_is_wrong(final, read_manifest(final), deep=False)
    if problem is not None:
        raise CheckpointError(f"{final.name} is not complete right after saving: {problem}")


def quarantine(root: Path, directory: Path, reason: str) -> Path:
    """Move a bad directory out of the way, with the reason beside it; nothing is deleted."""
    shelf = root / QUARANTINE_NAME
    shelf.mkdir(exist_ok=True)
    target = shelf / directory.name
    number = 1
    while target.exists():
        number += 1
        target = shelf / f"{directory.name}.{number}"
    os.rename(directory, target)
    replace_text(shelf / f"{target.name}.reason", reason + "\n")
    fsync_directory(root)
    return target


def fence_off(root: Path, epoch: int) -> list[str]:
    """Remove what older epochs have not published; returns the names.

    Called after `epoch` was claimed and before anything is resumed. The rename is what stops a
    stale writer; the data of an unfinished save has no use and is deleted after it.
    """
    names = []
    for partial in sorted([*root.glob("iter_*.partial-e*"), *root.glob(".saving-e*")]):
        owner = unpublished_epoch(partial.name)
        if owner is None or owner >= epoch:
            continue
        with contextlib.suppress(FileNotFoundError):  # another launch has just done the same
            os.rename(partial, partial.with_name(f"{_DISCARDED}{partial.name}"))
            names.append(partial.name)
    for discarded in root.glob(f"{_DISCARDED}*"):  # also those that a crash has left
        shutil.rmtree(discarded, ignore_errors=True)
    return names


class Retention:
    """Deletes old checkpoints of a run, as one process does after each of its saves.

    It asks about the files of a checkpoint once, and again only for one whose manifest has changed:
    the cost of a save does not grow with the number of checkpoints that are kept.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._verified: dict[int, tuple[int, int]] = {}

    def retire(
        self, keep: int, keep_every_steps: int | None, pinned: Collection[int] = ()
    ) -> list[int]:
        """Delete all but the `keep` newest good checkpoints; returns the steps deleted.

        Steps divisible by `keep_every_steps` and `pinned` ones stay. Deletes only when `keep` newer
        ones have passed the size check. A directory is renamed first, so that half of it never
        counts and the next launch can delete the rest (see `fence_off`).
        """
        root, doomed, newer = self._root, list[int](), 0
        published = published_steps(root)
        self._verified = {s: seen for s, seen in self._verified.items() if s in published}
        left = len(published)
        for step in reversed(published):
            left -= 1
            kept = step in pinned or bool(keep_every_steps and step % keep_every_steps == 0)
            if newer >= keep:
                if not kept and self._is_good(step):
                    doomed.append(step)
            elif newer + 1 + left <= keep:
                break  # none can be doomed, however many of these are good
            else:
                newer += self._is_good(step)
        for step in reversed(doomed):
            directory = root / checkpoint_name(step)
            discarded = directory.with_name(f"{_DISCARDED}{directory.name}")
            if discarded.exists():  # what an earlier deletion has left
                shutil.rmtree(discarded, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):  # somebody else has just deleted it
                os.rename(directory, discarded)
            shutil.rmtree(discarded, ignore_errors=True)
        return doomed[::-1]

    def _is_good(self, step: int) -> bool:
        directory = self._root / checkpoint_name(step)
        try:
            state = (directory / MANIFEST_NAME).stat()
        except FileNotFoundError:
            return False
        seen = state.st_ino, state.st_mtime_ns
        if self._verified.get(step) == seen:
            return True
        if not _is_good(directory):
            return False
        self._verified[step] = seen
        return True


def published_steps(root: Path) -> list[int]:
    """Steps of all published checkpoint directories, ascending, good or not; none where there is
    no such directory. Raises OSError when it cannot be listed."""
    steps = (step_of(path.name) for path in root.iterdir()) if root.is_dir() else iter(())
    return sorted(step for step in steps if step is not None)


def quarantined(root: Path) -> list[tuple[int, int]]:
    """Step and launch of each checkpoint that was put into quarantine.

    One whose manifest cannot be read counts as the newest launch's.
    """
    shelf, found = root / QUARANTINE_NAME, []
    for path in sorted(shelf.iterdir()) if shelf.is_dir() else ():
        step = step_of(path.name.partition(".")[0])
        if step is not None and path.is_dir():
            manifest = read_manifest(path)
            found.append((step, sys.maxsize if manifest is None else manifest.epoch))
    return found


def _is_good(directory: Path) -> bool:
    return what_is_wrong(directory, read_manifest(directory), deep=False) is None
