"""The archives of hpctrain's code that a run keeps, and which of them its next attempt imports.

`software/current` is a link to one of them. A job resolves it once, when it starts. Belongs here:
names and the link. Does not belong here: packing (see `hpctrain.job.kept_code`).
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from hpctrain.base.durable import replace_bytes, replace_link
from hpctrain.records.layout import RunLayout

_NAME = re.compile(r"hpctrain-(?P<version>.+)-(?P<digest>[0-9a-f]{12})\.zip")
_DIGITS = 12


def archive_name(version: str, digest: str) -> str:
    """Name the archive of a version whose code has this digest (hex)."""
    return f"hpctrain-{version}-{digest[:_DIGITS]}.zip"


def parse_archive_name(name: str) -> tuple[str, str] | None:
    """Return version and digest of an archive; None for a file that is none."""
    found = _NAME.fullmatch(name)
    return (found["version"], found["digest"]) if found else None


def own_code() -> str | None:
    """Return the digest of the archive from which hpctrain is imported; None without one."""
    found = parse_archive_name(Path(__file__).parents[2].name)
    return found and found[1]


def current_archive(run: RunLayout) -> str | None:
    """Return the name of the archive that the next attempt imports; None if the run keeps none."""
    try:
        return os.readlink(run.current_code)
    except OSError:
        return None


def is_current(run: RunLayout, digest: str | None) -> bool:
    """Whether code of this digest, as in an archive's name, is what the next attempt imports.

    True, too, where the run keeps no code: every attempt imports what is installed.
    """
    name = current_archive(run)
    parsed = None if name is None else parse_archive_name(name)
    return parsed is None or parsed[1] == digest


def unread_archive(run: RunLayout, python_path: str, module: str) -> Path | None:
    """Return the archive from which this process should have imported hpctrain, and has not.

    `python_path` is PYTHONPATH, which begins with the archive in the job of a run that keeps its
    code; `module` is the file of any module. Python passes over an archive that it cannot read, and
    takes whatever hpctrain is installed. None: everything is as it should be.
    """
    first = Path(python_path.partition(":")[0])
    if first.parent != run.kept_software.resolve() or Path(module).is_relative_to(first):
        return None
    return first


def use_archive(run: RunLayout, name: str) -> None:
    """Make the next attempt import this archive. Raises OSError."""
    replace_link(run.current_code, name)


# -- Copies of the job scripts that a run was submitted with (`scripts/`), one for each text ----
# `job.sbatch` is the script of the next submission, which a person may have edited; Slurm keeps its
# own copy only while the job is there.


def keep_script(run: RunLayout) -> str | None:
    """Keep a copy of the script, unless that text has been kept; returns its SHA-256.

    None when that is not possible: a submission does not fail for its copy.
    """
    try:
        text = run.script.read_bytes()
        digest = hashlib.sha256(text).hexdigest()
        kept = run.kept_script(digest)
        if not kept.exists():
            run.make_directory(kept.parent)
            replace_bytes(kept, text, mode=0o600)
    except OSError:
        return None
    return digest


def read_kept_script(run: RunLayout, sha256: str) -> str | None:
    """Read the script of that digest; None where no copy of it was kept."""
    try:
        return run.kept_script(sha256).read_text(errors="replace")
    except OSError:
        return None
