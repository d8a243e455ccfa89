"""Predict the footprint of a run from its plan and its forecast.

Belongs here: the size of a run, how often events happen, and sums over the two tables. Does not
belong here: counts of one event (`file_rows`, `slurm_rows`), limits of the site (`site_limits`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from hpctrain.plan.documents import Plan
from hpctrain.plan.footprint.documents import (
    Bytes,
    Calls,
    FileLine,
    Footprint,
    Inodes,
    Metadata,
    Rates,
    Requests,
    SlurmLine,
)
from hpctrain.plan.footprint.file_rows import FILE_ROWS, KEPT_STACKS
from hpctrain.plan.footprint.metrics_rows import METRICS_ROWS
from hpctrain.plan.footprint.quantities import OPERATIONS, Actor, Event, FileRow, RunSize
from hpctrain.plan.footprint.site_limits import exceeded_limits
from hpctrain.plan.footprint.slurm_rows import (
    KILL_SECONDS_BEYOND_KILL_WAIT,
    RPC_OF_COMMAND,
    SLURM_ROWS,
)
from hpctrain.plan.footprint.tracking_rows import TRACKING_ROWS
from hpctrain.plan.forecast.documents import Forecast
from hpctrain.spec.notify import joined_notify
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.units import short_bytes, short_duration

MONTH_SECONDS = 30 * 86400.0
# Ranks come from srun together; how far apart is the site's network, so it is assumed.
START_SECONDS = 10.0
# A line of rank 0 per step and one of metrics.jsonl, as a run of tests/slurm writes them; what
# libraries print when a rank starts.
STEP_BYTES, LAUNCH_BYTES_PER_RANK = 130 + 400, 2048
# An index of a dataset of tokens: three arrays and a description, for each split.
_FILES_PER_INDEX, _SPLITS = 4, 3
_BY_RANKS: tuple[Actor, ...] = ("rank 0", "each rank", "agents")
_BY_SUPERVISOR: tuple[Actor, ...] = ("supervisor", "tracking", "exporter")


def run_size(
    spec: RunSpec,
    profile: ClusterProfile,
    plan: Plan,
    forecast: Forecast,
    *,
    logs: int,
    located: bool = False,
    sizes: int = 0,
) -> RunSize:
    """Describe the run by the numbers on which its footprint depends.

    `logs`: files that ranks, nodes and agents write in a launch. `located`: the supervisor asks
    Slurm where the nodes of its job are. `sizes`: smaller numbers of nodes that `submit` prepares.
    """
    ranks, nodes = plan.layout.world_size, plan.nodes.nodes
    agents = 0 if spec.launcher == "srun" else nodes
    abilities, kept = spec.engine.abilities, spec.checkpoint.keep
    permanent = spec.checkpoint.keep_every_steps
    tokens = spec.data.format == "tokens"
    sources = max(1, len(spec.data.sources))
    indexes = sources + (1 if sources > 1 else 0)  # and one of the blend
    notify = joined_notify(spec.notify, profile.notify)
    textfile = profile.metrics.textfile is not None and spec.metrics.textfile
    return RunSize(
        ranks=ranks,
        nodes=nodes,
        agents=agents,
        logs=logs,
        kept_launches=spec.logging.keep_launches,
        located=int(located),
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
        channels=len(notify.channels) if notify is not None else 0,
        tracked=int(spec.tracking.wanted),
        tensorboard=int(bool(spec.tracking.tensorboard)),
        wandb=int(spec.tracking.wandb is not None),
        exported=int(textfile or spec.metrics.endpoint),
        endpoint=int(spec.metrics.endpoint),
    )


def footprint(
    profile: ClusterProfile,
    plan: Plan,
    forecast: Forecast,
    size: RunSize,
    assumptions: tuple[str, ...] = (),
) -> Footprint:
    """Predict what the run writes and asks, and compare it with the limits of the site.

    `forecast` gives the rates of failures and saves (`hpctrain.plan.forecast`); `assumptions` are
    those behind it. `size` is that of `run_size`.
    """
    rates = _rates(plan, forecast)
    predicted = Footprint(
        ranks=size.ranks,
        nodes=size.nodes,
        checkpoint_files=size.files + 1,  # and the manifest
        rates=rates,
        inodes=_inodes(size, rates),
        metadata=_metadata(size, rates),
        rpc=_requests(size, rates),
        bytes=_bytes(size, rates, forecast),
        assumptions=(*assumptions, *_assumptions()),
        exceeded=(),
        files=tuple(
            _file_line(row, size)
            for row in FILE_ROWS
            if (size.tracked or row not in TRACKING_ROWS)
            and (size.exported or row not in METRICS_ROWS)
        ),
        slurm=_slurm_lines(size),
    )
    exceeded = exceeded_limits(profile, predicted)
    return predicted.model_copy(update={"exceeded": exceeded})


def _assumptions() -> tuple[str, ...]:
    return (
        f"starts: ranks do their operations within {short_duration(START_SECONDS)}",
        f"logs: {STEP_BYTES} B per step (rank 0's line and its metrics), and "
        f"{short_bytes(LAUNCH_BYTES_PER_RANK)} of warnings per rank and launch",
        "failures: every rank leaves a record and its stacks, the most that can be",
    )


def _rates(plan: Plan, forecast: Forecast) -> Rates:
    run_seconds = forecast.times.total_seconds
    period_seconds = min(run_seconds, MONTH_SECONDS)
    part = period_seconds / run_seconds
    # each launch saves once more when it is asked to leave
    saves = forecast.steps / forecast.interval.steps + forecast.starts
    return Rates(
        run_seconds=run_seconds,
        period_seconds=period_seconds,
        launches=forecast.starts * part,
        failures=forecast.failures * part,
        preemptions=forecast.preemptions * part,
        checkpoints=saves * part,
        step_seconds=forecast.step_seconds,
        assumed=plan.step_seconds is None,
    )


def _rows(events: Sequence[Event], by: Sequence[Actor] = ()) -> list[FileRow]:
    return [row for row in FILE_ROWS if row.per in events and (not by or row.by in by)]


def file_calls(size: RunSize, events: Sequence[Event], by: Sequence[Actor] = ()) -> Calls:
    """Sum the operations of one event of each kind; `by`: of these only."""
    rows = _rows(events, by)
    counts = {one: round(sum(row.calls(one, size) for row in rows)) for one in OPERATIONS}
    return Calls(**counts)


def _made(size: RunSize, events: Sequence[Event], keeps: Collection[str] = ()) -> float:
    rows = [row for row in _rows(events) if not keeps or row.keeps in keeps]
    return sum(row.inodes.at(size) for row in rows)


def _inodes(size: RunSize, rates: Rates) -> Inodes:
    run, launch, checkpoint = (_made(size, [event]) for event in ("run", "launch", "checkpoint"))
    failed = _made(size, ["launch", "failure"])
    kept = checkpoint * size.kept
    # The newest is complete before the oldest is deleted; until then each rank has a file of
    # digests, in a directory.
    peak = kept + checkpoint + size.ranks + 1
    period, parts = _launches_left(size, rates, 1), rates.run_seconds / rates.period_seconds
    stacks = KEPT_STACKS * _made(size, ["launch", "failure"], ["four launches"])
    return Inodes(
        per_run=round(run),
        per_launch=round(launch),
        per_failed_launch=round(failed),
        per_checkpoint=round(checkpoint),
        per_period=math.ceil(period),
        kept_checkpoints=round(kept),
        peak_checkpoints=round(peak),
        at_end=math.ceil(run + _launches_left(size, rates, parts) + stacks + peak),
    )


def _launches_left(size: RunSize, rates: Rates, periods: float) -> float:
    """Count what so many periods with their launches leave for good or until it is packed, at most.

    Packing begins with more than twice as many launches as are kept; of these as many may have
    failed.
    """
    launches, failures = rates.launches * periods, rates.failures * periods
    unpacked = min(launches, 2.0 * size.kept_launches)
    return (
        _made(size, ["second"]) * rates.period_seconds * periods  # segments for W&B
        + _made(size, ["launch"], ["the run"]) * launches
        + _made(size, ["failure"], ["the run"]) * failures
        + _made(size, ["launch"], ["until packed"]) * unpacked
        + _made(size, ["failure"], ["until packed"]) * min(failures, unpacked)
    )


def _metadata(size: RunSize, rates: Rates) -> Metadata:
    launch = file_calls(size, ("launch", "resume"), _BY_RANKS)
    return Metadata(
        launch_ranks=launch,
        launch_supervisor=file_calls(size, ("launch", "resume"), _BY_SUPERVISOR),
        checkpoint=file_calls(size, ("checkpoint",)),
        failure=file_calls(size, ("failure",)),
        start_seconds=START_SECONDS,
        start_per_second=launch.total / START_SECONDS,
        steady_ranks_per_second=_steady(size, rates, _BY_RANKS),
        steady_supervisor_per_second=_steady(size, rates, _BY_SUPERVISOR),
    )


def _steady(size: RunSize, rates: Rates, by: Sequence[Actor]) -> float:
    """Operations per second while the run trains and saves."""
    step = rates.step_seconds
    per_second = {
        "second": 1.0,
        "step": 1 / step,
        "checkpoint": rates.checkpoints / rates.period_seconds,
    }
    total = 0.0
    for row in _rows(("second", "step", "checkpoint"), by):
        often = per_second[row.per]
        if row.per == "second" and row.by == "rank 0":
            often = min(often, 1 / step)  # no more often than steps end
        total += row.all_calls(size) * often
    return total


def _requests(size: RunSize, rates: Rates) -> Requests:
    def rpc(*events: Event) -> int:
        rows = (row for row in SLURM_ROWS if row.per in events)
        return math.ceil(
            sum(row.count.at(size) * RPC_OF_COMMAND[row.command].at(size) for row in rows)
        )

    launch, failed = rpc("launch"), rpc("launch", "failure")
    hours = rates.period_seconds / 3600
    mean = (launch * rates.launches + rpc("failure") * rates.failures) / hours
    steady = float(rpc("second") * 3600)
    refusal, outage = rpc("refusal"), rpc("outage")
    return Requests(
        per_run=rpc("run"),
        per_launch=launch,
        per_failed_launch=failed,
        steady_per_hour=steady,
        mean_per_hour=steady + mean,
        step_refuses_to_die=refusal,
        controller_restart=outage,
        worst_hour=math.ceil(steady) + failed + refusal + outage,
    )


def _bytes(size: RunSize, rates: Rates, forecast: Forecast) -> Bytes:
    one = forecast.checkpoint.total_bytes
    steps_per_day = 86400 / forecast.step_seconds
    launches_per_day = rates.launches * 86400 / rates.period_seconds
    launch_bytes = LAUNCH_BYTES_PER_RANK * size.ranks
    return Bytes(
        logs_per_day=round(STEP_BYTES * steps_per_day + launch_bytes * launches_per_day),
        checkpoint=one,
        kept_checkpoints=round(one * size.kept),
        peak_checkpoints=round(one * (size.kept + 1)),
    )


def _file_line(row: FileRow, size: RunSize) -> FileLine:
    counted = {one: row.calls(one, size) for one in OPERATIONS if str(getattr(row, one)) != "0"}
    named = ("inodes", *OPERATIONS)
    formulas = {name: str(getattr(row, name)) for name in named if str(getattr(row, name)) != "0"}
    return FileLine(
        place=row.place,
        per=row.per,
        by=row.by,
        inodes=row.inodes.at(size),
        calls=counted,
        formulas=formulas,
        source=row.source,
        estimate=row.varies,
    )


def _slurm_lines(size: RunSize) -> tuple[SlurmLine, ...]:
    return tuple(
        SlurmLine(
            command=row.command,
            per=row.per,
            commands=row.count.at(size),
            rpc=row.count.at(size) * RPC_OF_COMMAND[row.command].at(size),
            formula=str(row.count),
            why=row.why,
            source=row.source,
            not_always=row.varies,
        )
        for row in SLURM_ROWS
        if row.count.at(size)
    )
