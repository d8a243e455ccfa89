"""Read every byte of a run's checkpoints on demand, with several threads.

Reading and hashing release Python's lock, so threads are enough to keep a parallel file system
busy. Belongs here: checking all checkpoints of a run at once. Does not belong here: what a good
checkpoint is (see `manifest`), choosing one and moving bad ones away (see `discover`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoints.discover import Checkpoint, VerifyLevel, inspect, reads_content
from hpctrain.checkpoints.publish import published_steps
from hpctrain.records.manifest import (
    FileDigest,
    checkpoint_name,
    file_problem,
    read_manifest,
    what_is_wrong,
)


@dataclass(frozen=True)
class Verified:
    """How far a verification is: files and bytes that were read, of all there are to read."""

    step: int
    files: int
    total_files: int
    read_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class _Item:
    directory: Path
    step: int
    file: FileDigest


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
    items = [
        _Item(directory, step, file)
        for step, directory in found
        if (manifest := manifests[step]) is not None
        for file in manifest.files
    ]
    problems = _read([item for item in items if item.step in deep], workers, progress)
    judged = []
    for step, directory in found:
        if step in deep:
            # Names and sizes first, then what reading has found.
            problem = what_is_wrong(directory, manifests[step], deep=False) or problems.get(step)
            judged.append(Checkpoint(directory, step, manifests[step], problem, deep=True))
        else:
            judged.append(inspect(directory, step, "size"))
    return judged


def _read(
    items: list[_Item], workers: int, progress: Callable[[Verified], None] | None
) -> dict[int, str]:
    """The first problem of each step, in the order of the manifest."""
    counter = _Counter(items, progress)

    def check(item: _Item) -> str | None:
        problem = file_problem(item.directory, item.file, deep=True)
        counter.add(item)
        return problem

    problems: dict[int, str] = {}
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="verify") as pool:
        for item, problem in zip(items, pool.map(check, items), strict=True):
            if problem is not None:
                problems.setdefault(item.step, problem)
    return problems


class _Counter:
    """Adds up what the threads have read, and reports it."""

    def __init__(self, items: list[_Item], report: Callable[[Verified], None] | None) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._files = self._bytes = 0
        self._total_files = len(items)
        self._total_bytes = sum(item.file.size_bytes for item in items)

    def add(self, item: _Item) -> None:
        with self._lock:
            self._files += 1
            self._bytes += item.file.size_bytes
            if self._report is not None:
                self._report(
                    Verified(
                        item.step, self._files, self._total_files, self._bytes, self._total_bytes
                    )
                )
