"""Open and read the samples of a run, for all formats but tokens.

They are read directly, or by prefetching workers.

Belongs here: which files make up a part, whether their classes fit the model, and one part as an
engine reads it. Does not belong here: headers and sidecars (see `hpctrain.records.datasets`),
the content of a row (see `sample_rows`).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.module import ModuleConfig
from hpctrain.records.datasets import COLUMNS, npz_path, read_samples_sidecar
from hpctrain.spec.families.settings import classes_of
from hpctrain.train.datasets.batches import Batch
from hpctrain.train.datasets.npz_arrays import ArchiveTable, open_archive
from hpctrain.train.datasets.sample_order import SampleOrder, Share, split_rows
from hpctrain.train.datasets.sample_rows import (
    ArrayRows,
    ImageRows,
    ImageTransform,
    LabelledRows,
    MockConversations,
    MockImages,
    MockTexts,
    PackedRows,
    SampleRows,
    check_classes,
    list_into_cache,
)
from hpctrain.train.faults import DataError
from hpctrain.train.launchers.agent_ranks import die_with_parent
from hpctrain.train.stop import LEFT_TO_RANKS

# -- Prefetch microbatches in worker processes, in exactly the order of the training loop --------
# Uses torch's DataLoader with one microbatch per item, which keeps the order of its sampler. When
# the loop skips samples, prefetching restarts from there.


_MAX_WORKERS = 8
_PREFETCHED = 2  # microbatches per process that are ready or being read


def useful_workers() -> int:
    """Return the number of CPUs that Slurm bound this rank to, less one, at most 8."""
    return min(_MAX_WORKERS, max(0, len(os.sched_getaffinity(0)) - 1))


@dataclass
class Prefetcher:
    """Reads the microbatches of consecutive steps.

    `read` reads one of them. `deal` returns the sample numbers of a step's microbatches by the
    samples of the step. Steps of another size than the one before, or from elsewhere, begin anew.
    """

    read: Callable[[range], Batch | DataError]
    deal: Callable[[range], Iterator[range]]
    workers: int
    pinned: bool
    _next: range | None = field(default=None, init=False)
    _items: Any = field(default=None, init=False)  # torch's iterator over its worker processes

    def of_step(self, samples: range) -> Iterator[Batch]:
        """Yield the microbatches of the step that has `samples`. Raises DataError."""
        if self._items is None or self._next != samples:
            self.close()
            loader: DataLoader = DataLoader(
                _Microbatches(self.read),
                batch_size=None,
                sampler=_EndlessSampler(self.deal, samples),
                num_workers=self.workers,
                prefetch_factor=_PREFETCHED,
                pin_memory=self.pinned,
                worker_init_fn=_init_worker,
                multiprocessing_context=multiprocessing.get_context("fork"),
            )
            # torch's handler raises wherever the rank happens to be, in a backward pass or while it
            # publishes a checkpoint; `next` finds a dead worker without it, in 5 s at most
            # (torch/utils/data/dataloader.py, _try_get_data)
            handler = signal.getsignal(signal.SIGCHLD)
            try:
                self._items = iter(loader)
            finally:
                signal.signal(signal.SIGCHLD, handler)
            # otherwise the interpreter sends SIGTERM to its children at exit, and waits
            atexit.register(self.close)
        self._next = None
        for _ in self.deal(samples):
            try:
                item = next(self._items)
            except (RuntimeError, OSError, EOFError) as error:
                # a worker died, for example killed for its memory
                raise DataError(f"a process that reads data ahead has ended: {error}") from error
            if isinstance(item, DataError):
                raise item
            assert isinstance(item, Batch)
            yield item
        self._next = _following(samples)

    def close(self) -> None:
        """End the workers. They also end by themselves when their rank is gone."""
        atexit.unregister(self.close)
        items, self._items = self._items, None
        if items is None:
            return
        if all(worker.is_alive() for worker in items._workers):
            items._shutdown_workers()
        else:  # a killed one may hold a lock that the farewell waits for
            for worker in items._workers:
                worker.kill()
            items._shutdown = True


@dataclass(frozen=True)
class _Microbatches(Dataset):
    """A dataset whose indices are ranges of sample numbers."""

    read: Callable[[range], Batch | DataError]

    def __getitem__(self, samples: range) -> Batch | DataError:
        return self.read(samples)


@dataclass(frozen=True)
class _EndlessSampler(Sampler):
    """Yields the microbatches of all steps from one on."""

    deal: Callable[[range], Iterator[range]]
    samples: range

    def __iter__(self) -> Iterator[range]:
        samples = self.samples
        while True:
            yield from self.deal(samples)
            samples = _following(samples)


def _following(samples: range) -> range:
    return range(samples.stop, samples.stop + len(samples))


def _init_worker(number: int) -> None:
    """Tie the lifetime of a new worker to that of its rank."""
    parent = os.getppid()
    for ignored in LEFT_TO_RANKS:
        signal.signal(ignored, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # the rank ended before the line above
        os._exit(1)


# -- Read the samples of a run as batches on a device, directly or with prefetching workers ------


@dataclass(frozen=True)
class RowSamples:
    """Training or validation samples of one rank; `prefetcher` None: read on demand."""

    rows: SampleRows
    order: SampleOrder
    config: ModuleConfig
    share: Share
    training: bool
    prefetcher: Prefetcher | None = None

    def microbatches(self, samples: range, reads: bool = True) -> Iterator[Batch | None]:
        """Yield this rank's microbatches of the global batch of `samples`.

        Without `reads`, yields None for each. Raises DataError, InvalidInputError.
        """
        if not reads:
            yield from (None for _ in self.of_step(samples))
        elif self.prefetcher is not None:
            for batch in self.prefetcher.of_step(samples):
                yield batch.to(self.share.device)
        else:
            for own in self.of_step(samples):
                yield self.read(own).to(self.share.device)

    def of_step(self, samples: range) -> Iterator[range]:
        """Yield the sample numbers of each of this rank's microbatches."""
        return self.share.deal(samples, self.config.micro_batch_size)

    def read(self, samples: range) -> Batch:
        """Read in this process, into CPU memory. Raises DataError, InvalidInputError."""
        try:
            return self.rows.read(self.order.of(samples), samples, training=self.training)
        except (OSError, ValueError) as error:
            message = f"samples {samples[0]} to {samples[-1]} cannot be read: {error}"
            raise DataError(message) from error

    def try_read(self, samples: range) -> Batch | DataError:
        """Read in a worker: torch would pickle an exception that is raised without its type."""
        try:
            return self.read(samples)
        except DataError as error:
            return error


# -- Open training and validation samples of a configuration, for all formats but tokens ---------


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
    prefetcher = Prefetcher(samples.try_read, samples.of_step, workers, pinned=on_gpu)
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
