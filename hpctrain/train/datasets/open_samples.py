"""Open training and validation samples of a configuration, for all formats but tokens.

Belongs here: which files make up a part, and whether their classes fit the model. Does not belong
here: headers and sidecars (see `hpctrain.records.datasets`), reading rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.hugging_face import classes_of
from hpctrain.engines.module import ModuleConfig
from hpctrain.records.datasets import COLUMNS, npz_path, read_samples_sidecar
from hpctrain.train.datasets.image_rows import ImageRows, list_into_cache
from hpctrain.train.datasets.image_transforms import ImageTransform
from hpctrain.train.datasets.mock_samples import MockConversations, MockImages, MockTexts
from hpctrain.train.datasets.npz_arrays import ArchiveTable, open_archive
from hpctrain.train.datasets.prefetching import Prefetcher, useful_workers
from hpctrain.train.datasets.row_samples import RowSamples
from hpctrain.train.datasets.sample_order import SampleOrder, split_rows
from hpctrain.train.datasets.sample_rows import (
    ArrayRows,
    LabelledRows,
    PackedRows,
    SampleRows,
    check_classes,
)
from hpctrain.train.datasets.share import Share

_CLASSES = {"examples": "labels", "images": "labels", "arrays": "y"}


def open_rows(
    config: ModuleConfig,
    share: Share,
    cache: Path,
    horizons: tuple[int, int],
    copies: Mapping[str, str],
) -> tuple[RowSamples, RowSamples | None]:
    """Open training and validation samples; a collective call (rank 0 lists image folders).

    `horizons` are their numbers, the second one 0 without validation; `copies` are read in place
    of their sources. Raises InvalidInputError when there is nothing to read, or when the data does
    not fit the model.
    """
    rows = _rows(config, [Path(copies.get(path, path)) for _, path in config.data_blend], cache)
    if config.data_validation is None:
        training, validation = split_rows(len(rows), config.data_split)
        others = rows
    else:
        path = config.data_validation
        others = _rows(config, [Path(copies.get(path, path))], cache)
        training, validation = np.arange(len(rows)), np.arange(len(others))
    for part, chosen in (("training", training), ("validation", validation)):
        if len(chosen) == 0 and (part == "training" or horizons[1]):
            split = config.data_split
            message = f"data_split {split} leaves none of {len(rows)} samples for {part}"
            raise InvalidInputError([Problem(message)])
    first = RowSamples(
        rows, SampleOrder(training, horizons[0], config.seed), config, share, True, None
    )
    if not horizons[1]:
        return _with_prefetcher(first), None
    return _with_prefetcher(first), RowSamples(
        others, SampleOrder(validation, horizons[1], None), config, share, False
    )


def _with_prefetcher(samples: RowSamples) -> RowSamples:
    """Add prefetching workers if configured, or by default for images on a GPU."""
    config, on_gpu = samples.config, samples.share.device.type != "cpu"
    workers = config.data_workers
    if workers is None:
        workers = useful_workers() if on_gpu and config.data_format == "images" else 0
    if workers == 0:
        return samples
    prefetcher = Prefetcher(
        samples.try_read, samples.of_step, config.global_batch_size, workers, pinned=on_gpu
    )
    return replace(samples, prefetcher=prefetcher)


def _rows(config: ModuleConfig, paths: list[Path], cache: Path) -> SampleRows:
    """Open all rows of some sources, mock rows without sources. Raises InvalidInputError."""
    transform = ImageTransform(
        side=config.model.image,
        mean=config.pixel_mean,
        std=config.pixel_std,
        augmentation=config.augmentation,
        seed=config.seed,
    )
    if not paths:
        classes = classes_of(config.model) or 0
        if config.data_format in ("images", "arrays"):
            return MockImages(classes, transform)
        if config.data_format == "examples":
            return MockTexts(classes, config.vocab_size, config.seq_length)
        return MockConversations(config.vocab_size, config.seq_length)
    files, roots = paths, paths
    if config.data_format == "images":
        files, roots = _image_lists(paths, cache)
    # the same number may mean another class in another source
    sidecars = [(path, read_samples_sidecar(npz_path(path))) for path in files]
    known = [(path, sidecar.classes) for path, sidecar in sidecars if sidecar and sidecar.classes]
    if wrong := [path for path, classes in known if classes != known[0][1]]:
        message = f"has other classes than {known[0][0]}"
        raise InvalidInputError([Problem(message, str(path)) for path in wrong])
    columns = COLUMNS[config.data_format]
    archives = [open_archive(npz_path(path), columns) for path in files]
    for path, archive in zip(paths, archives, strict=True):
        if config.data_format in _CLASSES:
            labels = archive[_CLASSES[config.data_format]]
            check_classes(labels, classes_of(config.model) or 0, str(path))
    table = ArchiveTable(archives, next(iter(columns)))
    if config.data_format == "images":
        names = [(archive["names"], archive["ends"]) for archive in archives]
        return ImageRows(table, names, roots, transform)
    if config.data_format == "arrays":
        return ArrayRows(table, transform)
    if config.data_format == "examples":
        return LabelledRows(table, config.vocab_size)
    return PackedRows(table, config.vocab_size)


def _image_lists(paths: list[Path], cache: Path) -> tuple[list[Path], list[Path]]:
    """Return the archives that list image files, and the root directory of each.

    Rank 0 writes missing archives and broadcasts their paths, or the problems.
    """
    distributed = dist.is_available() and dist.is_initialized()
    files: list[str] = []
    problems: list[Problem] = []
    if not distributed or dist.get_rank() == 0:
        try:
            for path in paths:
                archive = list_into_cache(path, cache) if path.is_dir() else npz_path(path)
                files.append(str(archive))
        except InvalidInputError as error:
            problems = list(error.problems)
        except OSError as error:
            problems = [Problem(f"cannot be listed: {error}", node_dependent=True)]
    result = [(files, problems)]
    if distributed:
        dist.broadcast_object_list(result, src=0)
    files, problems = result[0]
    if problems:
        raise InvalidInputError(problems)
    roots = []
    for path in paths:
        if path.is_dir():
            roots.append(path)
            continue
        sidecar = read_samples_sidecar(npz_path(path))
        if sidecar is None or sidecar.directory is None:
            problem = Problem("has no sidecar with the directory of its images", str(path))
            raise InvalidInputError([problem])
        roots.append(Path(sidecar.directory))
    return [Path(file) for file in files], roots
