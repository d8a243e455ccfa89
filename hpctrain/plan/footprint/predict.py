"""Predict the footprint of a run from its plan and its forecast: files, operations, RPCs, bytes.

Belongs here: the document, the size of a run, how often events happen, sums over the table, limits
of the site. Does not belong here: counts of one event (`footprint.yaml`).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.plan.footprint.table import (
    OPERATIONS,
    Actor,
    Event,
    FileRow,
    FootprintTable,
    Keeps,
    Operation,
    RunSize,
)
from hpctrain.plan.forecast.documents import Forecast
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.document import Document
from hpctrain.spec.profile import ClusterProfile


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


# -- The prediction --------------------------------------------------------------------------------


MONTH_SECONDS = 30 * 86400.0
# Ranks come from srun together; how far apart is the site's network, so it is assumed.
START_SECONDS = 10.0
# A line of rank 0 per step and one of metrics.jsonl, as a run of tests/slurm writes them; what
# libraries print when a rank starts.
STEP_BYTES, LAUNCH_BYTES_PER_RANK = 130 + 400, 2048
# An index of a dataset of tokens: three arrays and a description, for each split.
_FILES_PER_INDEX, _SPLITS = 4, 3
# Launches whose stacks are kept, and how long a step is killed for beyond Slurm's KillWait.
KEPT_STACKS, KILL_SECONDS_BEYOND_KILL_WAIT = 4, 10
_ASSUMPTIONS = (
    f"starts: ranks do their operations within {short_duration(START_SECONDS)}",
    f"logs: {STEP_BYTES} B per step (rank 0's line and its metrics), and "
    f"{short_bytes(LAUNCH_BYTES_PER_RANK)} of warnings per rank and launch",
    "failures: every rank leaves a record and its stacks, the most that can be",
)
_BY_RANKS: tuple[Actor, ...] = ("rank 0", "each rank", "agents")
_BY_SUPERVISOR: tuple[Actor, ...] = ("supervisor", "tracking", "exporter")


def run_size(
    job: TrainingJob, forecast: Forecast, *, logs: int, located: bool = False, sizes: int = 0
) -> RunSize:
    """Describe the run by the numbers on which its footprint depends.

    `logs`: files that ranks, nodes and agents write in a launch. `located`: the supervisor asks
    Slurm where the nodes of its job are. `sizes`: smaller numbers of nodes that `submit` prepares.
    """
    spec, profile = job.spec, job.profile
    ranks, nodes = job.plan.layout.world_size, job.plan.nodes.nodes
    agents = 0 if spec.launcher == "srun" else nodes
    abilities, kept = spec.engine.abilities, spec.checkpoint.keep
    permanent = spec.checkpoint.keep_every_steps
    tokens = spec.data.format == "tokens"
    sources = max(1, len(spec.data.sources))
    indexes = sources + (1 if sources > 1 else 0)  # and one of the blend
    textfile = profile.metrics.textfile is not None and spec.metrics.textfile
    commands = profile.software.commands
    return RunSize(
        ranks=ranks,
        nodes=nodes,
        agents=agents,
        logs=logs,
        kept_launches=spec.logging.keep_launches,
        located=int(located),
        command_steps=sum(map(bool, (commands.node, commands.node_after))),
        files=ranks * abilities.checkpoint_files_per_rank + abilities.checkpoint_files_of_leader,
        kept=kept + (forecast.steps // permanent if permanent else 0),
        unverified=1,
        retired=1,
        sizes=sizes,
        jobs=profile.continuation_jobs if profile.continuation == "singleton" else 1,
        chain=int(profile.continuation == "chain"),
        index_files=indexes * _SPLITS * _FILES_PER_INDEX if tokens else 0,
        speed_checks=1,
        start_seconds=START_SECONDS,
        refusal_seconds=float(profile.slurm.kill_wait) + KILL_SECONDS_BEYOND_KILL_WAIT,
        channels=len(job.notify.channels) if job.notify is not None else 0,
        tracked=int(spec.tracking.wanted),
        tensorboard=int(bool(spec.tracking.tensorboard)),
        wandb=int(spec.tracking.wandb is not None),
        exported=int(textfile or spec.metrics.endpoint),
        endpoint=int(spec.metrics.endpoint),
    )


@dataclass(frozen=True)
class TableSums:
    """Sums over the rows of a table for a run of one size."""

    table: FootprintTable
    size: RunSize

    @property
    def file_rows(self) -> tuple[FileRow, ...]:
        """Rows about files, of the processes beside training only if the run has them."""
        tracking = self.table.tracking if self.size.tracked else ()
        return (*self.table.files, *tracking, *(self.table.exporter if self.size.exported else ()))

    def rows(self, *events: Event, by: Collection[Actor] = ()) -> list[FileRow]:
        """Rows of these kinds of event; `by`: of these actors only."""
        return [row for row in self.file_rows if row.per in events and (not by or row.by in by)]

    def calls(self, *events: Event, by: Collection[Actor] = ()) -> dict[Operation, int]:
        """Sum the operations of one event of each kind; `by`: of these actors only."""
        rows = self.rows(*events, by=by)
        return {one: round(sum(row.calls(one, self.size) for row in rows)) for one in OPERATIONS}

    def inodes(self, *events: Event, keeps: Keeps | None = None) -> float:
        """Sum the inodes made by one event of each kind; `keeps`: that stay so long only."""
        rows = [row for row in self.rows(*events) if keeps in (None, row.keeps)]
        return sum(row.inodes.at(self.size) for row in rows)

    def rpcs(self, *events: Event) -> int:
        """Sum the RPCs to slurmctld of one event of each kind."""
        rows = (row for row in self.table.slurm if row.per in events)
        size, of_command = self.size, self.table.rpcs
        return math.ceil(sum(row.count.at(size) * of_command[row.command].at(size) for row in rows))


def footprint(
    table: FootprintTable,
    job: TrainingJob,
    forecast: Forecast,
    size: RunSize,
    assumptions: tuple[str, ...] = (),
) -> Footprint:
    """Predict what the run writes and asks, and compare it with the limits of the site.

    `forecast` gives the rates of failures and saves (`hpctrain.plan.forecast`); `assumptions` are
    those behind it. `size` is that of `run_size`.
    """
    sums, run_seconds = TableSums(table, size), forecast.times.total_seconds
    period_seconds = min(run_seconds, MONTH_SECONDS)
    part = period_seconds / run_seconds
    # each launch saves once more when it is asked to leave
    saves = forecast.steps / forecast.interval.steps + forecast.starts
    rates = Rates(
        run_seconds=run_seconds,
        period_seconds=period_seconds,
        launches=forecast.starts * part,
        failures=forecast.failures * part,
        preemptions=forecast.preemptions * part,
        checkpoints=saves * part,
        step_seconds=forecast.step_seconds,
        assumed=job.plan.step_seconds is None,
    )
    run, checkpoint = sums.inodes("run"), sums.inodes("checkpoint")
    # The newest checkpoint is complete before the oldest is deleted; until then each rank has a
    # file of digests, in a directory.
    peak = checkpoint * size.kept + checkpoint + size.ranks + 1
    periods = rates.run_seconds / rates.period_seconds
    stacks = KEPT_STACKS * sums.inodes("launch", "failure", keeps="four launches")
    inodes = Inodes(
        per_run=round(run),
        per_launch=round(sums.inodes("launch")),
        per_failed_launch=round(sums.inodes("launch", "failure")),
        per_checkpoint=round(checkpoint),
        per_period=math.ceil(_launches_left(sums, rates, 1)),
        kept_checkpoints=round(checkpoint * size.kept),
        peak_checkpoints=round(peak),
        at_end=math.ceil(run + _launches_left(sums, rates, periods) + stacks + peak),
    )
    starting = sums.calls("launch", "resume", by=_BY_RANKS)
    metadata = Metadata(
        launch_ranks=starting,
        launch_supervisor=sums.calls("launch", "resume", by=_BY_SUPERVISOR),
        checkpoint=sums.calls("checkpoint"),
        failure=sums.calls("failure"),
        start_seconds=START_SECONDS,
        start_per_second=sum(starting.values()) / START_SECONDS,
        steady_ranks_per_second=_steady(sums, rates, _BY_RANKS),
        steady_supervisor_per_second=_steady(sums, rates, _BY_SUPERVISOR),
    )
    launch, failed = sums.rpcs("launch"), sums.rpcs("launch", "failure")
    refusal, outage = sums.rpcs("refusal"), sums.rpcs("outage")
    mean = launch * rates.launches + sums.rpcs("failure") * rates.failures
    steady = float(sums.rpcs("second") * 3600)
    requests = Requests(
        per_run=sums.rpcs("run"),
        per_launch=launch,
        per_failed_launch=failed,
        steady_per_hour=steady,
        mean_per_hour=steady + mean / (rates.period_seconds / 3600),
        step_refuses_to_die=refusal,
        controller_restart=outage,
        worst_hour=math.ceil(steady) + failed + refusal + outage,
    )
    one = forecast.checkpoint.total_bytes
    assert one is not None, "checkpoints of hpctrain's engines have a known size"
    step_bytes = STEP_BYTES * (86400 / forecast.step_seconds)
    launches_per_day = rates.launches * 86400 / rates.period_seconds
    peak_bytes = round(one * (size.kept + 1))
    return Footprint(
        ranks=size.ranks,
        nodes=size.nodes,
        checkpoint_files=size.files + 1,  # and the manifest
        rates=rates,
        inodes=inodes,
        metadata=metadata,
        rpc=requests,
        bytes=Bytes(
            logs_per_day=round(step_bytes + LAUNCH_BYTES_PER_RANK * size.ranks * launches_per_day),
            checkpoint=one,
            kept_checkpoints=round(one * size.kept),
            peak_checkpoints=peak_bytes,
        ),
        assumptions=(*assumptions, *_ASSUMPTIONS),
        exceeded=_exceeded_limits(job.profile, inodes, peak_bytes, requests.worst_hour),
        files=tuple(_file_line(row, size) for row in sums.file_rows),
        slurm=tuple(
            SlurmLine(
                command=row.command,
                per=row.per,
                commands=row.count.at(size),
                rpc=row.count.at(size) * table.rpcs[row.command].at(size),
                formula=str(row.count),
                why=row.why,
                source=row.source,
                not_always=row.varies,
            )
            for row in table.slurm
            if row.count.at(size)
        ),
    )


def _launches_left(sums: TableSums, rates: Rates, periods: float) -> float:
    """Count what so many periods with their launches leave for good or until it is packed, at most.

    Packing begins with more than twice as many launches as are kept; of these as many may have
    failed.
    """
    launches, failures = rates.launches * periods, rates.failures * periods
    unpacked = min(launches, 2.0 * sums.size.kept_launches)
    return (
        sums.inodes("second") * rates.period_seconds * periods  # segments for W&B
        + sums.inodes("launch", keeps="the run") * launches
        + sums.inodes("failure", keeps="the run") * failures
        + sums.inodes("launch", keeps="until packed") * unpacked
        + sums.inodes("failure", keeps="until packed") * min(failures, unpacked)
    )


def _steady(sums: TableSums, rates: Rates, by: Collection[Actor]) -> float:
    """Operations per second while the run trains and saves."""
    step = rates.step_seconds
    saves_per_second = rates.checkpoints / rates.period_seconds
    per_second = {"second": 1.0, "step": 1 / step, "checkpoint": saves_per_second}
    total = 0.0
    for row in sums.rows("second", "step", "checkpoint", by=by):
        often = per_second[row.per]
        if row.per == "second" and row.by == "rank 0":
            often = min(often, 1 / step)  # no more often than steps end
        total += sum(row.calls(one, sums.size) for one in OPERATIONS) * often
    return total


def _file_line(row: FileRow, size: RunSize) -> FileLine:
    texts = {name: str(getattr(row, name)) for name in ("inodes", *OPERATIONS)}
    formulas = {name: text for name, text in texts.items() if text != "0"}
    return FileLine(
        place=row.place,
        per=row.per,
        by=row.by,
        inodes=row.inodes.at(size),
        calls={one: row.calls(one, size) for one in OPERATIONS if one in formulas},
        formulas=formulas,
        source=row.source,
        estimate=row.varies,
    )


def _exceeded_limits(
    profile: ClusterProfile, inodes: Inodes, peak: int, rpc_per_hour: int
) -> tuple[str, ...]:
    """Say which of the site's limits the run would exceed, and what would help."""
    limits, found = profile.limits, list[str]()
    if limits.max_inodes is not None and inodes.at_end > limits.max_inodes:
        found.append(
            f"the run leaves {inodes.at_end:,} files and directories in its run directory, "
            f"{inodes.peak_checkpoints:,} of them in checkpoints; this site allows "
            f"{limits.max_inodes:,} (limits.max_inodes)"
        )
    if limits.max_bytes is not None and peak > limits.max_bytes:
        found.append(
            f"checkpoints take {short_bytes(peak)} at their peak; this site allows "
            f"{short_bytes(limits.max_bytes)} (limits.max_bytes): lower checkpoint.keep"
        )
    if limits.max_rpc_per_hour is not None and rpc_per_hour > limits.max_rpc_per_hour:
        found.append(
            f"the run may send slurmctld {rpc_per_hour:,} RPCs in its worst hour; this site "
            f"allows {limits.max_rpc_per_hour:,} (limits.max_rpc_per_hour)"
        )
    return tuple(found)
