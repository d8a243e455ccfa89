"""Strikes at the run directory and at what is in it.

Belongs here: taking it away, making it read-only, damaging checkpoints, files that one node does
not see. Does not belong here: processes that hang in the storage client (`strikes_at_processes`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from rehearsal import PlannedFault
from strikes_at_processes import rank_killed
from survival import flip_a_byte
from targets import DeedKind, Target

from hpctrain.checkpoints.discover import checkpoints

_SEEN_SECONDS = 120.0


def directory_away(target: Target) -> None:
    """A mount that is gone for seconds. Nothing may be made anew at its place."""
    away = target.field.stage.directory / f"{target.run_id}.away"
    with target.doing(DeedKind.DIRECTORY_AWAY):
        target.directory.rename(away)
        time.sleep(target.dice.uniform(1, 5))
        if target.directory.exists():
            made = sorted(path.name for path in target.directory.rglob("*"))
            target.wrong.append(f"made anew at the place of the run directory: {made}")
            shutil.rmtree(target.directory)
        away.rename(target.directory)


def directory_read_only(target: Target) -> None:
    """A file system that is mounted read-only for a moment, and then writable again."""
    with target.doing(DeedKind.READ_ONLY), read_only(target.directory):
        time.sleep(target.dice.uniform(1, 4))


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Everything below `directory` refuses to be changed, also for root (chattr(1), `+i`)."""
    if os.geteuid() == 0:
        _chattr("+i", directory)
        try:
            yield
        finally:
            _chattr("-i", directory)
        return
    modes = {path: path.stat().st_mode for path in (directory, *directory.rglob("*"))}
    try:
        for path, mode in modes.items():
            path.chmod(mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
        yield
    finally:
        for path, mode in modes.items():
            with contextlib.suppress(FileNotFoundError):
                path.chmod(mode)


def can_be_read_only(place: Path) -> bool:
    """Mode bits do not bind root, and not every file system knows the attribute."""
    if os.geteuid() != 0:
        return True
    probe = place / "read-only.probe"
    probe.mkdir(exist_ok=True)
    try:
        return _chattr("+i", probe) == 0
    finally:
        _chattr("-i", probe)
        probe.rmdir()


def _chattr(change: str, directory: Path) -> int:
    """Files that are gone before they were reached are no failure."""
    if shutil.which("chattr") is None:
        return 1
    argv = ["chattr", "-R", change, str(directory)]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    return done.returncode


def byte_flipped(target: Target) -> None:
    """The newest checkpoint rots while the job waits in the queue."""
    target.field.slurm("scontrol", "requeue", str(target.rehearsal.job_id))
    target.until(target.only_waits, _SEEN_SECONDS)  # the ranks have written their last one
    found = checkpoints(target.rehearsal.run.layout.checkpoints)
    if len(found) > 1:  # a run whose only checkpoint is bad rightly stops
        shards = sorted(found[0].directory.glob("*.distcp"))
        flip_a_byte(shards[target.dice.randrange(len(shards))])


def file_missing_on_one_node(target: Target) -> None:
    """At the next launch one rank does not find its data; the node is all right after that."""
    rank = target.dice.randrange(2)
    epoch = target.rehearsal.epoch + 1
    target.plan(PlannedFault(epoch=epoch, rank=rank, do="miss_a_file", text="/data/tokens.bin"))
    rank_killed(target)
