"""Removes what a run does not need or can make again, such as old logs, or a run as a whole.

Belongs here: what may go, and what has to stay while a job of the run is alive. Does not belong
here: retention of checkpoints (`hpctrain.checkpoints`), commands.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.disk_usage import DiskUsage, remove_tree, total_usage, usage_of, walk
from hpctrain.base.errors import SlurmUnreachableError, UsageError
from hpctrain.base.units import short_bytes
from hpctrain.job.job_queries import why_in_use
from hpctrain.records.epochs import current_epoch
from hpctrain.records.find import RunFiles
from hpctrain.records.jobs import being_submitted
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.records.manifest import (
    DIGESTS_DIRECTORY,
    MANIFEST_NAME,
    step_of,
    unpublished_epoch,
)
from hpctrain.records.old_launches import (
    epoch_directories,
    exits_by_launch,
    log_archives,
    logs_by_launch,
)
from hpctrain.records.requests import read_request, user_name
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.slurm.client import SlurmClient

# Launches whose logs stay of a run that was submitted before it was a setting.
_KEEP_LAUNCHES = 10
# As `hpctrain.checkpoints.publish` names what it deletes.
_DISCARDED = ".discarded-"
# As `hpctrain.base.durable` names a file until it is complete: host, process, thread.
_TEMPORARY_NAME = re.compile(r"\..+\.\d+\.\d+\.tmp")
_TEMPORARY_SECONDS = 3600.0


@dataclass(frozen=True)
class Waste:
    """Paths of one kind that may be removed, and what is in them."""

    kind: str
    paths: tuple[Path, ...]
    usage: DiskUsage


@dataclass(frozen=True)
class Cleaning:
    """What may be removed from a run.

    `in_use` is why something has to stay: a live job, or no answer of Slurm; None if nothing has.
    """

    run_id: str
    waste: tuple[Waste, ...]
    in_use: str | None = None

    @property
    def usage(self) -> DiskUsage:
        return sum((one.usage for one in self.waste), DiskUsage())


def plan_cleaning(
    run: RunFiles,
    slurm: SlurmClient,
    *,
    keep_launches: int | None = None,
    traces: bool = False,
) -> Cleaning:
    """Find what may be removed; removes nothing.

    `keep_launches`: logs and exit records of so many launches stay (None: as the run's spec says),
    while a job is alive at least those of the newest. `traces`: also those of
    profilers, which only training makes again. Raises UsageError for a run whose files this user
    may not remove, or that cannot be read.
    """
    run.refuse_unless_removable("clean")
    try:
        in_use = why_in_use(run, slurm)
    except SlurmUnreachableError:
        in_use = "Slurm does not answer"
    config = known_supervise_config(run.layout.supervise_config)
    if keep_launches is None:
        keep_launches = (config.keep_launches if config is not None else 0) or _KEEP_LAUNCHES
    try:
        found = dict(_find(run.layout, keep_launches, live=in_use is not None, traces=traces))
        waste = [Waste(kind, tuple(paths), total_usage(paths)) for kind, paths in found.items()]
    except OSError as error:
        raise UsageError(f"run `{run.run_id}` cannot be read: {error}") from error
    return Cleaning(run.run_id, tuple(one for one in waste if one.paths), in_use)


def clean(run: RunFiles, cleaning: Cleaning) -> None:
    """Remove what `plan_cleaning` has found; who looks for it later reads of it in the ledger.

    Raises UsageError for what cannot be removed.
    """
    if not cleaning.waste:
        return
    removed = [
        f"{one.kind}: {one.usage.files:,} {'file' if one.usage.files == 1 else 'files'}, "
        f"{short_bytes(one.usage.size_bytes)}"
        for one in cleaning.waste
    ]
    run.ledger.append(EventKind.CLEANED, user=user_name(), evidence=removed)
    for waste in cleaning.waste:
        for path in waste.paths:
            try:
                remove_tree(path)
            except OSError as error:
                raise UsageError(f"{path} cannot be removed: {error}") from error


def _find(
    run: RunLayout, keep: int, *, live: bool, traces: bool
) -> Iterator[tuple[str, list[Path]]]:
    """Yield the paths of each kind.

    While a job is alive, what belongs to the newest launch stays. A launch that begins from now on
    has a higher epoch, so its files have other names.
    """
    newest, keep = current_epoch(run.epochs), max(keep, 1 if live else 0)
    yield "unfinished checkpoints", list(_unfinished_checkpoints(run.checkpoints, newest, live))
    yield "digests of ranks", list(_rank_digests(run.checkpoints))
    old_logs = logs_by_launch(run)[: -keep or None]
    yield "logs", [path for launch in old_logs for path in launch] + log_archives(run)
    old_exits = exits_by_launch(run)[: -keep or None]
    yield "exit records", [path for launch in old_exits for path in launch]
    # NCCL's and Python's, of hangs; those of the newest launch may be wanted, or being written
    old_stacks = [path for epoch, path in epoch_directories(run.stacks) if epoch < newest]
    yield "stacks", old_stacks
    if traces and not live:
        yield "traces", [path for path in (run.traces,) if path.is_dir()]
    if not live:
        yield "cache of the sample order", [path for path in (run.data_cache,) if path.is_dir()]
    yield "temporary files", list(_temporary_files(run))


def _unfinished_checkpoints(root: Path, newest: int, live: bool) -> Iterator[Path]:
    """Yield saves that no launch can publish any more, and what deletions have left."""
    for path in _directories(root):
        epoch = unpublished_epoch(path.name)
        dead = epoch is not None and (epoch < newest or not live)
        # a live launch may be deleting an old checkpoint itself, which does no harm
        if dead or path.name.startswith(_DISCARDED):
            yield path


def _rank_digests(root: Path) -> Iterator[Path]:
    """Yield digests of ranks beside a manifest, which contains them."""
    for path in _directories(root):
        digests = path / DIGESTS_DIRECTORY
        if step_of(path.name) is not None and (path / MANIFEST_NAME).exists() and digests.is_dir():
            yield digests


def _directories(root: Path) -> list[Path]:
    """List directories in the order of names; nothing behind a link."""
    if root.is_symlink() or not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())


def _temporary_files(run: RunLayout) -> Iterator[Path]:
    """Yield files that writers have not completed; a live writer completes one within seconds."""
    before = clock.now() - _TEMPORARY_SECONDS
    for entry in walk(run.directory):
        is_temporary = _TEMPORARY_NAME.fullmatch(entry.name) is not None
        if is_temporary and entry.stat(follow_symlinks=False).st_mtime < before:
            yield Path(entry.path)


# -- Removes a run with everything in its directory, and nothing behind its links ---------------


# Hidden names are no runs (see `runs.all_runs`), so half of a run is never taken for one.
_PREFIX = ".removed-"


def refuse_to_remove(run: RunFiles, slurm: SlurmClient) -> None:
    """Raise UsageError if a job, a hold or a submission of the run forbids to remove it.

    Raises SlurmUnreachableError when nobody can tell whether it has a job.
    """
    run.refuse_unless_removable("rm")
    parent = run.layout.directory.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"run `{run.run_id}` cannot be removed: you may not write into {parent}")
    job = why_in_use(run, slurm)
    if job is not None:
        hint = f"`{run.command('cancel')}` ends it for good"
        raise UsageError(f"run `{run.run_id}` cannot be removed: {job}", hint=hint)
    request = read_request(run.layout)
    if request is not None and request.kind == "hold":
        hint = f"`{run.command('cancel')}` first"
        raise UsageError(f"run `{run.run_id}` cannot be removed: {request.by} holds it", hint=hint)
    if being_submitted(run.ledger.events()):
        raise UsageError(
            f"run `{run.run_id}` cannot be removed: somebody is submitting it",
            hint=f"`{run.command('why')}` says whether that client is gone",
        )


def size_of(run: RunFiles) -> DiskUsage:
    """Count the files of a run and the bytes in them."""
    try:
        return usage_of(run.layout.directory)
    except OSError as error:
        raise UsageError(f"run `{run.run_id}` cannot be read: {error}") from error


def remove(run: RunFiles, slurm: SlurmClient) -> None:
    """Remove the run's directory. Raises what `refuse_to_remove` raises, and UsageError for files
    that cannot be removed, which then lie in a hidden directory beside the runs."""
    refuse_to_remove(run, slurm)
    directory = run.layout.directory
    hidden = directory.with_name(f"{_PREFIX}{directory.name}")
    try:
        if hidden.exists():  # what an earlier attempt could not remove
            remove_tree(hidden)
        os.rename(directory, hidden)
        remove_tree(hidden)
    except OSError as error:
        raise UsageError(f"run `{run.run_id}` cannot be removed completely: {error}") from error
