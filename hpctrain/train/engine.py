"""Protocols between the training loop and an engine: training, evaluation, checkpoints.

The loop and the saver use an engine through these protocols only; each engine has a package of its
own in `engines`. Belongs here: the protocols and the values that cross them. Does not belong here:
any engine, any file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpctrain.engines.training import TrainConfig
from hpctrain.records.speed_checks import AxisName
from hpctrain.train.job import Job
from hpctrain.train.rank_environment import Launch
from hpctrain.train.saving.host_buffers import HostBuffers
from hpctrain.train.step_agreement import Control
from hpctrain.train.times import StepClock


@dataclass(frozen=True)
class Position:
    """Progress of the run: finished steps and the samples they consumed."""

    step: int
    consumed_samples: int


@dataclass(frozen=True)
class Update:
    """One optimizer step: [sum of losses, number of them] over all ranks, on this rank's device.

    `learning_rate` is the rate used in the step; `grad_norm` is the norm before clipping.
    """

    totals: Any
    grad_norm: Any
    learning_rate: float

    @property
    def loss(self) -> float:
        """The mean loss as a float, computed from the reduced fp32 sums; waits for the device."""
        return mean_loss(self.totals)


def mean_loss(totals: Any) -> float:
    """Return the mean of [sum of losses, number of them]; nan for a fully masked batch."""
    loss_sum, count = totals.tolist()
    return loss_sum / count if count else float("nan")


@dataclass(frozen=True)
class Evaluation:
    """Means over the validation data; `accuracy` is of classes only, from 0 to 1."""

    loss: float
    accuracy: float | None = None


def evaluated(totals: Any) -> Evaluation:
    """Compute means from [sum of losses, number of them(, number of correct classes)]."""
    right = float(totals[2]) if len(totals) > 2 else None
    count = float(totals[1])
    return Evaluation(mean_loss(totals[:2]), right / count if right is not None and count else None)


def evaluated_samples(config: TrainConfig, number: int) -> range:
    """Return the samples of a global batch of the validation data, which never grows."""
    return range(config.global_batch_size * number, config.global_batch_size * (number + 1))


class Engine(Protocol):
    """The model, its optimizer and its data on this rank. All ranks call the same methods.

    The engine starts and stops `clock` around forward and backward passes and around reading (see
    `data.open_data`), the loop around the optimizer.
    """

    @property
    def clock(self) -> StepClock: ...

    @property
    def rejection(self) -> str | None:
        """Why this rank's gradients must be rejected; None while they are finite."""

    def update(self, samples: range, before_step: Callable[[], None]) -> Update:
        """Run one optimizer step on the global batch of `samples`, whose number may grow.

        `before_step` is called between the backward passes and the optimizer's step.
        """

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Evaluate these global batches of the validation data; None without any data.

        `batches` is consumed one by one, as the batches are computed, and may end early; it yields
        at least one number, the same on all ranks. Does not affect training.
        """

    def weights_are_finite(self) -> bool:
        """Check this rank's weights."""


@dataclass(frozen=True)
class Writing:
    """One rank's planned part of a checkpoint.

    `write` runs in another process, forked or sent to it by pickle: it writes this rank's files
    below the directory, and returns their names and the argument of `finish`. It is None where this
    rank has nothing to write. `finish` is a collective call after all ranks have written.
    """

    write: Callable[[], tuple[list[str], Any]] | None
    finish: Callable[[Any], None]


@dataclass(frozen=True)
class Form:
    """The files of an engine's checkpoint, to verify that none is missing from the manifest.

    `leader_files` are written by rank 0 beside the shards; `shards` is a glob for all others.
    `library_version`: of the library that writes them, for engines whose resume depends on it.
    """

    leader_files: tuple[str, ...]
    shards: str
    library_version: str | None = None


class Snapshot(Protocol):
    """The state in a checkpoint. All methods are collective calls.

    `buffers` hold what is being written; None where writers are forked (`saving.writer`).
    """

    form: Form
    buffers: HostBuffers | None

    def estimated_bytes(self, control: Control) -> int:
        """Estimate the size of a checkpoint on disk."""

    def plan(self, position: Position, directory: Path) -> Writing:
        """Plan the files of all ranks; with `buffers`, tensors are copied before this returns."""

    def restore(self, directory: Path) -> tuple[Position, str | None]:
        """Load everything; returns the position, and a remark if some state was not restored.

        Raises InvalidInputError when the checkpoint belongs to another run, LoadFailedError
        when its files are damaged.
        """


@dataclass(frozen=True)
class Parts:
    """The objects that an engine builds on one rank."""

    engine: Engine
    snapshot: Snapshot


@dataclass(frozen=True)
class AxisGroup:
    """The ranks of one axis that this rank belongs to, in the order of the axis.

    `group` is a process group of torch with all of `ranks`; it may have others.
    """

    axis: AxisName
    group: Any
    ranks: tuple[int, ...]

    @property
    def name(self) -> str:
        """torch's name of the group, as its flight recorder writes it."""
        return str(self.group.group_name)


class Mesh(Protocol):
    """The process groups of one rank."""

    @property
    def reads(self) -> bool:
        """Whether this rank reads data: a stage within a pipeline does not."""

    @property
    def axes(self) -> tuple[AxisGroup, ...]:
        """The groups that training uses, axes of size 1 left out; the same axes on all ranks."""

    @property
    def control(self) -> Any:
        """A gloo group of all ranks for agreements, separate from the collectives on GPUs."""


class Room(Protocol):
    """The module `assembly` of an engine; its functions are collective calls."""

    def join(self, config: Any, launch: Launch) -> Mesh:
        """Join the launch's process groups."""

    def build(self, job: Job, mesh: Any, control: Control) -> Parts:
        """Build model, optimizer and data; weights stay unset if a checkpoint will be loaded."""
