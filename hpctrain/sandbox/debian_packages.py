"""Run a script that unpacks Debian's packages into a directory, without root.

Belongs here: what every such script has in common: where its result is kept, how long it may take,
and how its failure is told. Does not belong here: which packages there are (see `debian_slurm` and
`debian_prometheus`), how they are unpacked (see `debian-packages.bash`).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hpctrain.base.errors import SlurmError, SlurmUnreachableError

# sysexits.h, EX_UNAVAILABLE: the mirror cannot be reached.
_OFFLINE_EXIT_CODE = 69
# Some 35 to 60 MB from the mirror, and unpacking on a machine that is busy with other things.
_TIMEOUT_SECONDS = 900.0


def cache_directory(name: str) -> Path:
    """Return the directory that `name` is unpacked in (XDG Base Directory Specification)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".cache"
    return base / "hpctrain" / name


def is_complete(directory: Path) -> bool:
    """Check that packages were unpacked there to their end."""
    return (directory / "complete").is_file()


def unpack(script: Path, suite: str, directory: Path, what: str) -> None:
    """Run `script` for a Debian suite; it does nothing when the directory is complete already.

    Processes that unpack into the same directory side by side wait for each other. `what` names the
    result for people. Raises SlurmUnreachableError if the Debian mirror cannot be reached, and
    SlurmError if anything else prevents it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["bash", str(script), suite, str(directory)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        message = f"{what} could not be fetched within {_TIMEOUT_SECONDS:g} s"
        raise SlurmError(message, "run the same command again") from expired
    except OSError as error:
        raise SlurmError(f"cannot unpack {what} into {directory}: {error}") from error
    # What the script gave as its error, with the lines that follow it.
    message = done.stderr.partition("error: ")[2].strip() or done.stderr.strip()
    if done.returncode == _OFFLINE_EXIT_CODE:
        raise SlurmUnreachableError(
            f"cannot fetch {what}: {message}",
            "is the network up? What was fetched once needs none",
        )
    if done.returncode != 0:
        raise SlurmError(f"cannot fetch {what}: {message}")
