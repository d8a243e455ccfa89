"""Fetch a Slurm of another release from Debian into a cache, without root and without installing.

Belongs here: which releases can be had, where they are kept, and whether fetching failed for want
of a network. Does not belong here: how packages are unpacked (see `slurm-from-debian` beside this
file), starting what was unpacked (see `sandbox`).
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from hpctrain.errors import SlurmError, SlurmUnreachableError, UsageError
from hpctrain.sandbox.programs import find_programs

# The suite of Debian that has each release. Suites are named, not `stable` or `testing`, which
# change; forky is not released yet, and what it has is compared with the release after unpacking.
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
_SCRIPT = Path(__file__).with_name("slurm-from-debian")
# sysexits.h, EX_UNAVAILABLE: the mirror cannot be reached.
_OFFLINE_EXIT_CODE = 69
# Some 35 MB from the mirror, and unpacking on a machine that is busy with other things.
_TIMEOUT_SECONDS = 900.0


def default_cache() -> Path:
    """Return the directory that releases are unpacked below (XDG Base Directory Specification)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".cache"
    return base / "hpctrain" / "slurm"


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


def is_complete(directory: Path) -> bool:
    """Check that a Slurm was unpacked there to its end."""
    return (directory / "complete").is_file()


def fetch_slurm(slurm: str, cache: Path) -> Path:
    """Return the directory of the Slurm that `slurm` names; a release is fetched on first use.

    Processes that fetch the same release side by side wait for each other. Raises
    SlurmUnreachableError if the Debian mirror cannot be reached, SlurmError if anything else
    prevents it, and UsageError for an unknown release or directory.
    """
    directory = slurm_directory(slurm, cache)
    if slurm not in SUITES:
        return directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["bash", str(_SCRIPT), SUITES[slurm], str(directory)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        message = f"Slurm {slurm} could not be fetched within {_TIMEOUT_SECONDS:g} s"
        raise SlurmError(message, "run the same command again") from expired
    except OSError as error:
        raise SlurmError(f"cannot unpack Slurm {slurm} into {directory}: {error}") from error
    if done.returncode == _OFFLINE_EXIT_CODE:
        raise SlurmUnreachableError(
            f"cannot fetch Slurm {slurm}: {_error_in(done.stderr)}",
            "is the network up? What was fetched once needs none",
        )
    if done.returncode != 0:
        raise SlurmError(f"cannot fetch Slurm {slurm}: {_error_in(done.stderr)}")
    found = find_programs(directory).version
    if found != tuple(int(number) for number in slurm.split(".")):
        dotted = ".".join(f"{number:02d}" for number in found)
        raise SlurmError(
            f"Debian {SUITES[slurm]} has Slurm {dotted} now, and not {slurm}",
            f"to use it all the same: --slurm {directory}",
        )
    return directory


def _error_in(stderr: str) -> str:
    """Return what the script gave as its error, with the lines that follow it."""
    return stderr.partition("error: ")[2].strip() or stderr.strip()
