"""Writes the directory of a new run: every file that its jobs will read.

Belongs here: which files, private to the user, complete before anything is submitted. Does not
belong here: their contents (`prepare`), Slurm (`job_submission`).
"""

from __future__ import annotations

import grp
import hashlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hpctrain.base.durable import is_temporary, replace_text
from hpctrain.base.errors import UsageError
from hpctrain.job.kept_code import keep_checkout_changes, keep_code
from hpctrain.job.prepare import PreparedRun
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import EventKind
from hpctrain.spec.positions import write_resolved
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.hardware import FilesystemProfile


class RunExistsError(UsageError):
    """Somebody has made the run directory already."""


def _group_name(group: int) -> str:
    try:
        return grp.getgrgid(group).gr_name
    except KeyError:
        return str(group)


def reading_group(prepared: PreparedRun, runs: Path) -> int | None:
    """Return the group that may read the run: that of the directory of runs, or nobody."""
    if prepared.profile.document.run_access == "private":
        return None
    runs.mkdir(parents=True, exist_ok=True)
    return runs.stat().st_gid


def write_run_directory(prepared: PreparedRun, runs: Path) -> RunLayout:
    """Create the complete run directory.

    Raises RunExistsError when it exists already, UsageError for a path that Slurm cannot take or
    that cannot be written.
    """
    layout = RunLayout((runs / prepared.run_id).absolute())
    if "\\" in str(layout.directory):
        # Slurm takes the backslashes out of the path of a log and then expands no pattern in it
        # (sbatch(1), FILENAME PATTERN), so the job would die at once, with signal 53.
        raise UsageError(
            f"Slurm cannot write the log of a job below a directory with a backslash: "
            f"{layout.directory}",
            hint="choose another directory: `--runs` or $HPCTRAIN_RUNS",
        )
    access = prepared.profile.document.run_access
    group = reading_group(prepared, runs)
    controls = access == "group-control"
    try:
        layout.create(group, group_controls=controls)
    except FileExistsError as error:
        raise RunExistsError(f"run directory {layout.directory} exists already") from error
    except OSError as error:
        if group is None or not layout.directory.is_dir():
            raise UsageError(f"{layout.directory} cannot be made: {error.strerror}") from error
        shutil.rmtree(layout.directory)  # ours, and made a moment ago
        raise UsageError(
            f"{layout.directory.parent} is of group {_group_name(group)}, to which no directory of "
            f"yours can be given: {error.strerror} (`run_access` in the profile)",
            hint="become a member of the group, or name another directory of runs (`--runs`)",
        ) from None
    try:
        stripe(layout.checkpoints, prepared.profile.document)
    except UsageError:
        shutil.rmtree(layout.directory)
        raise
    for path, text in _documents(prepared, layout):
        replace_text(path, text, mode=0o600)
    keep_code(layout)
    if prepared.checkout is not None:
        keep_checkout_changes(layout, Path(prepared.checkout))
    digest = hashlib.sha256(prepared.script.encode()).hexdigest()
    RunFiles(layout).ledger.append(
        EventKind.RENDERED,
        script_sha256=digest,
        slurm_cluster=prepared.supervise.submission.cluster,
    )
    return layout


def _documents(prepared: PreparedRun, layout: RunLayout) -> list[tuple[Path, str]]:
    """List the files that are made of what was prepared, with their texts."""
    return [
        (layout.spec, prepared.resolved_spec),
        (layout.profile, write_resolved(prepared.profile)),
        (layout.plan, prepared.plan.model_dump_json(indent=1)),
        *prepared.texts(layout).items(),
        *prepared.own_texts(layout),
    ]


def remove_half_written(prepared: PreparedRun, layout: RunLayout) -> None:
    """Remove what an interrupted `write_run_directory` has left, so that it can be written anew.

    Raises UsageError, and removes nothing, where there is anything that it does not write: without
    a ledger a run that has trained looks like one that was never complete.
    """
    written = {path for path, _ in _documents(prepared, layout)}
    foreign = next(_not_written(layout, written), None)
    if foreign is None:
        shutil.rmtree(layout.directory)
        return
    raise UsageError(
        f"{layout.directory} has no {layout.ledger.name}, and `{foreign}` shows that more than a "
        "submission has written there: nothing was removed",
        hint=f"put {layout.ledger.name} back, or move the directory away",
    )


def _not_written(layout: RunLayout, written: set[Path]) -> Iterator[str]:
    """Find what is in the directory of a run and is neither `written` nor kept code."""
    if layout.directory.is_symlink():
        yield str(layout.directory.readlink())
    for path in layout.directory.rglob("*"):
        directory = path.is_dir() and not path.is_symlink()
        known = path in layout.fixed_directories if directory else path in written
        kept = path.parent == layout.kept_software and not directory
        if not known and not kept and not is_temporary(path):
            yield str(path.relative_to(layout.directory))


# -- Spread the files of a run's checkpoints over the servers of a Lustre file system -----------


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
