"""Processes that read ahead of the training loop, in exactly its order.

torch's DataLoader with one microbatch for an item: it hands them out in the order of its sampler,
whoever is done first. Where the loop leaves samples out, reading starts anew from there. Belongs
here: those processes. Does not belong here: what is read.
"""

from __future__ import annotations

import atexit
import contextlib
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

_MOST_WORKERS = 8
_PREFETCHED = 2  # microbatches that each process has ready or under way
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# What Slurm sends to every process of a step while its ranks still save: a rank decides when it
# ends, and its readers end with it.
_FOR_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def useful_workers() -> int:
    """As many as this rank has CPUs beside its own, which Slurm has bound it to."""
    return min(_MOST_WORKERS, max(0, len(os.sched_getaffinity(0)) - 1))


@dataclass(frozen=True)
class Unreadable:
    """Why a microbatch could not be read."""

    message: str


@dataclass
class Ahead:
    """Reads the microbatches of step after step.

    `read` makes one of them, `deal` says which samples those of a step are by its first one,
    `stride` is the number of samples of a step.
    """

    read: Callable[[range], Batch | Unreadable]
    deal: Callable[[int], Iterator[range]]
    stride: int
    workers: int
    pinned: bool
    _next: int | None = field(default=None, init=False)
    _items: Iterator[Any] | None = field(default=None, init=False)

    def of_step(self, consumed_samples: int) -> Iterator[Batch]:
        """The microbatches of the step that begins there. Raises DataError."""
        if self._items is None or self._next != consumed_samples:
            self.close()
            self._items = iter(self._loader(consumed_samples))
            # an interpreter that ends asks its children to by SIGTERM, and waits
            atexit.register(self.close)
        self._next = None
        for _ in self.deal(consumed_samples):
            yield self._taken(self._items)
        self._next = consumed_samples + self.stride

    def _taken(self, items: Iterator[Any]) -> Batch:
        try:
            item = next(items)
        except (RuntimeError, OSError, EOFError) as error:
            # a process is gone, for example killed for its memory; perhaps while it handed over
            raise DataError(f"a process that reads data ahead has ended: {error}") from error
        if isinstance(item, Unreadable):
            raise DataError(item.message)
        assert isinstance(item, Batch)
        return item

    def _loader(self, consumed_samples: int) -> DataLoader:
        return DataLoader(
            _Microbatches(self.read),
            batch_size=None,
            sampler=_Endless(self.deal, consumed_samples, self.stride),
            num_workers=self.workers,
            prefetch_factor=_PREFETCHED,
            pin_memory=self.pinned,
            worker_init_fn=_become_a_reader,
            multiprocessing_context=multiprocessing.get_context("fork"),
        )

    def close(self) -> None:
        """End the processes; a rank that is gone need not, they end with it."""
        atexit.unregister(self.close)
        shut_down = getattr(self._items, "_shutdown_workers", None)
        self._items = None
        if shut_down is not None:
            # torch's handler of SIGCHLD raises where it finds a process that has been killed
            # (torch/utils/data/_utils/signal_handling.py): whoever closes needs it no more
            with contextlib.suppress(RuntimeError):
                shut_down()


@dataclass(frozen=True)
class _Microbatches(Dataset):
    """`DataLoader` asks for items by what its sampler gives: here by the numbers of samples."""

    read: Callable[[range], Batch | Unreadable]

    def __getitem__(self, samples: range) -> Batch | Unreadable:
        return self.read(samples)


@dataclass(frozen=True)
class _Endless(Sampler):
    """The microbatches of all steps from one on."""

    deal: Callable[[int], Iterator[range]]
    consumed_samples: int
    stride: int

    def __iter__(self) -> Iterator[range]:
        first = self.consumed_samples
        while True:
            yield from self.deal(first)
            first += self.stride


def _become_a_reader(number: int) -> None:
    """In the new process: live exactly as long as the rank does."""
    parent = os.getppid()
    for one in _FOR_RANKS:
        signal.signal(one, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before the line above
        os._exit(1)
