"""Keep the report of the rungs: read it, add a rung, hide names of machines and people.

Belongs here: which names are hidden and how. Does not belong here: the format (see
`hpctrain.records.gpu_report`), the checks.
"""

from __future__ import annotations

import getpass
import hashlib
import os
import re
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from bench.gpu.rung import Found, Site
from hpctrain.records.gpu_report import GpuReport, RungResult, write_gpu_report
from hpctrain.version import __version__

KIND = "hpctrain-gpu-report"
_KEY_FILE = "names.key"
_SHORTEST = 2  # characters of a name that is hidden; a single letter is in every text
_Record = TypeVar("_Record")


def read_report(path: Path) -> GpuReport:
    """Read the report, or begin one. Raises ValueError for a file that is none."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return GpuReport(kind="hpctrain-gpu-report", hpctrain=__version__)
    return GpuReport.model_validate_json(text)


def add_rung(report: GpuReport, rung: RungResult, found: Found, site: Site) -> GpuReport:
    """Put a rung in the place of an earlier result of it, and add what it has measured.

    Measurements of an emulated device and of a real one never stand in one report.
    """
    kept = tuple(one for one in report.rungs if one.number != rung.number)
    if any(one.emulated != rung.emulated for one in kept):
        kept, report = (), GpuReport(kind="hpctrain-gpu-report", hpctrain=__version__)
    return report.model_copy(
        update={
            "hpctrain": __version__,
            "profile": site.profile and Path(site.profile).stem,
            "rungs": tuple(sorted((*kept, rung), key=lambda one: one.number)),
            "software": _distinct((*report.software, *found.software)),
            "speed": _newest(report.speed, found.speed, lambda one: (one.nodes, len(one.axes))),
            "kernels": _newest(report.kernels, found.kernels, lambda one: one.gpu),
            "steps": _newest(report.steps, found.steps, lambda one: (one.name, one.gpus)),
        }
    )


def _distinct(records: Iterable[_Record]) -> tuple[_Record, ...]:
    return tuple(dict.fromkeys(records))


def _newest(old: Iterable, new: Iterable, key) -> tuple:  # type: ignore[no-untyped-def, type-arg]
    """Replace the measurements of the same thing, and keep the others."""
    added = list(new)
    again = {key(one) for one in added}
    return (*(one for one in old if key(one) not in again), *added)


def write_report(path: Path, report: GpuReport, directory: Path, *, keep_names: bool) -> None:
    """Write the report; without consent names of nodes, user and paths are hidden."""
    report = report.model_copy(update={"names_kept": keep_names})
    text = report.model_dump_json(indent=1, exclude_defaults=True)
    write_gpu_report(path, (text if keep_names else hidden(text, report, _key(directory))) + "\n")


def hidden(text: str, report: GpuReport, key: bytes) -> str:
    """Replace names by `node-1a2b3c4d`, a hash with a key that is not sent; equal ones stay equal.

    Hidden are the nodes of all measurements, this machine, the nodes of its job, the user, and the
    home directory.
    """
    nodes = {name for check in report.speed for name in check.nodes}
    nodes |= {socket.gethostname(), socket.getfqdn(), *_nodes_of_job()}
    for name in sorted(nodes - {"localhost"}, key=len, reverse=True):
        if len(name) >= _SHORTEST and not name.startswith("node-"):
            text = _replaced(text, name, f"node-{_hash(name, key)}")
    text = text.replace(os.path.expanduser("~") + "/", "~/")
    user = getpass.getuser()
    return _replaced(text, user, "user") if len(user) >= _SHORTEST and user != "root" else text


def _replaced(text: str, name: str, by: str) -> str:
    """Replace whole words; `gpu1` is not a part of `gpu12`."""
    return re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", by, text)


def _nodes_of_job() -> set[str]:
    """Names of this job's nodes, where Slurm lists them one by one."""
    names = {os.environ.get("SLURMD_NODENAME", ""), os.environ.get("SLURM_JOB_NODELIST", "")}
    return {name for name in names if name}


def _hash(name: str, key: bytes) -> str:
    return hashlib.blake2b(name.encode(), key=key, digest_size=4).hexdigest()


def _key(directory: Path) -> bytes:
    """Read the key of this directory, or make one."""
    path = directory / _KEY_FILE
    if not path.exists():
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(16))
    return bytes.fromhex(path.read_text())
