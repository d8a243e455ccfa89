"""Find the programs of Slurm and munge on this machine, and run them with a timeout.

Does not belong here: what a particular call means.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.errors import SlurmError, SlurmUnreachableError, UsageError

INSTALL_HINT = "sudo apt-get install slurmctld slurmd slurm-client munge"
_NAMES = ("slurmctld", "slurmd", "scontrol", "sinfo", "squeue", "scancel", "munged", "munge")
_ACCOUNTING_NAMES = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db")
ACCOUNTING_HINT = (
    "`--slurm 22.05` fetches a Slurm with all of them; or sudo apt-get install slurmdbd "
    "mariadb-server-core mariadb-client-core"
)
UNPACK_HINT = "`hpctrain sandbox up --slurm 24.11` fetches one"
# Ordinary users often lack the directories that hold the daemons.
_SYSTEM_DIRECTORIES = ("/usr/sbin", "/usr/local/sbin", "/sbin")
# HWLOC_SYNTHETIC is hwloc's own: the sockets that slurmd finds, in place of this machine's.
_INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH"),
    "HWLOC_SYNTHETIC",
)
_CALL_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Programs:
    """Full paths by name, the search path that finds them, and the version, e.g. (22, 5).

    `plugins` is the directory of Slurm's plugins, None for the compiled-in one.
    """

    by_name: dict[str, str]
    search_path: str
    version: tuple[int, int]
    plugins: Path | None = None

    def __getitem__(self, name: str) -> str:
        return self.by_name[name]


def find_programs(unpacked: Path | None = None, *, accounting: bool = False) -> Programs:
    """Look up every program that a sandbox needs, in `unpacked` or on this machine's search path.

    `accounting`: also those of slurmdbd and its database.

    `unpacked` is a directory made by `debian`; it goes first on the search path.
    Raises SlurmUnreachableError when a program is missing, UsageError when `unpacked` holds no
    Slurm.
    """
    known = os.environ.get("PATH", os.defpath).split(os.pathsep)
    extra = [directory for directory in _SYSTEM_DIRECTORIES if directory not in known]
    system_path = os.pathsep.join(known + extra)
    more = _ACCOUNTING_NAMES if accounting else ()
    if unpacked is None:
        return _find_on(system_path, system_path, *more)
    own, plugins = unpacked / "bin", unpacked / "plugins"
    if not plugins.is_dir():
        raise UsageError(f"{unpacked} holds no unpacked Slurm", UNPACK_HINT)
    programs = _find_on(str(own), f"{own}{os.pathsep}{system_path}", "slurmstepd", *more)
    return replace(programs, plugins=plugins)


def _find_on(path: str, search_path: str, *more: str) -> Programs:
    paths = {name: shutil.which(name, path=path) for name in (*_NAMES, *more)}
    if missing := [name for name, program in paths.items() if program is None]:
        if set(missing) <= set(_ACCOUNTING_NAMES):
            message = f"accounting needs slurmdbd and MariaDB; not found here: {', '.join(missing)}"
            raise SlurmUnreachableError(message, ACCOUNTING_HINT)
        raise SlurmUnreachableError(
            f"a sandbox needs Slurm and munge; not found here: {', '.join(missing)}", INSTALL_HINT
        )
    by_name = {name: program for name, program in paths.items() if program is not None}
    output = call([by_name["slurmctld"], "-V"], {"PATH": search_path})
    return Programs(by_name, search_path, parse_version(output))


def parse_version(output: str) -> tuple[int, int]:
    """Parse `slurm-wlm 22.05.8` -> (22, 5). Raises SlurmError on anything else."""
    match = re.search(r"\b(\d+)\.(\d+)", output)
    if match is None:
        raise SlurmError(f"slurmctld -V gave no version: {output.strip()!r}")
    return int(match[1]), int(match[2])


def daemon_environment(slurm_conf: Path, programs: Programs) -> dict[str, str]:
    """Return the environment of daemons and clients, without any other Slurm of the caller."""
    kept = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return kept | {"SLURM_CONF": str(slurm_conf), "PATH": programs.search_path}


def call(
    argv: list[str],
    environment: dict[str, str],
    *,
    timeout_seconds: float = _CALL_TIMEOUT_SECONDS,
    directory: Path | None = None,
) -> str:
    """Run one program to its end and return what it wrote to stdout.

    Raises SlurmError with the program's message when it fails, SlurmUnreachableError when it does
    not end in time.
    """
    name = Path(argv[0]).name
    try:
        done = subprocess.run(
            argv,
            env=environment,
            cwd=directory,
            # slurmd reuses a closed descriptor 0 for its log, so there has to be a stdin.
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as expired:
        raise SlurmUnreachableError(f"{name} gave no answer in {timeout_seconds:g} s") from expired
    if done.returncode != 0:
        message = (done.stderr or done.stdout).strip()
        raise SlurmError(f"{name} failed with exit code {done.returncode}: {message}")
    return done.stdout
