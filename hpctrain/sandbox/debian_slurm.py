"""Fetch a Slurm of another release from Debian into a cache, without root and without installing.

Belongs here: which releases can be had, where they are kept, and whether fetching failed for want
of a network. Does not belong here: how packages are unpacked (see `slurm-from-debian` beside this
file, and `debian_packages`), starting what was unpacked (see `sandbox`).
"""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain.base.errors import SlurmError, UsageError
from hpctrain.sandbox.debian_packages import cache_directory, unpack
from hpctrain.sandbox.programs import find_programs

# The suite of Debian that has each release. Suites are named, not `stable` or `testing`, which
# change; forky is not released yet, and what it has is compared with the release after unpacking.
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
_SCRIPT = Path(__file__).with_name("slurm-from-debian")


def default_cache() -> Path:
    """Return the directory that releases are unpacked below."""
    return cache_directory("slurm")


def slurm_directory(slurm: str, cache: Path) -> Path:
    """Return where the Slurm is, or will be, that `slurm` names: a release, or a directory.

    Raises UsageError if it is neither.
    """
    if slurm in SUITES:
        return cache / slurm
    directory = Path(slurm)
    if directory.is_dir():
        return directory
    known = ", ".join(SUITES)
    if re.fullmatch(r"\d+\.\d+(\.\d+)?", slurm):
        raise UsageError(f"no Debian suite has Slurm {slurm}", f"there are {known}")
    raise UsageError(f"there is no directory {slurm}", f"give a directory, or one of {known}")


def fetch_slurm(slurm: str, cache: Path) -> Path:
    """Return the directory of the Slurm that `slurm` names; a release is fetched on first use.

    Processes that fetch the same release side by side wait for each other. Raises
    SlurmUnreachableError if the Debian mirror cannot be reached, SlurmError if anything else
    prevents it, and UsageError for an unknown release or directory.
    """
    directory = slurm_directory(slurm, cache)
    if slurm not in SUITES:
        return directory
    unpack(_SCRIPT, SUITES[slurm], directory, f"Slurm {slurm}")
    found = find_programs(directory).version
    if found != tuple(int(number) for number in slurm.split(".")):
        dotted = ".".join(f"{number:02d}" for number in found)
        raise SlurmError(
            f"Debian {SUITES[slurm]} has Slurm {dotted} now, and not {slurm}",
            f"to use it all the same: --slurm {directory}",
        )
    return directory
