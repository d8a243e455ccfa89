"""Read the Python files beside a `config.json`, and compute their digest. Nothing is imported.

Belongs here: which files these are. Does not belong here: running them (`train.engines.models`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.spec.families import Config

# module.Class; code of another repository has its name and `--` before
_NAMED = re.compile(r"(\w+)\.(\w+)")


def code_files(directory: Path) -> dict[str, bytes]:
    """Read all Python files of a directory, by name. Raises InvalidInputError."""
    try:
        return {file.name: file.read_bytes() for file in sorted(directory.glob("*.py"))}
    except OSError as error:
        problem = Problem(f"cannot be read: {error.strerror}", str(directory), node_dependent=True)
        raise InvalidInputError([problem]) from error


def code_digest(files: Mapping[str, bytes]) -> str:
    """Compute the digest of files: of their names, in order, and what is in each."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return f"sha256:{digest.hexdigest()}"


def unchanged_code(directory: Path, digest: str) -> dict[str, bytes]:
    """Read the files of which somebody has given the digest. Raises InvalidInputError if it is of
    others."""
    files = code_files(directory)
    if (found := code_digest(files)) != digest:
        message = f"its Python files are not those of {digest}: they are {found}"
        hint = "read them anew, then `hpctrain init --model DIR --remote-code DIGEST`"
        raise InvalidInputError([Problem(message, str(directory), hint=hint)])
    return files


def own_class(config: Config, name: str) -> tuple[str, str] | None:
    """Find the module and class of a `config.json` for an `Auto` class of transformers."""
    named: Any = config.get("auto_map")
    value = named.get(name) if isinstance(named, Mapping) else None
    found = _NAMED.fullmatch(value) if isinstance(value, str) else None
    return (found[1], found[2]) if found else None


def own_code_problem(config: Config, directory: Path) -> tuple[str, str] | None:
    """Say that the class of a `config.json` is code beside it, and its digest; None if it is not.

    Raises InvalidInputError if a file cannot be read.
    """
    if own_class(config, "AutoModelForCausalLM") is None:
        return None
    files = code_files(directory)
    names = ", ".join(files) or "which is not there"
    message = f"`auto_map`: its class is code of its own, {names}"
    allow = f"`hpctrain init --model DIR --remote-code {code_digest(files)}`"
    return message, f"it is never run unless you say so: read these files, then {allow}"
