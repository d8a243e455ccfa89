"""Find the files that a run reads, to record which bytes they hold when it is submitted.

Belongs here: from the trainer's configuration to files and folders. Does not belong here: the
record itself and comparing with it (`hpctrain.store.data_identity`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.train_json import train_config_of
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.archives import ArrayHead, read_heads
from hpctrain.store.data_identity import (
    DataIdentity,
    FileIdentity,
    FolderIdentity,
    evenly,
    identify_file,
    identify_folder,
    write_identity,
)
from hpctrain.store.datasets import DatasetSidecar, bin_path, idx_path, npz_path, sidecar_path
from hpctrain.store.layout import RunLayout
from hpctrain.store.prepared import read_samples_sidecar

_SAMPLED_IMAGES = 64
_END = struct.Struct("<q")


def record_data(layout: RunLayout) -> DataIdentity:
    """Record the data of a run in its directory, as they are now; returns the record.

    Raises InvalidInputError for what cannot be read.
    """
    try:
        identity = identity_of(
            train_config_of(layout.train_config, layout.train_config.read_bytes())
        )
        write_identity(layout.data_identity, identity)
    except OSError as error:
        words = f"cannot be read: {error.strerror or error}"
        raise InvalidInputError([Problem(words, error.filename)]) from error
    return identity


def identity_of(config: TrainConfig) -> DataIdentity:
    """All files that this configuration reads, with digests from sidecars. Raises OSError."""
    files: list[FileIdentity] = []
    folders: list[FolderIdentity] = []
    tokens = not isinstance(config, ModuleConfig) or config.data_format == "tokens"
    paths = [Path(path) for _, path in config.data_blend]
    if isinstance(config, ModuleConfig) and config.data_validation is not None:
        paths.append(Path(config.data_validation))
    for path in paths:
        if tokens:
            files += _pair(path)
        elif path.is_dir():
            folder, sample = identify_folder(path)
            folders.append(folder)
            files += sample
        else:
            files += _archive(path)
    files += map(identify_file, _tokenizer_files(config))
    return DataIdentity(files=tuple(files), folders=tuple(folders))


def _pair(prefix: Path) -> Iterator[FileIdentity]:
    """Megatron's tokens and their index."""
    try:
        sidecar = DatasetSidecar.model_validate_json(sidecar_path(prefix).read_bytes())
    except (OSError, ValidationError):
        sidecar = None
    yield identify_file(bin_path(prefix), sidecar.bin_sha256 if sidecar else None)
    yield identify_file(idx_path(prefix), sidecar.idx_sha256 if sidecar else None)


def _archive(path: Path) -> Iterator[FileIdentity]:
    """Arrays, and a sample of the images that they name."""
    file = npz_path(path)
    sidecar = read_samples_sidecar(file)
    yield identify_file(file, sidecar.npz_sha256 if sidecar else None)
    if sidecar is not None and sidecar.directory is not None:
        root = Path(sidecar.directory)
        yield from (identify_file(root / name) for name in _listed_images(file))


def _listed_images(file: Path) -> list[str]:
    """Some of the names in a list of images, which is read without NumPy where it is as `data
    prepare` writes it; none from others."""
    heads = read_heads(file)
    ends, names = heads.get("ends"), heads.get("names")
    if ends is None or names is None or ends.dtype != "<i8":
        return []
    if ends.offset is None or names.offset is None:
        return []
    rows = evenly([str(row) for row in range(ends.rows)], _SAMPLED_IMAGES)
    return [_name(file, ends, names, int(row)) for row in rows]


def _name(file: Path, ends: ArrayHead, names: ArrayHead, row: int) -> str:
    assert ends.offset is not None and names.offset is not None
    with file.open("rb") as stream:
        stream.seek(ends.offset + (row - 1) * _END.size if row else 0)
        begin = _END.unpack(stream.read(_END.size))[0] if row else 0
        stream.seek(ends.offset + row * _END.size)
        end = _END.unpack(stream.read(_END.size))[0]
        stream.seek(names.offset + begin)
        return os.fsdecode(stream.read(end - begin))


def _tokenizer_files(config: TrainConfig) -> list[Path]:
    if not config.tokenizer:
        return []
    path = Path(config.tokenizer)
    if not path.is_dir():
        return [path]
    return sorted(one for one in path.iterdir() if one.is_file() and one.name[0] != ".")
