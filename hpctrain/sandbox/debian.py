"""Fetch Slurm releases and Prometheus from Debian into a cache, without root or installing.

Belongs here: which releases can be had, where they are kept, and whether fetching failed for want
of a network. Does not belong here: how packages are unpacked (see `slurm-from-debian` and
`prometheus-from-debian` beside this file), starting what was unpacked (see `sandbox`,
`monitoring`).
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import SlurmError, SlurmUnreachableError, UsageError
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


# -- Run a script that unpacks Debian's packages into a directory, without root -----------------


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


# -- Fetch Prometheus, Alertmanager and node exporter from Debian into a cache, without root ----


# Prometheus 2.42 and Alertmanager 0.25. Named, not `stable`, which changes.
PROMETHEUS_SUITE = "bookworm"
_PROMETHEUS_SCRIPT = Path(__file__).with_name("prometheus-from-debian")


@dataclass(frozen=True)
class PrometheusPrograms:
    """The programs in `directory`, as Debian calls them."""

    directory: Path

    @property
    def prometheus(self) -> str:
        return str(self.directory / "bin" / "prometheus")

    @property
    def promtool(self) -> str:
        return str(self.directory / "bin" / "promtool")

    @property
    def alertmanager(self) -> str:
        return str(self.directory / "bin" / "prometheus-alertmanager")

    @property
    def node_exporter(self) -> str:
        return str(self.directory / "bin" / "prometheus-node-exporter")


def prometheus_cache() -> Path:
    """Return the directory that they are unpacked in."""
    return cache_directory("prometheus")


def fetch_prometheus(directory: Path) -> PrometheusPrograms:
    """Return the programs in `directory`, which are fetched on first use.

    Raises SlurmUnreachableError if the Debian mirror cannot be reached, SlurmError if anything else
    prevents it.
    """
    unpack(_PROMETHEUS_SCRIPT, PROMETHEUS_SUITE, directory, "Prometheus")
    return PrometheusPrograms(directory)


# -- Fetch a module system from Debian into a cache, without root ---------------------------------


# Environment Modules 5.2, which has sticky modules.
MODULES_SUITE = "bookworm"
_MODULES_SCRIPT = Path(__file__).with_name("modules-from-debian")


def modules_cache() -> Path:
    """Return the directory that the module system is unpacked in."""
    return cache_directory("modules")


def fetch_modules(directory: Path) -> Path:
    """Return the directory of a module system, which is fetched on first use.

    Raises SlurmUnreachableError if the Debian mirror cannot be reached, SlurmError if anything else
    prevents it.
    """
    unpack(_MODULES_SCRIPT, MODULES_SUITE, directory, "a module system")
    return directory
