"""The document of a footprint: what a run writes and asks, in numbers.

Belongs here: fields and their units. Does not belong here: how a number is found (`predict`).
"""

from __future__ import annotations

from hpctrain.plan.footprint.table import Actor, Event, Operation
from hpctrain.spec.document import Document


class Rates(Document):
    """How often something happens in `period_seconds`: 30 days, or the whole run if it is shorter.

    `assumed`: the time of a step is not predicted.
    """

    run_seconds: float
    period_seconds: float
    launches: float
    failures: float
    preemptions: float
    checkpoints: float
    step_seconds: float
    assumed: bool


class Inodes(Document):
    """Files and directories. `per_period`: that stay, in the period of the rates.

    `at_end`: in the run directory when the run is over, at most.
    """

    per_run: int
    per_launch: int
    per_failed_launch: int
    per_checkpoint: int
    per_period: int
    kept_checkpoints: int
    peak_checkpoints: int
    at_end: int


class Metadata(Document):
    """Metadata operations on the shared file system.

    `launch_*`: of one start from a checkpoint, until the first step and at its end.
    `start_per_second`: of a start, if ranks do theirs within `start_seconds`. `steady_per_second`:
    while the run trains and saves.
    """

    launch_ranks: dict[Operation, int]
    launch_supervisor: dict[Operation, int]
    checkpoint: dict[Operation, int]
    failure: dict[Operation, int]
    start_seconds: float
    start_per_second: float
    steady_ranks_per_second: float
    steady_supervisor_per_second: float


class Requests(Document):
    """RPCs to slurmctld. `worst_hour`: a failed launch, a step that refuses to die, an outage."""

    per_run: int
    per_launch: int
    per_failed_launch: int
    steady_per_hour: float
    mean_per_hour: float
    step_refuses_to_die: int
    controller_restart: int
    worst_hour: int


class Bytes(Document):
    """Bytes of checkpoints, and of logs and records at the assumed length of a line."""

    logs_per_day: int
    checkpoint: int
    kept_checkpoints: int
    peak_checkpoints: int


class FileLine(Document):
    """One row of the table of files, at this size, with the formula of its operations."""

    place: str
    per: Event
    by: Actor
    inodes: float
    calls: dict[Operation, float]
    formulas: dict[str, str]
    source: str
    estimate: bool


class SlurmLine(Document):
    """One row of the table of Slurm commands, at this size."""

    command: str
    per: Event
    commands: float
    rpc: float
    formula: str
    why: str
    source: str
    not_always: bool


class Footprint(Document):
    """What a run would write and ask; `exceeded` has a sentence per limit of the site."""

    ranks: int
    nodes: int
    checkpoint_files: int
    rates: Rates
    inodes: Inodes
    metadata: Metadata
    rpc: Requests
    bytes: Bytes
    assumptions: tuple[str, ...]
    exceeded: tuple[str, ...]
    files: tuple[FileLine, ...]
    slurm: tuple[SlurmLine, ...]
