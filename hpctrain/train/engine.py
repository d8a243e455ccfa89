"""What an engine does for the training loop, and what of it ends up in a checkpoint.

The loop, the saver and everything that watches over a run know an engine by these protocols only;
each engine has a room of its own below this one. Belongs here: the protocols and the values that
cross them. Does not belong here: any engine, any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock


@dataclass(frozen=True)
class Position:
    """Where the run stands: finished steps and the samples they consumed."""

    step: int
    consumed_samples: int


@dataclass(frozen=True)
class Update:
    """One optimizer step: [sum of losses, number of them] over all ranks, on this rank's device.

    `learning_rate` is the one the step was made with; `grad_norm` is taken before clipping.
    """

    totals: Any
    grad_norm: Any
    learning_rate: float

    @property
    def loss(self) -> float:
        """Waits for the device. float64 of the reduced fp32 sums; nan where nothing counts."""
        return mean_loss(self.totals)


def mean_loss(totals: Any) -> float:
    """The mean of [sum of losses, number of them]; nan for a batch in which nothing counts."""
    loss_sum, count = totals.tolist()
    return loss_sum / count if count else float("nan")


@dataclass(frozen=True)
class Evaluation:
    """Means over the validation data; `accuracy` is of classes only, from 0 to 1."""

    loss: float
    accuracy: float | None = None


def evaluated(totals: Any) -> Evaluation:
    """From [sum of losses, number of them], for classes also how many were right."""
    right = float(totals[2]) if len(totals) > 2 else None
    count = float(totals[1])
    return Evaluation(mean_loss(totals[:2]), right / count if right is not None and count else None)


class Engine(Protocol):
    """The model, its optimizer and its data on this rank. All ranks call the same methods.

    `clock` is started and stopped around forward and backward passes, and around reading (see
    `data.timed`); the loop does so around the optimizer.
    """

    @property
    def clock(self) -> StepClock: ...

    @property
    def rejection(self) -> str | None:
        """Why this rank's gradients must not be trained on; None while they are good."""

    def update(self, first_sample: int, before_step: Callable[[], None]) -> Update:
        """One optimizer step on the global batch that begins at `first_sample`.

        `before_step` is called between the backward passes and the optimizer's step.
        """

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """On these global batches of the validation data; None without any data.

        `batches` is consumed one by one, as the batches are computed, and may end early; it yields
        at least one number, the same on all ranks. Leaves no trace in the training.
        """

    def weights_are_finite(self) -> bool:
        """Of this rank's weights."""


@dataclass(frozen=True)
class Writing:
    """One rank's part of a checkpoint, planned.

    `write` runs in a forked process: it writes this rank's files below the directory, and returns
    their names and something to hand to `finish`; None where this rank has nothing to write.
    `finish` runs on all ranks together once all of them have written.
    """

    write: Callable[[], tuple[list[str], Any]] | None
    finish: Callable[[Any], None]


@dataclass(frozen=True)
class Form:
    """What an engine's checkpoint looks like on disk, to be sure that nothing was left out.

    `leader_files` are written by rank 0 beside the shards; `shards` is a glob for all others.
    """

    leader_files: tuple[str, ...]
    shards: str


class Snapshot(Protocol):
    """What a checkpoint holds. All ranks call the same methods together."""

    form: Form

    def estimated_bytes(self, control: Control) -> int:
        """About the size of a checkpoint on disk."""

    def plan(self, position: Position, directory: Path) -> Writing:
        """Who writes what; what is on a GPU is copied to the CPU before this returns."""

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything; a remark if something could not be kept as it was.

        Raises InvalidInputError when the checkpoint belongs to another run, LoadFailedError
        when its files are damaged.
        """


@dataclass(frozen=True)
class Parts:
    """What a room builds on one rank."""

    engine: Engine
    snapshot: Snapshot


class Mesh(Protocol):
    """The process groups of one rank."""

    @property
    def control(self) -> Any:
        """A gloo group of all ranks for agreements, apart from the collectives on GPUs."""


class Room(Protocol):
    """The module `assembly` of an engine's room; all ranks call its functions together."""

    def join(self, config: Any, launch: Launch) -> Mesh:
        """Join the launch's process groups."""

    def build(self, job: Job, mesh: Any, control: Control) -> Parts:
        """Model, optimizer and data; weights are not set where a checkpoint will be loaded."""
