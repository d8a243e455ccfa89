"""Records the contents of the files that a run reads, when it is submitted.

Belongs here: finding those files from the trainer's configuration. Does not belong here: the record
itself and comparing with it (`hpctrain.records.data_identity`).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.train_json import train_config_of
from hpctrain.engines.trainer import is_trainer
from hpctrain.engines.training import TrainConfig
from hpctrain.records.data_identity import (
    DataIdentity,
    FileIdentity,
    FolderIdentity,
    evenly,
    identify_file,
    identify_folder,
    write_identity,
)
from hpctrain.records.datasets import (
    DatasetSidecar,
    bin_path,
    idx_path,
    npz_path,
    read_heads,
    read_samples_sidecar,
    sidecar_path,
)
from hpctrain.records.layout import RunLayout

_SAMPLED_IMAGES = 64
_END = struct.Struct("<q")


def record_data(layout: RunLayout) -> DataIdentity:
    """Record the present data of a run in its directory; returns the record.

    Raises InvalidInputError for what cannot be read.
    """
    try:
        settings = layout.train_config.read_bytes()
        if is_trainer(settings):
            identity = DataIdentity(files=())  # its trainer reads what it wants
        else:
            identity = identity_of(train_config_of(layout.train_config, settings))
        write_identity(layout.data_identity, identity)
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise InvalidInputError([Problem(message, error.filename)]) from error
    return identity


def identity_of(config: TrainConfig) -> DataIdentity:
    """List the files that a configuration reads, with digests from sidecars. Raises OSError."""
    files: list[FileIdentity] = []
    folders: list[FolderIdentity] = []
    tokens = not isinstance(config, ModuleConfig) or config.data_format == "tokens"
    paths = [Path(path) for _, path in config.data_blend]
    if isinstance(config, ModuleConfig) and config.data_validation is not None:
        paths.append(Path(config.data_validation))
    for path in paths:
        if tokens:
            try:
                sidecar = DatasetSidecar.model_validate_json(sidecar_path(path).read_bytes())
            except (OSError, ValidationError):
                sidecar = None
            files.append(identify_file(bin_path(path), sidecar.bin_sha256 if sidecar else None))
            files.append(identify_file(idx_path(path), sidecar.idx_sha256 if sidecar else None))
        elif path.is_dir():
            folder, sample = identify_folder(path)
            folders.append(folder)
            files += sample
        else:
            file = npz_path(path)
            samples = read_samples_sidecar(file)
            files.append(identify_file(file, samples.npz_sha256 if samples else None))
            if samples is not None and samples.directory is not None:
                root = Path(samples.directory)
                files += (identify_file(root / name) for name in _sampled_images(file))
    if config.tokenizer:
        path = Path(config.tokenizer)
        visible = [path]
        if path.is_dir():
            visible = sorted(p for p in path.iterdir() if p.is_file() and p.name[0] != ".")
        files += map(identify_file, visible)
    return DataIdentity(files=tuple(files), folders=tuple(folders))


def _sampled_images(file: Path) -> list[str]:
    """Read some names of a list of images as `data prepare` writes it, without NumPy.

    Lists in another form give none.
    """
    heads = read_heads(file)
    ends, names = heads.get("ends"), heads.get("names")
    if ends is None or names is None or ends.dtype != "<i8":
        return []
    if ends.offset is None or names.offset is None:
        return []
    images = []
    with file.open("rb") as stream:
        for row in map(int, evenly([str(row) for row in range(ends.rows)], _SAMPLED_IMAGES)):
            stream.seek(ends.offset + (row - 1) * _END.size if row else 0)
            begin = _END.unpack(stream.read(_END.size))[0] if row else 0
            stream.seek(ends.offset + row * _END.size)
            end = _END.unpack(stream.read(_END.size))[0]
            stream.seek(names.offset + begin)
            images.append(os.fsdecode(stream.read(end - begin)))
    return images
