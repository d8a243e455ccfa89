"""Find the checkpoint to resume from, and check all of a run: what is wrong with each.

The choice never trusts the tracker file or the highest number alone, and never reports "none" when
there is something that could not be used: starting from step 0 would lose work silently. Belongs
here: choosing, and moving bad ones away. Does not belong here: what a good checkpoint is (see
`hpctrain.records.manifest`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import CheckpointError
from hpctrain.base.formats import USE_NEWER, NewerFormatError
from hpctrain.checkpoints.publish import (
    QUARANTINE_NAME,
    TRACKER_NAME,
    point_tracker_to,
    published_steps,
    quarantine,
)
from hpctrain.records.manifest import (
    FileDigest,
    Manifest,
    checkpoint_name,
    file_problem,
    list_problem,
    read_manifest,
    what_is_wrong,
)

VerifyLevel = Literal["auto", "size", "sha256"]
# Read before the launch in about a second, which spares the launch if a byte has changed. Above
# that one reader keeps all nodes waiting, and the ranks compare digests while they load anyway.
AUTO_DEEP_LIMIT_BYTES = 2**30
HOW_TO_START_OVER = "`hpctrain resume --from-scratch` starts at step 0 on purpose"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint directory and whether it can be used.

    `newer`: a newer hpctrain has written its manifest, so that nothing is known against it.
    """

    directory: Path
    step: int
    manifest: Manifest | None
    problem: str | None
    deep: bool
    newer: bool = False

    @property
    def good(self) -> bool:
        return self.problem is None


def inspect(directory: Path, step: int, level: VerifyLevel) -> Checkpoint:
    """Check one checkpoint; `auto` reads everything up to 1 GiB, above that sizes only."""
    try:
        manifest = read_manifest(directory)
    except NewerFormatError as error:
        return Checkpoint(directory, step, None, str(error), deep=False, newer=True)
    deep = reads_content(manifest, level)
    problem = what_is_wrong(directory, manifest, deep=deep)
    return Checkpoint(directory, step, manifest, problem, deep)


def reads_content(manifest: Manifest | None, level: VerifyLevel) -> bool:
    """True if a check at this level reads every byte and not only names and sizes."""
    small = manifest is not None and manifest.total_bytes <= AUTO_DEEP_LIMIT_BYTES
    return level == "sha256" or (level == "auto" and small)


def newest_first(root: Path, level: VerifyLevel = "size") -> Iterator[Checkpoint]:
    """Check the published checkpoints one after the other, as far as the caller goes on.

    Each costs a question about each of its files, so whoever looks for one must not ask for all.
    """
    for step in reversed(published_steps(root)):
        yield inspect(root / checkpoint_name(step), step, level)


def checkpoints(root: Path, level: VerifyLevel = "size") -> list[Checkpoint]:
    """All published checkpoints, newest first. Reads only, moves nothing."""
    return list(newest_first(root, level))


def saving_epochs(root: Path) -> dict[int, int | None]:
    """Read which launch has saved each published checkpoint; None where no manifest says so.

    Raises OSError, and NewerFormatError for the manifest of a newer hpctrain.
    """
    found: dict[int, int | None] = {}
    for step in published_steps(root):
        manifest = read_manifest(root / checkpoint_name(step))
        found[step] = manifest.epoch if manifest is not None else None
    return found


def good_steps(root: Path, most: int = 1) -> tuple[int, ...]:
    """The steps of at most `most` good checkpoints by names and sizes, newest first."""
    good = (one.step for one in newest_first(root) if one.good)
    return tuple(islice(good, most))


def newest_listed(root: Path) -> int | None:
    """The step of the newest checkpoint whose list of files is whole, without asking about them.

    For seconds in which Slurm waits: whoever published it has seen every file, and the next launch
    verifies it. A manifest of a newer hpctrain counts as none.
    """
    for step in reversed(published_steps(root)):
        directory = root / checkpoint_name(step)
        with contextlib.suppress(NewerFormatError):
            if list_problem(directory, read_manifest(directory)) is None:
                return step
    return None


@dataclass(frozen=True)
class Selection:
    """What to resume from (None: a fresh start) and what was put into quarantine on the way."""

    checkpoint: Checkpoint | None
    rejected: tuple[Checkpoint, ...]


@dataclass(frozen=True)
class Decisions:
    """What people and supervisors have decided about the checkpoints of a run.

    `at_most_step` rolls back. `rejected` maps steps that no launch may use any more to the reason.
    `from_scratch` is the reason for a start at step 0 that a person wants now. `loss_accepted`: a
    person has accepted one before, so what was put aside by then proves nothing.
    """

    at_most_step: int | None = None
    rejected: Mapping[int, str] = field(default_factory=dict)
    from_scratch: str | None = None
    loss_accepted: bool = False


def select_for_resume(
    root: Path, level: VerifyLevel, decisions: Decisions | None = None
) -> Selection:
    """The newest good checkpoint; newer bad ones go into quarantine with the reason.

    With `at_most_step` the newest good one of at most that step is chosen, and once it is found,
    all newer ones go into quarantine too, so that their steps can be saved again. With
    `from_scratch` all go there, and none is chosen.

    Raises CheckpointError when there are (or were) checkpoints but no good one is left; with
    `at_most_step` nothing newer is moved then. Raises it, too, for one that only a newer hpctrain
    can judge, which stays where it is. Raises OSError when `root` is not there, which is no
    proof that it holds nothing: a file system may not be mounted.
    """
    decisions = decisions or Decisions()
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the directory of checkpoints is not there", root)
    for step, reason in decisions.rejected.items():
        _put_aside(root, step, reason)
    if decisions.from_scratch is not None:
        for step in reversed(published_steps(root)):
            _put_aside(root, step, decisions.from_scratch)
        (root / TRACKER_NAME).unlink(missing_ok=True)
        return Selection(None, ())
    rejected: list[Checkpoint] = []
    at_most_step = decisions.at_most_step
    for step in reversed(published_steps(root)):
        if at_most_step is not None and step > at_most_step:
            continue
        candidate = inspect(root / checkpoint_name(step), step, level)
        if not candidate.good:
            # the directory may just have been away
            os.listdir(root)
            candidate = inspect(root / checkpoint_name(step), step, level)
        if candidate.newer:
            raise CheckpointError(f"{candidate.problem}", hint=USE_NEWER)
        if candidate.good:
            if at_most_step is not None:
                _move_newer(root, step)
            return Selection(candidate, tuple(rejected))
        quarantine(root, candidate.directory, candidate.problem or "")
        rejected.append(candidate)
    shelf = root / QUARANTINE_NAME
    known = not decisions.loss_accepted and (
        (shelf.is_dir() and any(path.is_dir() for path in shelf.iterdir()))
        or (root / TRACKER_NAME).exists()
    )
    if rejected or known or published_steps(root):
        limit = "" if at_most_step is None else f" of step {at_most_step} or before"
        raise CheckpointError(
            f"no good checkpoint{limit} is left in {root}, so a start from step 0 would lose work"
            + "".join(f"; step {bad.step}: {bad.problem}" for bad in rejected),
            hint=f"look into {shelf}; {HOW_TO_START_OVER}",
        )
    return Selection(None, ())


def _put_aside(root: Path, step: int, reason: str) -> None:
    directory = root / checkpoint_name(step)
    if directory.is_dir():
        quarantine(root, directory, reason)


def _move_newer(root: Path, step: int) -> None:
    """Put newer checkpoints into quarantine, newest first: an interruption then leaves no gap."""
    newer = [one for one in reversed(published_steps(root)) if one > step]
    for one in newer:
        quarantine(root, root / checkpoint_name(one), f"rolled back to step {step}")
    if newer:
        point_tracker_to(root, step)


# -- Read every byte on demand, with several threads --------------------------------------------
# Reading and hashing release Python's lock, so threads are enough to keep a parallel file system
# busy.


@dataclass(frozen=True)
class Verified:
    """How far a verification is: files and bytes that were read, of all there are to read."""

    step: int
    files: int
    total_files: int
    read_bytes: int
    total_bytes: int


def verify_all(
    root: Path,
    level: VerifyLevel = "sha256",
    workers: int = 4,
    progress: Callable[[Verified], None] | None = None,
) -> list[Checkpoint]:
    """Check all published checkpoints, newest first; moves and changes nothing.

    With `sha256` every byte of every file is read, by `workers` threads over the files of all
    checkpoints; `auto` reads only checkpoints of up to 1 GiB. `progress` is called after each
    file, never by two threads at once.
    """
    found = [(step, root / checkpoint_name(step)) for step in reversed(published_steps(root))]
    manifests = {step: read_manifest(directory) for step, directory in found}
    deep = {step for step, manifest in manifests.items() if reads_content(manifest, level)}
    items: list[tuple[int, Path, FileDigest]] = [
        (step, directory, file)
        for step, directory in found
        if step in deep and (manifest := manifests[step]) is not None
        for file in manifest.files
    ]
    total_bytes = sum(file.size_bytes for _, _, file in items)
    lock, done_files, done_bytes = threading.Lock(), 0, 0

    def check(item: tuple[int, Path, FileDigest]) -> str | None:
        nonlocal done_files, done_bytes
        step, directory, file = item
        problem = file_problem(directory, file, deep=True)
        with lock:
            done_files, done_bytes = done_files + 1, done_bytes + file.size_bytes
            if progress is not None:
                progress(Verified(step, done_files, len(items), done_bytes, total_bytes))
        return problem

    problems: dict[int, str] = {}  # of each step the first, in the order of the manifest
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="verify") as pool:
        for (step, _, _), problem in zip(items, pool.map(check, items), strict=True):
            if problem is not None:
                problems.setdefault(step, problem)
    judged = []
    for step, directory in found:
        if step in deep:
            # Names and sizes first, then what reading has found.
            problem = what_is_wrong(directory, manifests[step], deep=False) or problems.get(step)
            judged.append(Checkpoint(directory, step, manifests[step], problem, deep=True))
        else:
            judged.append(inspect(directory, step, "size"))
    return judged
