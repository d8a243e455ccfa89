"""Copy the data of a run to a disk of this node, and say where the copies are.

Every rank that reads data calls this. Copies are compared with the digests that `submit` has
recorded. Belongs here: which files, and where. Does not belong here: copying (`node_copies`), which
runs may (`hpctrain.job.site_warnings`), reading (`datasets`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.records.data_identity import read_identity
from hpctrain.records.datasets import bin_path, idx_path, npz_path, sidecar_path
from hpctrain.train.job import Job
from hpctrain.train.node_copies import CopyWords, SourceFile, copied_once, only_process

_WORDS = CopyWords("the data", "`data: {stage: false}` reads them where they are")


def staged_copies(job: Job, reads: bool, working: Callable[[], None]) -> dict[str, str]:
    """Copy all sources of a run with `stage_data`, and map each to its copy.

    Empty for other runs and on ranks that read nothing. `working` is called several times a second
    meanwhile. Raises InvalidInputError if a file cannot be copied or does not arrive as it was.
    """
    config = job.config
    if not config.stage_data or not reads:
        return {}
    place = _place(os.environ)
    identity = read_identity(job.run.data_identity)
    digests = {file.path: file.sha256 for file in identity.files} if identity else {}
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        with only_process(place / "lock", working):
            return {
                source: str(copied_once(files, place, digests, working, _WORDS) / Path(source).name)
                for source, files in _files_of(config)
            }
    except OSError as error:
        message = f"cannot be copied to {place}: {error.strerror or error}"
        where = error.filename or place
        raise InvalidInputError([Problem(message, str(where), node_dependent=True)]) from error


def _place(environment: Mapping[str, str]) -> Path:
    """Find the directory of copies: the script has made TMPDIR one on this node's disk."""
    if not environment.get("TMPDIR"):
        message = "TMPDIR is not set, below which data is copied"
        raise InvalidInputError([Problem(message, hint="start the run with its script")])
    return Path(environment["TMPDIR"], "hpctrain-data")


def _files_of(config: TrainConfig) -> Iterator[tuple[str, list[SourceFile]]]:
    """List the sources of a configuration, each with its files and, if it has one, its sidecar."""
    rows = isinstance(config, ModuleConfig) and config.data_format != "tokens"
    sources = [path for _, path in config.data_blend]
    if isinstance(config, ModuleConfig) and config.data_validation is not None:
        sources.append(config.data_validation)
    for source in dict.fromkeys(sources):
        path = Path(source)
        needed = [npz_path(path)] if rows else [bin_path(path), idx_path(path)]
        optional = sidecar_path(path)
        files = [*needed, optional] if optional.exists() else needed
        found = [(file, file.stat()) for file in files]
        yield (
            source,
            [
                SourceFile(file, file.name, status.st_size, status.st_mtime_ns)
                for file, status in found
            ],
        )
