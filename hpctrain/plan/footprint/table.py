"""Define the table of a footprint (`footprint.yaml`): rows, and formulas of the size of a run.

Belongs here: what is counted, and how a count depends on the size. Does not belong here: the counts
themselves (the YAML), reading it (`hpctrain.job.footprint`), sums over rows (`predict`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Self, get_args

from pydantic import model_validator
from pydantic_core import core_schema

from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.fields import did_you_mean

# What these words mean is explained at the head of `footprint.yaml`.
Operation = Literal["open", "stat", "rename", "unlink", "mkdir"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
Event = Literal["run", "launch", "fresh", "resume", "checkpoint", "step", "second", "failure",
                "refusal", "outage"]  # fmt: skip
Actor = Literal[
    "submit", "supervisor", "tracking", "exporter", "rank 0", "each rank", "agents", "Slurm"
]
Keeps = Literal["the run", "the checkpoint", "four launches", "until packed"]
# What formulas name beside the numbers of a run: periods of the code, with which a test compares.
CONSTANTS = {
    "snapshot seconds": 2.0,  # between snapshots of the run directory by the supervisor
    "rank times seconds": 10.0,  # between its readings of the times of ranks
    "rank times steps": 20.0,  # per record of these times
    "messages steps": 200.0,  # per record of messages between ranks, unless the spec sets it
    "startup poll seconds": 0.2,  # between looks of a rank that starts for a request to stop
    "follow seconds": 10.0,  # between readings of metrics by who copies them
    "segment seconds": 3600.0,  # of one segment for W&B
    "pass seconds": 15.0,  # between readings of the run directory by who exports metrics
    # The shortest pauses of `hpctrain.slurm.client`, half of the full ones: how long, and how many
    # are shorter still. They go on so long for a controller that is away.
    "pause seconds": 2.5,
    "shorter pauses": 3.0,
    "patience seconds": 600.0,
}


@dataclass(frozen=True)
class RunSize:
    """The numbers on which counts depend."""

    ranks: int = 0
    nodes: int = 0
    agents: int = 0  # processes between srun and the ranks, one per node (`launcher: torchrun`)
    logs: int = 0  # files of ranks, nodes and agents in a launch
    kept_launches: int = 0  # launches whose logs and exit records are never packed
    located: int = 0  # 1 if the supervisor asks Slurm where nodes are
    command_steps: int = 0  # steps of a launch that run commands of the site on its nodes
    files: int = 0  # those that the manifest of a checkpoint lists
    kept: float = 0  # good checkpoints on disk
    unverified: float = 0  # checkpoints that a save verifies
    retired: float = 0  # checkpoints that a save deletes
    sizes: int = 0  # smaller numbers of nodes that are prepared
    jobs: int = 0  # submitted at once
    chain: int = 0  # 1 if each job submits the next
    index_files: int = 0  # of datasets of tokens
    speed_checks: int = 0  # 1 if speed is measured before training
    start_seconds: float = 0  # from srun to the first step
    refusal_seconds: float = 0  # how long a step that refuses to die is killed
    channels: int = 0  # over which people are notified
    tracked: int = 0  # 1 if metrics are copied to TensorBoard or W&B
    tensorboard: int = 0  # 1 if to TensorBoard
    wandb: int = 0  # 1 if to W&B
    exported: int = 0  # 1 if the job exports metrics for Prometheus
    endpoint: int = 0  # 1 if it does over HTTP

    @property
    def archives(self) -> float:
        """Archives of old launches per launch: each takes more launches than are kept."""
        return 1 / (self.kept_launches + 1)


# As formulas name them.
_FIELDS = {one.replace("_", " "): one for one in (*RunSize.__annotations__, "archives")}


@dataclass(frozen=True)
class Formula:
    """A count as a sum of terms, each a factor times numbers of a `RunSize`.

    Its text is `3 + 2 ranks + kept x files + wandb / segment seconds`. The names are those of
    `RunSize`, with spaces, and of `CONSTANTS`; only constants divide.
    """

    terms: tuple[tuple[float, tuple[str, ...]], ...] = ()

    @classmethod
    def parse(cls, written: object) -> Formula:
        """Read a number or the text of a formula. Raises ValueError with the term that is wrong."""
        factors: dict[tuple[str, ...], float] = {}
        for term in str(written).split(" + "):
            product, *divisors = term.split(" / ")
            number = re.match(r"(-?\d+(\.\d+)?)?", product)
            assert number is not None, "it may be empty"
            factor, names = float(number[0] or 1), product[number.end() :].strip()
            counts: tuple[str, ...] = ()
            try:
                for divisor in divisors:
                    factor *= 1 / CONSTANTS[divisor]
                for name in names.split(" x ") if names or not number[0] else ():
                    if name in CONSTANTS:
                        factor *= CONSTANTS[name]
                    else:
                        counts = (*counts, _FIELDS[name])
            except KeyError as error:
                unknown = f"`{error.args[0]}` is neither a number of `RunSize` nor a constant"
                raise ValueError(unknown) from None
            factors[counts] = factors.get(counts, 0) + factor
        return cls(tuple((factor, counts) for counts, factor in factors.items() if factor))

    def at(self, size: RunSize) -> float:
        """The count at this size."""
        total = 0.0
        for factor, names in self.terms:
            total += math.prod((getattr(size, name) for name in names), start=factor)
        return total

    def __str__(self) -> str:
        """The formula for people, with constants worked out: `3 + 2 ranks`; `0` without terms."""
        words = []
        for factor, names in self.terms:
            unit = " x ".join(names).replace("_", " ")
            words.append(unit if unit and factor == 1 else f"{factor:g} {unit}".strip())
        return " + ".join(words) or "0"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: object, handler: object
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.to_string_ser_schema()
        )


NONE, ONE = Formula(), Formula(((1.0, ()),))


class FileRow(Document):
    """What one kind of event does to the files of one place of the run directory.

    `inodes`: files and directories that are made and that the event itself does not remove; `keeps`
    tells what does. `source`: module and function (`MODULE:NAME`). `varies`: how often depends on
    time or on a library, so it is an estimate.
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


class SlurmRow(Document):
    """Slurm commands that one kind of event causes.

    `why`: what is asked or changed. `varies`: not by every event of that kind.
    """

    command: str
    per: Event
    count: Formula = ONE
    why: str
    source: str
    varies: bool = False


class FootprintTable(Document):
    """`footprint.yaml`.

    `places`: patterns (fnmatch) of paths in the run directory. `files`: rows of every run;
    `tracking`, `exporter`: of the processes beside training, where there are such. `rpcs`: of one
    execution of each command.
    """

    places: dict[str, tuple[str, ...]]
    files: tuple[FileRow, ...]
    tracking: tuple[FileRow, ...]
    exporter: tuple[FileRow, ...]
    rpcs: dict[str, Formula]
    slurm: tuple[SlurmRow, ...]

    @model_validator(mode="after")
    def _rows_name_what_is_listed(self) -> Self:
        for section in ("files", "tracking", "exporter"):
            for number, row in enumerate(getattr(self, section)):
                _check_listed((section, number, "place"), row.place, self.places)
        for number, row in enumerate(self.slurm):
            _check_listed(("slurm", number, "command"), row.command, self.rpcs)
        return self

    @property
    def file_rows(self) -> tuple[FileRow, ...]:
        """All rows about files."""
        return (*self.files, *self.tracking, *self.exporter)

    def place_of(self, path: str) -> str | None:
        """Find the first place with a pattern for a path relative to the run directory.

        Endings of temporary files have to be removed first. None: no place has it.
        """
        for place, patterns in self.places.items():
            if any(fnmatchcase(path, pattern) for pattern in patterns):
                return place
        return None


def _check_listed(path: tuple[str | int, ...], name: str, known: Collection[str]) -> None:
    if name not in known:
        hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
        raise Contradiction(path, f"no {path[-1]} is called `{name}`", hint)
