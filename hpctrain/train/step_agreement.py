"""Agree among all ranks at a step boundary (stop, save, writer state), in one small all-reduce.

It uses its own gloo group of CPU tensors: it neither waits for the GPU nor mixes with the
collectives of training. It starts before the optimizer step and is read after it, which hides its
latency. Does not belong here: what follows from the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# A rank waits for others in every function of this file, as the supervisor recognises it in stacks
# (`hpctrain.judge.odd_stacks`; its unit test compares the two).
WAITS_FOR_RANKS = None
_Value = TypeVar("_Value")


class WriterState(IntEnum):
    """State of a rank's background writer; the agreed state is the largest of all ranks."""

    FINISHED = 0
    RUNNING = 1
    AWAY = 2  # the run directory is unreachable; written files may be lost
    FAILED = 3
    NO_SPACE = 4


@dataclass(frozen=True)
class StepAgreement:
    """The result of an agreement, the same on all ranks."""

    stop: bool
    save: bool
    writer: WriterState
    rejected: bool


class Control:
    """StepAgreement of all ranks; every method must be called by all of them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._votes = torch.zeros(4, dtype=torch.int64)
        self._work: Any = None

    def propose(
        self, *, stop: bool, save: bool, writer: WriterState, rejected: bool = False
    ) -> None:
        """Start to reduce this rank's votes; `result` waits for it.

        `rejected`: this rank's gradients are not finite.
        """
        assert self._work is None, "propose() was called twice"
        votes = [int(stop), int(save), int(writer), int(rejected)]
        self._votes.copy_(torch.tensor(votes, dtype=torch.int64))
        self._work = dist.all_reduce(
            self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def result(self) -> StepAgreement:
        self._work.wait()
        self._work = None
        stop, save, writer, rejected = self._votes.tolist()
        return StepAgreement(bool(stop), bool(save), WriterState(writer), bool(rejected))

    def agree_to_stop(self, stop: bool) -> bool:
        """Return True if any rank votes to stop."""
        self.propose(stop=stop, save=False, writer=WriterState.FINISHED)
        return self.result().stop

    def worst_writer(self, writer: WriterState) -> WriterState:
        self.propose(stop=False, save=False, writer=writer)
        return self.result().writer

    def from_leader(self, value: _Value | None) -> _Value | None:
        """Broadcast a value of rank 0 to all ranks; it must be picklable."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def start_sum(self, vector: Any) -> Any:
        """Start to sum a CPU tensor over all ranks, in place; returns a handle with `.wait()`."""
        return dist.all_reduce(vector, group=self._group, async_op=True)

    def total(self, number: float) -> float:
        """Return the sum of a number over all ranks."""
        vector = torch.tensor([number], dtype=torch.float64)
        self.start_sum(vector).wait()
        return float(vector[0])

    def all_agree(self, yes: bool) -> bool:
        """Return True if `yes` is True on all ranks."""
        return self.total(float(not yes)) == 0

    def who(self, yes: bool) -> tuple[int, ...]:
        """Return the ranks on which `yes` is True, in order."""
        vector = torch.zeros(dist.get_world_size(self._group), dtype=torch.int32)
        vector[dist.get_rank(self._group)] = int(yes)
        self.start_sum(vector).wait()
        return tuple(int(rank) for rank in vector.nonzero().flatten())

    def everywhere(self, text: str) -> list[str]:
        """Gather the text of each rank, by rank."""
        texts: list[str] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(texts, text, group=self._group)
        return texts

    def barrier(self) -> None:
        dist.barrier(group=self._group)
