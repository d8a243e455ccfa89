"""Find the weights that an engine loads: identified, checked and, if wanted, on this node's disk.

Belongs here: which files, and what is wrong with them. Does not belong here: copying
(`hpctrain.train.node_copies`), loading (the engine's business).
"""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import InvalidInputError
from hpctrain.serve.replica.failures import WeightsError
from hpctrain.train.node_copies import CopyWords, SourceFile, copied_once, only_process

_WORDS = CopyWords("the weights", "`weights: {stage: false}` reads them where they are")
_PLACE = "hpctrain-weights"


@dataclass(frozen=True)
class Weights:
    """A directory that an engine can load; `digest` is of the names and sizes of its files."""

    directory: Path
    digest: str


def weights_of(
    source: str,
    stage_directory: str | None,
    environment: Mapping[str, str],
    working: Callable[[], None],
) -> Weights:
    """Check the weights in `source`, and copy them to `stage_directory` unless that is None.

    Whoever else needs them on this node waits for the copy and uses it. `working` is called several
    times a second meanwhile. Raises WeightsError.
    """
    try:
        files = _files_of(Path(source))
    except OSError as error:
        message = f"the weights cannot be read: {error.filename or source}: {error.strerror}"
        raise WeightsError(message, node_dependent=True) from error
    if not any(file.name == "config.json" for file in files):
        raise WeightsError(f"{source} is no Hugging Face directory: it has no config.json")
    digest = _digest(files)
    if stage_directory is None:
        return Weights(Path(source), digest)
    try:
        place = Path(string.Template(stage_directory).substitute(environment)) / _PLACE
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with only_process(place / "lock", working):
            return Weights(copied_once(files, place, {}, working, _WORDS), digest)
    except (InvalidInputError, KeyError) as error:
        raise WeightsError(str(error), node_dependent=True) from error
    except OSError as error:
        where = error.filename or stage_directory
        message = f"the weights cannot be copied to {where}: {error.strerror or error}"
        raise WeightsError(message, node_dependent=True) from error


def _files_of(directory: Path) -> list[SourceFile]:
    """List all files below a directory, in a fixed order. Raises OSError."""
    found = []
    for parent, directories, names in os.walk(directory, onerror=_raise):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            status = path.stat()
            inside = path.relative_to(directory).as_posix()
            found.append(SourceFile(path, inside, status.st_size, status.st_mtime_ns))
    return found


def _raise(error: OSError) -> None:
    raise error


def _digest(files: list[SourceFile]) -> str:
    """Identify weights by the names and sizes of their files (SHA-256, hex)."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.size_bytes} {file.name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()
