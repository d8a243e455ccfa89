"""Prefetch microbatches in worker processes, in exactly the order of the training loop.

Uses torch's DataLoader with one microbatch per item, which keeps the order of its sampler. When the
loop skips samples, prefetching restarts from there. Does not belong here: reading samples.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

from hpctrain.train.datasets.batches import Batch
from hpctrain.train.faults import DataError

_MAX_WORKERS = 8
_PREFETCHED = 2  # microbatches per process that are ready or being read
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Signals that Slurm sends to every process of a step while its ranks still save. A rank decides
# when it ends, and its workers end with it.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def useful_workers() -> int:
    """Return the number of CPUs that Slurm bound this rank to, less one, at most 8."""
    return min(_MAX_WORKERS, max(0, len(os.sched_getaffinity(0)) - 1))


@dataclass(frozen=True)
class Unreadable:
    """Why a microbatch could not be read."""

    message: str


@dataclass
class Prefetcher:
    """Reads the microbatches of consecutive steps.

    `read` reads one of them. `deal` returns the sample numbers of a step's microbatches by the
    first sample of the step. `stride` is the number of samples of a step.
    """

    read: Callable[[range], Batch | Unreadable]
    deal: Callable[[int], Iterator[range]]
    stride: int
    workers: int
    pinned: bool
    _next: int | None = field(default=None, init=False)
    _items: Any = field(default=None, init=False)  # torch's iterator over its worker processes

    def of_step(self, consumed_samples: int) -> Iterator[Batch]:
        """Yield the microbatches of the step that begins there. Raises DataError."""
        if self._items is None or self._next != consumed_samples:
            self.close()
            loader: DataLoader = DataLoader(
                _Microbatches(self.read),
                batch_size=None,
                sampler=_EndlessSampler(self.deal, consumed_samples, self.stride),
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
        for _ in self.deal(consumed_samples):
            try:
                item = next(self._items)
            except (RuntimeError, OSError, EOFError) as error:
                # a worker died, for example killed for its memory
                raise DataError(f"a process that reads data ahead has ended: {error}") from error
            if isinstance(item, Unreadable):
                raise DataError(item.message)
            assert isinstance(item, Batch)
            yield item
        self._next = consumed_samples + self.stride

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

    read: Callable[[range], Batch | Unreadable]

    def __getitem__(self, samples: range) -> Batch | Unreadable:
        return self.read(samples)


@dataclass(frozen=True)
class _EndlessSampler(Sampler):
    """Yields the microbatches of all steps from one on."""

    deal: Callable[[int], Iterator[range]]
    consumed_samples: int
    stride: int

    def __iter__(self) -> Iterator[range]:
        first = self.consumed_samples
        while True:
            yield from self.deal(first)
            first += self.stride


def _init_worker(number: int) -> None:
    """Tie the lifetime of a new worker to that of its rank."""
    parent = os.getppid()
    for ignored in _IGNORED_SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the rank ended before the line above
        os._exit(1)
