"""Units of the footprint's table: operations on files, commands of Slurm, and formulas of a size.

Belongs here: what is counted, and how a count depends on the size of a run. Does not belong here:
the counts themselves (`file_rows`, `slurm_rows`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Literal, get_args

# System calls that a metadata server answers: open(2) of files and directories, with and without
# creating; stat(2), access(2), readlink(2), statfs(2) by name; rename(2) and link(2); unlink(2) and
# rmdir(2); mkdir(2). Not fstat(2) of an open file, read, write and fsync.
Operation = Literal["open", "stat", "rename", "unlink", "mkdir"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
# `run`: once, when it is submitted. `launch`: each start of all ranks. `fresh`, `resume`: in
# addition, if it begins at step 0 or loads a checkpoint. `failure`: in addition, if it fails.
# `second`: while the run lives. `refusal`: a step that refuses to die. `outage`: the controller is
# away when a launch ends.
Event = Literal[
    "run",
    "launch",
    "fresh",
    "resume",
    "checkpoint",
    "step",
    "second",
    "failure",
    "refusal",
    "outage",
]
# `tracking`, `exporter`: processes beside training, on the node of the supervisor.
Actor = Literal[
    "submit", "supervisor", "tracking", "exporter", "rank 0", "each rank", "agents", "Slurm"
]
# How long an inode stays: as long as the run directory; as its checkpoint is kept; four launches;
# until its launch is old and packed (`hpctrain.store.old_launches`).
Keeps = Literal["the run", "the checkpoint", "four launches", "until packed"]


@dataclass(frozen=True)
class RunSize:
    """The numbers on which counts depend.

    `agents`: processes between srun and the ranks, one per node (`launcher: torchrun`), else 0.
    `logs`: files of ranks, nodes and agents in a launch. `kept_launches`: launches whose logs and
    exit records are never packed. `located`: 1 if the supervisor asks Slurm where nodes are, else
    0. `files`: those that the manifest of a checkpoint
    lists. `kept`: good checkpoints on disk. `unverified`, `retired`: those that a save verifies
    and deletes.
    `sizes`: smaller numbers of nodes that are prepared. `jobs`: submitted at once. `chain`: 1 if
    each job submits the next. `index_files`: of datasets of tokens. `speed_checks`: 1 if speed is
    measured before training. `start_seconds`: from srun to the first step. `refusal_seconds`: how
    long a step that refuses to die is killed. `channels`: over which the run tells people.
    `tracked`: 1 if metrics are copied to TensorBoard or W&B; `tensorboard`, `wandb`: 1 for each.
    `exported`: 1 if the job exports metrics for Prometheus; `endpoint`: 1 if over HTTP.
    """

    ranks: int
    nodes: int
    agents: int
    logs: int
    kept_launches: int
    located: int
    files: int
    kept: float
    unverified: float
    retired: float
    sizes: int
    jobs: int
    chain: int
    index_files: int
    speed_checks: int
    start_seconds: float
    refusal_seconds: float
    channels: int = 0
    tracked: int = 0
    tensorboard: int = 0
    wandb: int = 0
    exported: int = 0
    endpoint: int = 0

    @property
    def archives(self) -> float:
        """Archives of old launches per launch: each takes more launches than are kept."""
        return 1 / (self.kept_launches + 1)


@dataclass(frozen=True)
class Formula:
    """A count as a sum over terms of a `RunSize`: `Formula(3, ranks=2)` is 3 + 2 x ranks."""

    fixed: float = 0
    ranks: float = 0
    nodes: float = 0
    agents: float = 0
    logs: float = 0
    kept_launches: float = 0
    archives: float = 0
    located: float = 0
    files: float = 0
    kept: float = 0
    kept_files: float = 0
    unverified: float = 0
    unverified_files: float = 0
    retired: float = 0
    retired_files: float = 0
    sizes: float = 0
    jobs: float = 0
    chain: float = 0
    index_files: float = 0
    ranks_index_files: float = 0
    speed_checks: float = 0
    start_seconds: float = 0
    refusal_seconds: float = 0
    channels: float = 0
    tracked: float = 0
    tensorboard: float = 0
    wandb: float = 0
    exported: float = 0
    endpoint: float = 0

    def at(self, size: RunSize) -> float:
        """The count at this size."""
        total = self.fixed
        for name, factor in self._terms:
            product = factor
            for part in _PARTS.get(name, (name,)):
                product *= getattr(size, part)
            total += product
        return total

    def __str__(self) -> str:
        """The formula for people: `3 + 2 ranks`; `0` if nothing is counted."""
        words = [f"{self.fixed:g}"] if self.fixed else []
        for name, factor in self._terms:
            unit = " x ".join(part.replace("_", " ") for part in _PARTS.get(name, (name,)))
            words.append(unit if factor == 1 else f"{factor:g} {unit}")
        return " + ".join(words) or "0"

    @functools.cached_property
    def _terms(self) -> list[tuple[str, float]]:
        named = [(one.name, getattr(self, one.name)) for one in fields(self)[1:]]
        return [(name, factor) for name, factor in named if factor]


_PARTS = {
    "kept_files": ("kept", "files"),
    "unverified_files": ("unverified", "files"),
    "retired_files": ("retired", "files"),
    "ranks_index_files": ("ranks", "index_files"),
}
NONE = Formula()


@dataclass(frozen=True)
class FileRow:
    """What one kind of event does to the files of one place.

    `place`: a key of `places.PLACES`. `inodes`: files and directories that are made and that the
    event itself does not remove; `keeps` says what does. `source`: module and function
    (`MODULE:NAME`). `varies`: how often depends on time or on a library, so it is an estimate.
    """

    place: str
    per: Event
    by: Actor
    source: str
    inodes: Formula = NONE
    keeps: Keeps = "the run"
    open: Formula = NONE
    stat: Formula = NONE
    rename: Formula = NONE
    unlink: Formula = NONE
    mkdir: Formula = NONE
    varies: bool = False

    def calls(self, operation: Operation, size: RunSize) -> float:
        """How many of these operations one event causes at this size."""
        formula: Formula = getattr(self, operation)
        return formula.at(size)

    def all_calls(self, size: RunSize) -> float:
        """All operations together."""
        return sum(self.calls(operation, size) for operation in OPERATIONS)


@dataclass(frozen=True)
class SlurmRow:
    """Slurm commands that one kind of event causes; `command` is a key of `RPC_OF_COMMAND`.

    `why`: what is asked or changed. `varies`: not by every event of that kind.
    """

    command: str
    per: Event
    count: Formula
    why: str
    source: str
    varies: bool = False
