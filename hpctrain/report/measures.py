"""Summarizes what a run has measured for its page: curves, time, ranks, messages.

Belongs here: from records to a bounded number of figures. Does not belong here: reading records
(`report`), drawing (`hpctrain.report`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from pydantic import BaseModel, ConfigDict

from hpctrain.diagnose.facts import fullest_of_stages
from hpctrain.judge.attempts import starts
from hpctrain.plan.documents import Plan
from hpctrain.records.ledger import Event
from hpctrain.records.run_records import CommunicationRecord, RankTimes, StepMetrics
from hpctrain.telemetry.rates import median_known
from hpctrain.telemetry.thinning import Point, averaged, coarse_segments, thinned
from hpctrain.telemetry.timeline import Category, Timeline, seconds

# Below so many rows a curve is drawn as it is; above, with the mean of its parts.
_NOISY_ROWS = 1200
# Rows and columns of the matrix of messages: more ranks are put together by node.
_MOST_RANKS = 64


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class DroppedSteps(_Frozen):
    """Losses of steps of a launch that a later one has trained again; `count` of them."""

    count: int
    loss: Sequence[Point]


class Curves(_Frozen):
    """Values over steps that count, thinned; `loss_mean` is empty for short runs."""

    loss: Sequence[Point]
    loss_mean: Sequence[Point]
    evaluation_loss: Sequence[Point]
    gradient_norm: Sequence[Point]
    learning_rate: Sequence[Point]
    step_seconds: Sequence[Point]
    tokens_per_second: Sequence[Point]
    mfu: Sequence[Point]
    dropped: Sequence[DroppedSteps]


class MeasuredSpeed(_Frozen):
    """Medians over the steps that count, without first steps of launches and profiled ones."""

    steps: int
    step_seconds: float
    tokens_per_second: float | None
    tokens_per_second_per_gpu: float | None
    mfu: float | None


class Span(_Frozen):
    """Time of one category in one attempt (from 1), in seconds since the first submission."""

    attempt: int
    start_seconds: float
    end_seconds: float
    category: str
    cause: str | None


class StageMemory(_Frozen):
    """The fullest GPU of one pipeline stage: bytes predicted, allocated, taken from the GPU."""

    stage: int
    predicted_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None


class NodeTimes(_Frozen):
    """The mean of the ranks of a node, in seconds per step; `relative` to the middle node."""

    node: str
    ranks: int
    own_seconds: float
    data_seconds: float
    relative: float


class RankWindow(_Frozen):
    """What ranks have measured in a window of steps.

    `shares`: means over ranks of the parts of a step, in seconds. `nodes` in the order of ranks.
    `own_seconds` of nodes is compute: time in which a rank does not wait for others, as far as its
    engine can tell them apart.
    """

    first_step: int
    last_step: int
    shares: dict[str, float]
    nodes: Sequence[NodeTimes]
    stages: Sequence[StageMemory]


class AxisTraffic(_Frozen):
    """Messages along one axis in a step: means and maxima over the ranks that have sent any."""

    axis: str
    ranks_per_group: int
    groups: int
    calls: float
    mean_bytes: float
    mean_seconds: float
    most_seconds: float
    planned_seconds: float | None


class MeasuredMessages(_Frozen):
    """Messages of one step; `matrix[source][target]` in bytes, by the names of ranks or nodes."""

    step: int
    step_seconds: float
    source: str
    axes: Sequence[AxisTraffic]
    unit: str
    names: Sequence[str]
    matrix: Sequence[Sequence[int]]


def curves_of(rows: Sequence[StepMetrics], counted: Sequence[StepMetrics]) -> Curves:
    """Thin the curves of the steps that count (`counted`), and of those that do not.

    Curves of speed leave out what `usual_rows` does.
    """
    usual = usual_rows(counted)

    def points_of(part: Iterable[StepMetrics], name: str) -> list[Point]:
        return [(float(row.step), getattr(row, name)) for row in part]

    def mean(name: str) -> Sequence[Point]:
        points = points_of(usual, name)
        return averaged(points, 400) if len(points) > _NOISY_ROWS else points

    losses = points_of(counted, "loss")
    kept = {(row.epoch, row.step) for row in counted}
    gone = [row for row in rows if (row.epoch, row.step) not in kept]
    dropped = []
    for _, group in itertools.groupby(gone, lambda row: row.epoch):
        points = points_of(group, "loss")
        dropped.append(DroppedSteps(count=len(points), loss=thinned(points)))
    evaluated = [row for row in counted if row.eval_loss is not None]
    return Curves(
        loss=thinned(losses),
        loss_mean=averaged(losses) if len(losses) > _NOISY_ROWS else (),
        evaluation_loss=thinned(points_of(evaluated, "eval_loss")),
        gradient_norm=thinned(points_of(counted, "grad_norm")),
        learning_rate=thinned(points_of(counted, "learning_rate")),
        step_seconds=thinned(points_of(usual, "step_seconds")),
        tokens_per_second=mean("tokens_per_second"),
        mfu=mean("mfu"),
        dropped=dropped,
    )


def usual_rows(counted: Sequence[StepMetrics]) -> list[StepMetrics]:
    """Leave out profiled steps and the first of each launch, which connects and compiles."""
    return [
        row
        for before, row in itertools.pairwise(counted)
        if row.epoch == before.epoch and not row.profiled
    ]


def speed_of(counted: Sequence[StepMetrics], plan: Plan | None) -> MeasuredSpeed | None:
    """Find the usual speed of a run; None before its second step."""
    usual = usual_rows(counted)
    # what a plan promises is a whole batch
    ramp_steps = plan.batch.ramp_steps if plan else 0
    usual = [row for row in usual if row.step > ramp_steps] or usual
    if not usual:
        return None
    seconds_of_step = median_known(row.step_seconds for row in usual)
    if seconds_of_step is None:
        return None
    rate = median_known(row.tokens_per_second for row in usual)
    return MeasuredSpeed(
        steps=len(usual),
        step_seconds=seconds_of_step,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / plan.layout.world_size if plan and rate else None,
        mfu=median_known(row.mfu for row in usual),
    )


def spans_of(timeline: Timeline, events: Sequence[Event]) -> tuple[Span, ...]:
    """Assign time to attempts: waiting in the queue belongs to the attempt that follows."""
    segments = coarse_segments(timeline.segments)
    if not segments:
        return ()
    begun = [round((event.time - seconds(segments[0].start)) * 1e6) for event in starts(events)]
    spans = []
    for segment in segments:
        begin = segment.start - segments[0].start
        started = sum(start <= begin for start in begun)
        if segment.category is Category.QUEUEING:
            started += 1
        spans.append(
            Span(
                attempt=max(1, started),
                start_seconds=seconds(begin),
                end_seconds=seconds(segment.end - segments[0].start),
                category=str(segment.category),
                cause=segment.cause,
            )
        )
    return tuple(spans)


def window_of(times: RankTimes, plan: Plan | None) -> RankWindow:
    """Summarize the times and the memory of all ranks by node and by pipeline stage."""
    of_node: dict[str, list[int]] = defaultdict(list)
    for rank, node in enumerate(times.nodes):
        of_node[node].append(rank)
    own = {
        node: fmean(times.compute_seconds[rank] for rank in ranks)
        for node, ranks in of_node.items()
        if max(ranks) < len(times.compute_seconds)
    }
    middle = median(own.values()) if own else 0.0
    nodes = tuple(
        NodeTimes(
            node=node,
            ranks=len(of_node[node]),
            own_seconds=value,
            data_seconds=fmean(times.data_seconds[rank] for rank in of_node[node])
            if times.data_seconds
            else 0.0,
            relative=value / middle if middle else 1.0,
        )
        for node, value in own.items()
    )
    layout = plan.layout if plan else None
    allocated = fullest_of_stages(layout, times.peak_memory_bytes)
    reserved = fullest_of_stages(layout, times.reserved_memory_bytes)
    return RankWindow(
        first_step=times.first_step,
        last_step=times.last_step,
        shares=times.mean_parts,
        nodes=nodes,
        stages=[
            StageMemory(
                stage=stage,
                predicted_bytes=plan.memory[stage].total_bytes if plan else None,
                allocated_bytes=allocated.get(stage) or None,
                reserved_bytes=reserved.get(stage) or None,
            )
            for stage in (range(len(plan.memory)) if plan else sorted(allocated))
        ],
    )


def messages_of(record: CommunicationRecord, plan: Plan | None) -> MeasuredMessages:
    """Summarize the messages of one step by axis, and who has sent how much to whom."""
    prediction = plan.prediction if plan else None
    parts = prediction.parts.message_seconds if prediction else {}
    planned = {str(axis): seconds for axis, seconds in parts.items()}
    axes = []
    for axis in record.axes:
        taking_part = axis.members
        if not taking_part:
            continue
        axes.append(
            AxisTraffic(
                axis=axis.axis,
                ranks_per_group=axis.ranks_per_group,
                groups=len({axis.groups[rank] for rank in taking_part}),
                calls=fmean(axis.calls[rank] for rank in taking_part),
                mean_bytes=fmean(axis.bytes[rank] for rank in taking_part),
                mean_seconds=fmean(axis.seconds[rank] for rank in taking_part),
                most_seconds=max(axis.seconds[rank] for rank in taking_part),
                planned_seconds=planned.get(axis.axis),
            )
        )
    # Rows of the matrix: ranks, or nodes, or groups of consecutive nodes.
    unit, names = "rank", [str(rank) for rank in range(len(record.nodes))]
    place = {rank: rank for rank in range(len(record.nodes))}
    if len(record.nodes) > _MOST_RANKS:
        nodes = list(dict.fromkeys(record.nodes))
        size = -(-len(nodes) // _MOST_RANKS)
        unit = "node" if size == 1 else f"{size} nodes"
        groups = [nodes[start : start + size] for start in range(0, len(nodes), size)]
        names = [one[0] if len(one) == 1 else f"{one[0]} to {one[-1]}" for one in groups]
        row = {node: number // size for number, node in enumerate(nodes)}
        place = {rank: row[node] for rank, node in enumerate(record.nodes)}
    matrix = [[0] * len(names) for _ in names]
    for link in record.links:
        if link.source in place and link.target in place:
            matrix[place[link.source]][place[link.target]] += link.bytes
    return MeasuredMessages(
        step=record.step,
        step_seconds=record.step_seconds,
        source=record.source,
        axes=axes,
        unit=unit,
        names=names,
        matrix=matrix,
    )
