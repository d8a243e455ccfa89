"""Finds the files of a site that a profile names, and computes their digests.

Belongs here: templates of job scripts, and the file of `software.setup`. Does not belong here:
profiles themselves (`hpctrain.spec.loader`), what a script does with these files
(`hpctrain.job.render`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.job.render.software import SetupFile
from hpctrain.job.render.template import TEMPLATE
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile


def templates_digest(directory: Path) -> str:
    """Compute the SHA-256 (hex) of the names and texts of all templates in a site's directory.

    Raises InvalidInputError if one cannot be read.
    """
    total = hashlib.sha256()
    try:
        for file in sorted(directory.rglob("*.j2")):
            text = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{text}  {file.relative_to(directory)}\n".encode())
    except OSError as error:
        problem = Problem(f"cannot be read: {error.strerror}", str(error.filename or directory))
        raise InvalidInputError([problem]) from error
    return total.hexdigest()


def site_templates(profile: Loaded[ClusterProfile]) -> Path | None:
    """Find the directory of `slurm.template`. Raises InvalidInputError if it is not there."""
    name = profile.document.slurm.template
    if name is None:
        return None
    path = Path(profile.places["slurm.template"].file).absolute().parent / name
    if path.is_file() and path.name == TEMPLATE:
        return path.parent
    if path.is_dir():
        return path
    message = f"`slurm.template`: {path} is neither a directory nor a file called {TEMPLATE}"
    raise InvalidInputError([profile.problem("slurm.template", message)])


def setup_file(profile: Loaded[ClusterProfile]) -> SetupFile | None:
    """Read the digest of the site's setup file. Raises InvalidInputError if it cannot be read."""
    path = profile.document.software.setup
    if path is None:
        return None
    try:
        if not os.path.isabs(path):
            raise OSError(0, "needs an absolute path, because jobs run in other directories")
        return SetupFile(path, hashlib.sha256(Path(path).read_bytes()).hexdigest())
    except OSError as error:
        message = f"`software.setup` {path}: {error.strerror}"
        raise InvalidInputError([profile.problem("software.setup", message)]) from error
