"""What all ranks must agree on at a step boundary, in one small all-reduce per step.

Runs on its own gloo group of CPU tensors: it neither waits for the GPU nor mixes with the
collectives of training. Started before the optimizer step and read after it, so its latency is
hidden. Belongs here: agreement. Does not belong here: what follows from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# A rank waits for others in every function of this file, as the supervisor recognises it in stacks
# (`hpctrain.supervise.judge.odd_stacks`; its unit test compares the two).
WAITS_FOR_RANKS = None
_Value = TypeVar("_Value")


class WriterState(IntEnum):
    """A rank's background writer; the largest value of all ranks is what counts."""

    FINISHED = 0
    RUNNING = 1
    AWAY = 2  # the run directory is out of reach; what was written may not count
    FAILED = 3
    NO_SPACE = 4


@dataclass(frozen=True)
class Agreement:
    """The same on all ranks."""

    stop: bool
    save: bool
    writer: WriterState
    rejected: bool


class Control:
    """Agreement of all ranks; every method must be called by all of them."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._votes = torch.zeros(4, dtype=torch.int64)
        self._work: Any = None

    def propose(
        self, *, stop: bool, save: bool, writer: WriterState, rejected: bool = False
    ) -> None:
        """Start to reduce this rank's wishes; `result` waits for it.

        `rejected`: this rank's gradients are not finite.
        """
        assert self._work is None, "propose() was called twice"
        votes = [int(stop), int(save), int(writer), int(rejected)]
        self._votes.copy_(torch.tensor(votes, dtype=torch.int64))
        self._work = dist.all_reduce(
            self._votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True
        )

    def result(self) -> Agreement:
        self._work.wait()
        self._work = None
        stop, save, writer, rejected = self._votes.tolist()
        return Agreement(bool(stop), bool(save), WriterState(writer), bool(rejected))

    def agree_to_stop(self, stop: bool) -> bool:
        """True if any rank wants to stop."""
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
        """Begin to add up a CPU tensor over all ranks, in place; `.wait()` on what is returned."""
        return dist.all_reduce(vector, group=self._group, async_op=True)

    def total(self, number: float) -> float:
        """The sum of a number over all ranks."""
        vector = torch.tensor([number], dtype=torch.float64)
        self.start_sum(vector).wait()
        return float(vector[0])

    def all_agree(self, yes: bool) -> bool:
        """True if all ranks say yes."""
        return self.total(float(not yes)) == 0

    def who(self, yes: bool) -> tuple[int, ...]:
        """The ranks that say yes, in their order."""
        vector = torch.zeros(dist.get_world_size(self._group), dtype=torch.int32)
        vector[dist.get_rank(self._group)] = int(yes)
        self.start_sum(vector).wait()
        return tuple(int(rank) for rank in vector.nonzero().flatten())

    def everywhere(self, text: str) -> list[str]:
        """The text of each rank, by rank."""
        texts: list[str] = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(texts, text, group=self._group)
        return texts

    def barrier(self) -> None:
        dist.barrier(group=self._group)
