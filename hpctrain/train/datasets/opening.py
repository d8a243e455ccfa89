"""From a configuration to training and validation samples, for the formats that are not tokens.

Belongs here: which files make up a part, and whether their numbers are for the model. Does not
belong here: heads and sidecars (see `hpctrain.store.prepared`), reading rows.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch.distributed as dist

from hpctrain.engines.hugging_face import classes_of
from hpctrain.engines.module import ModuleConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.datasets import COLUMNS, npz_path
from hpctrain.store.prepared import read_samples_sidecar
from hpctrain.train.datasets.ahead import Ahead, useful_workers
from hpctrain.train.datasets.archive import Table, open_archive
from hpctrain.train.datasets.images import ImageRows, listed
from hpctrain.train.datasets.made_up import MadeUpConversations, MadeUpPictures, MadeUpTexts
from hpctrain.train.datasets.order import Order, split_rows
from hpctrain.train.datasets.pixels import Look
from hpctrain.train.datasets.reading import RowSamples
from hpctrain.train.datasets.rows import ArrayRows, LabelledRows, PackedRows, Rows, check_classes
from hpctrain.train.datasets.share import Share

_CLASSES = {"examples": "labels", "images": "labels", "arrays": "y"}


def open_rows(
    config: ModuleConfig, share: Share, cache: Path, horizons: tuple[int, int]
) -> tuple[RowSamples, RowSamples | None]:
    """Training and validation samples; all ranks must call this (rank 0 lists image folders).

    `horizons` are their numbers, the second one 0 without validation. Raises InvalidInputError
    when there is nothing to read, or when it is not for the model.
    """
    rows = _rows(config, [Path(path) for _, path in config.data_blend], cache)
    if config.data_validation is None:
        training, validation = split_rows(len(rows), config.data_split)
        others = rows
    else:
        others = _rows(config, [Path(config.data_validation)], cache)
        training, validation = np.arange(len(rows)), np.arange(len(others))
    for part, found in (("training", training), ("validation", validation)):
        if len(found) == 0 and (part == "training" or horizons[1]):
            words = f"data_split {config.data_split} leaves none of {len(rows)} samples for {part}"
            raise InvalidInputError([Problem(words)])
    first = RowSamples(rows, Order(training, horizons[0], config.seed), config, share, True, None)
    if not horizons[1]:
        return _read_ahead(first), None
    return _read_ahead(first), RowSamples(
        others, Order(validation, horizons[1], None), config, share, False
    )


def _read_ahead(samples: RowSamples) -> RowSamples:
    """By processes of its own, where that is asked for or of use."""
    config, on_gpu = samples.config, samples.share.device.type != "cpu"
    workers = config.data_workers
    if workers is None:
        workers = useful_workers() if on_gpu and config.data_format == "images" else 0
    if workers == 0:
        return samples
    ahead = Ahead(
        samples.attempt, samples.of_step, config.global_batch_size, workers, pinned=on_gpu
    )
    return RowSamples(samples.rows, samples.order, config, samples.share, samples.training, ahead)


def _rows(config: ModuleConfig, paths: list[Path], cache: Path) -> Rows:
    """All rows of some sources. Raises InvalidInputError."""
    look = _look(config)
    if not paths:
        return _made_up(config, look)
    files, roots = paths, paths
    if config.data_format == "images":
        files, roots = _listings(paths, cache)
    _check_class_names(files)
    columns = COLUMNS[config.data_format]
    archives = [open_archive(npz_path(path), columns) for path in files]
    for path, archive in zip(paths, archives, strict=True):
        if config.data_format in _CLASSES:
            labels = archive[_CLASSES[config.data_format]]
            check_classes(labels, classes_of(config.model) or 0, str(path))
    table = Table(archives, next(iter(columns)))
    if config.data_format == "images":
        names = [(archive["names"], archive["ends"]) for archive in archives]
        return ImageRows(table, names, roots, look)
    if config.data_format == "arrays":
        return ArrayRows(table, look)
    if config.data_format == "examples":
        return LabelledRows(table, config.vocab_size)
    return PackedRows(table, config.vocab_size)


def _look(config: ModuleConfig) -> Look:
    return Look(
        side=config.model.image,
        mean=config.pixel_mean,
        std=config.pixel_std,
        augmentation=config.augmentation,
        seed=config.seed,
    )


def _made_up(config: ModuleConfig, look: Look) -> Rows:
    classes = classes_of(config.model) or 0
    if config.data_format in ("images", "arrays"):
        return MadeUpPictures(classes, look)
    if config.data_format == "examples":
        return MadeUpTexts(classes, config.vocab_size, config.seq_length)
    return MadeUpConversations(config.vocab_size, config.seq_length)


def _listings(paths: list[Path], cache: Path) -> tuple[list[Path], list[Path]]:
    """Archives that list image files, and the directories they are in.

    Rank 0 makes those that are missing and tells the others where they are, or why there are none.
    """
    answer: list[tuple[list[str], list[Problem]]] = [([], [])]
    if not _distributed() or dist.get_rank() == 0:
        answer = [_made_listings(paths, cache)]
    if _distributed():
        dist.broadcast_object_list(answer, src=0)
    files, problems = answer[0]
    if problems:
        raise InvalidInputError(problems)
    roots = [path if path.is_dir() else _directory_of(path) for path in paths]
    return [Path(file) for file in files], roots


def _made_listings(paths: list[Path], cache: Path) -> tuple[list[str], list[Problem]]:
    try:
        files = [listed(path, cache) if path.is_dir() else npz_path(path) for path in paths]
    except InvalidInputError as error:
        return [], list(error.problems)
    except OSError as error:
        return [], [Problem(f"cannot be listed: {error}", node_dependent=True)]
    return [str(file) for file in files], []


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _directory_of(path: Path) -> Path:
    """Where the images are that a prepared list names."""
    sidecar = read_samples_sidecar(npz_path(path))
    if sidecar is None or sidecar.directory is None:
        problem = Problem("has no sidecar that says where its images are", str(path))
        raise InvalidInputError([problem])
    return Path(sidecar.directory)


def _check_class_names(files: list[Path]) -> None:
    """Raise InvalidInputError: one class's number may mean another class in another source."""
    named = [(path, read_samples_sidecar(npz_path(path))) for path in files]
    known = [(path, sidecar.classes) for path, sidecar in named if sidecar and sidecar.classes]
    wrong = [path for path, classes in known if classes != known[0][1]]
    if wrong:
        words = f"has other classes than {known[0][0]}"
        raise InvalidInputError([Problem(words, str(path)) for path in wrong])
