"""Collects the first page about one run: state, plan against reality, loss, time, what to read.

Belongs here: which facts the page has, and their text. Does not belong here: finding them
(`status`, `goodput`, `logs`).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import BaseModel, ConfigDict

from hpctrain.base.formats import NewerFormatError
from hpctrain.base.units import short_duration
from hpctrain.page.output import coloured
from hpctrain.page.text import LINE_WIDTH, Whole, facts, grid
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.records.find import RunFiles, command_in
from hpctrain.records.requests import user_name
from hpctrain.records.run_records import StepRow, lineage, read_metrics
from hpctrain.records.tracking import tracking_commands
from hpctrain.runs.evaluations import EvaluationRow, evaluation_lines, evaluation_rows
from hpctrain.runs.goodput import goodput
from hpctrain.runs.logs import job_logs
from hpctrain.runs.notify import NoticeState, notice_states, state_words
from hpctrain.runs.run_documents import known_any_plan
from hpctrain.runs.status import RunStatus
from hpctrain.runs.status_text import COLOURS
from hpctrain.telemetry.goodput import Goodput

# More points than any terminal has columns of dots.
_CURVE_POINTS = 400


class CurvePoint(BaseModel):
    """The mean loss of the steps up to and including `step`, since the point before."""

    model_config = ConfigDict(frozen=True)

    step: int
    loss: float


class Planned(BaseModel):
    """What the plan promised: seconds of a step, and GPU-hours of all steps without any loss.

    `layout`: of a trainer of its own, of which nothing is predicted, what it is.
    `low_step_seconds` and `high_step_seconds`: the ends of the 80 % interval, None without one.
    """

    model_config = ConfigDict(frozen=True)

    layout: str
    nodes: str
    step_seconds: float | None
    gpu_hours: float | None
    low_step_seconds: float | None = None
    high_step_seconds: float | None = None


class LossRow(StepRow, Protocol):
    """The row of a step, of which only the loss is read."""

    @property
    def loss(self) -> float | None: ...


class RunPage(BaseModel):
    """The page of one run; `log` is the newest log of the job, None before it has started.

    `tracking`: the commands that show its curves elsewhere. `untold`: what people should have been
    told and were not.
    """

    model_config = ConfigDict(frozen=True)

    status: RunStatus
    directory: str
    planned: Planned | None = None
    goodput: Goodput | None = None
    curve: tuple[CurvePoint, ...] = ()
    log: str | None = None
    tracking: tuple[str, ...] = ()
    evaluations: tuple[EvaluationRow, ...] = ()
    untold: tuple[NoticeState, ...] = ()


def run_page(run: RunFiles, row: RunStatus) -> RunPage:
    """Collect the page around the row of `status`; what cannot be read is left out."""
    page = RunPage(status=row, directory=str(run.layout.directory))
    if not row.readable:
        return page
    update: dict[str, object] = {}
    with contextlib.suppress(NewerFormatError, OSError):
        update["planned"] = _planned(run)
        update["goodput"] = goodput(run)
        update["curve"] = loss_curve(run)
        update["evaluations"] = evaluation_rows(run)
    with contextlib.suppress(OSError):
        update["log"] = next((str(path) for path in reversed(job_logs(run))), None)
        update["tracking"] = tuple(tracking_commands(run.layout))
        update["untold"] = tuple(
            one for one in notice_states(run) if one.problem and one.state != "sent"
        )
    return page.model_copy(update=update)


def loss_curve(run: RunFiles, points: int = _CURVE_POINTS) -> tuple[CurvePoint, ...]:
    """Summarize the losses of the steps that count, in at most so many points."""
    return curve_of([row for row in read_metrics(run.layout) if row.loss is not None], points)


def curve_of(rows: Sequence[LossRow], points: int = _CURVE_POINTS) -> tuple[CurvePoint, ...]:
    """Summarize rows that have a loss, in at most so many points of the steps that count."""
    counting = lineage(rows)
    size = max(1, -(-len(counting) // points))
    parts = [counting[start : start + size] for start in range(0, len(counting), size)]
    return tuple(
        CurvePoint(
            step=part[-1].step,
            loss=sum(row.loss for row in part if row.loss is not None) / len(part),
        )
        for part in parts
    )


def _planned(run: RunFiles) -> Planned | None:
    plan = known_any_plan(run.layout)
    if plan is None:
        return None
    if isinstance(plan, TrainerPlan):
        nodes = str(plan.nodes)
        return Planned(layout=plan.title, nodes=nodes, step_seconds=None, gpu_hours=None)
    gpu_hours = None
    if plan.training_seconds is not None:
        gpu_hours = plan.training_seconds * plan.layout.world_size / 3600
    return Planned(
        layout=str(plan.layout),
        nodes=str(plan.nodes),
        step_seconds=plan.step_seconds,
        gpu_hours=gpu_hours,
        low_step_seconds=plan.certainty.low_step_seconds if plan.certainty else None,
        high_step_seconds=plan.certainty.high_step_seconds if plan.certainty else None,
    )


# -- Formats the first page about one run, at most 80 columns wide ------------------------------


_MARGIN = 11
_CURVE_COLUMNS, _CURVE_LINES = 60, 6
_MOST_EVALUATIONS = 6
_MOST_UNTOLD = 3
# Smaller differences from the plan are noise of a cluster.
_NOTABLE = 0.05
# State -> what people do next: the command before the name of the run, and what it does.
_WHY = "why"
_LOOK = ((_WHY, "what happened, what comes next"),)
_WITHOUT_JOB = (("resume", "submit it"), ("rm", "remove it"))
_NEXT: dict[str, tuple[tuple[str, str], ...]] = {
    "RUNNING": (
        ("logs -f", "follow the log"),
        ("diagnose", "why it is as fast as it is"),
        ("stop", "save, release the nodes and stop"),
    ),
    "PENDING": (
        (_WHY, "why it waits, and for how long"),
        ("cancel", "take it out of the queue"),
    ),
    "DONE": (
        ("goodput", "where the time went"),
        ("checkpoints", "what is saved"),
        ("archive", "pack it into one file"),
    ),
    "FAILED": (
        *_LOOK,
        ("logs --errors", "the first errors of its ranks"),
        ("resume", "continue from the newest checkpoint"),
    ),
    "STOPPED": (*_LOOK, ("resume", "continue from the newest checkpoint")),
    "CANCELLED": (("resume", "continue from the newest checkpoint"),),
    "PREPARED": _WITHOUT_JOB,
    "NOT SUBMITTED": _WITHOUT_JOB,
    "UNKNOWN": _LOOK,
}


def page_lines(page: RunPage) -> Iterator[str]:
    """Format the page: state, progress, plan, risk, time, log, loss, next commands."""
    row = page.status
    job = "" if row.job_id is None else f" · job {row.job_id}"
    attempt = f" · attempt {row.attempts}" if row.attempts else ""
    state = coloured(row.state.value, COLOURS.get(row.state.value))
    untold = [state_words(one) for one in page.untold[:_MOST_UNTOLD]]
    if len(page.untold) > _MOST_UNTOLD:
        more = len(page.untold) - _MOST_UNTOLD
        notify = command_in(Path(page.directory).parent, "notify", row.run_id)
        untold.append(f"and {more} more: `{notify}`")
    yield from facts(
        ("Run", row.run_id),
        ("State", Whole(f"{state}{job}{attempt}")),
        ("Reason", row.reason),
        ("Owner", None if row.owner == user_name() else row.owner),
        ("Progress", _progress(page)),
        ("Plan", _plan(page)),
        ("Left", _left(page)),
        ("Saved", _saved(page)),
        ("Time", _time(page)),
        ("Directory", page.directory),
        ("Log", page.log),
        ("Not told", untold),
        ("Curves", map(Whole, page.tracking)),
        margin=_MARGIN,
    )
    if len(page.curve) > 1:
        yield ""
        yield from curve_lines(page.curve)
    if page.evaluations:
        yield ""
        yield from evaluation_lines(page.evaluations, _MOST_EVALUATIONS)
    yield ""
    yield from next_lines(Path(page.directory), row.state.value, _MARGIN)


def next_lines(directory: Path, state: str, margin: int, *, explained: bool = False) -> list[str]:
    """Format what to type next about a run in a state; `explained`: `why` has been typed."""
    commands = [
        (command_in(directory.parent, words, directory.name), what)
        for words, what in _NEXT[state]
        if not (explained and words == _WHY)
    ]
    lines = (
        Whole(command if margin + len(line) > LINE_WIDTH else line)
        for (command, _), line in zip(commands, grid(commands), strict=True)
    )
    return facts(("Next", lines), margin=margin)


def _progress(page: RunPage) -> str:
    row = page.status
    if row.step is None:
        return ""
    target = "" if row.target_step is None else f" of {row.target_step:,}"
    share = f" ({row.step / row.target_step:.1%})" if row.target_step else ""
    parts = [f"{row.step:,}{target} steps{share}"]
    if row.loss is not None:
        parts.append(f"loss {row.loss:.4f}")
    if row.tokens_per_second is not None:
        parts.append(f"{row.tokens_per_second:,.0f} tokens/s")
    elif row.step_seconds is not None:
        parts.append(f"{short_duration(row.step_seconds)} a step")
    if row.updated_seconds_ago is not None and not row.state.over:
        stale = ", longer than it may be silent" if row.stale else ""
        parts.append(f"{short_duration(row.updated_seconds_ago)} ago{stale}")
    return " · ".join(parts)


def _plan(page: RunPage) -> str:
    planned, measured = page.planned, page.status.step_seconds
    if planned is None:
        return ""
    words = f"{planned.layout} on {planned.nodes}"
    if planned.step_seconds is None:
        return words
    words += f" · {short_duration(planned.step_seconds)} a step planned"
    low, high = planned.low_step_seconds, planned.high_step_seconds
    if low is not None and high is not None:
        words += f" (80%: {short_duration(low)}-{short_duration(high)})"
    if measured is None:
        return words
    ratio = measured / planned.step_seconds
    words += f", {short_duration(measured)} measured"
    if abs(ratio - 1) >= _NOTABLE:
        words += f": {abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"
    if low is not None and high is not None and not low <= measured <= high:
        words += ", outside the interval"
    return words


def _left(page: RunPage) -> str:
    row = page.status
    if not row.eta_seconds:
        return ""
    words = f"{short_duration(row.eta_seconds)} of steps"
    if row.queue_ahead_seconds:
        words += f", and about {short_duration(row.queue_ahead_seconds)} in the queue"
    return words


def _saved(page: RunPage) -> str:
    row = page.status
    if row.step is None:
        return ""
    words = "nothing yet" if row.checkpoint_step is None else f"step {row.checkpoint_step:,}"
    if row.at_risk_seconds:
        words += f" · lose {short_duration(row.at_risk_seconds)} if it dies now"
    return words


def _time(page: RunPage) -> str:
    account = page.goodput
    if account is None or account.wall_seconds <= 0:
        return ""
    failures = f"{account.failures} failure{'' if account.failures == 1 else 's'}"
    parts = [short_duration(account.wall_seconds)]
    if account.ettr is not None:
        parts[0] += f", {account.ettr:.1%} of it productive"
    parts.append(failures)
    if account.gpu_hours is not None:
        hours = f"{account.gpu_hours:,.1f} GPU-hours"
        if page.planned is not None and page.planned.gpu_hours is not None:
            hours += f", {page.planned.gpu_hours:,.1f} planned"
        parts.append(hours)
    return " · ".join(parts)


# -- the loss ----------------------------------------------------------------------------------


def curve_lines(
    points: Sequence[CurvePoint],
    columns: int = _CURVE_COLUMNS,
    lines: int = _CURVE_LINES,
    *,
    dots: bool | None = None,
) -> Iterator[str]:
    """Draw losses over steps in so many columns and lines, with one more line for the steps.

    `dots`: with braille dots or with asterisks; by default what can be printed on stdout.
    """
    low, high = min(p.loss for p in points), max(p.loss for p in points)
    first, last = points[0].step, points[-1].step
    draw = _dots if (can_print_dots() if dots is None else dots) else _stars
    rows = draw(points, low, high, columns, lines)
    top, bottom = f"{high:.4g}", f"{low:.4g}"
    width = max(len("Loss"), len(top), len(bottom))
    for number, row in enumerate(rows):
        label = top if number == 0 else bottom if number == len(rows) - 1 else ""
        label = "Loss" if number == 1 and not label else label
        yield f"{label:>{width}} {row}".rstrip()
    right = f"{last:,}"
    yield f"{'step':>{width}} {first:<{columns - len(right)},}{right}"


def can_print_dots() -> bool:
    """Tell whether the encoding of stdout has braille."""
    try:
        "\N{BRAILLE PATTERN DOTS-1}".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _dots(
    points: Sequence[CurvePoint], low: float, high: float, columns: int, lines: int
) -> list[str]:
    from plotille import Canvas

    margin = (high - low) * 0.02 or 1.0
    canvas = Canvas(
        columns,
        lines,
        xmin=points[0].step,
        xmax=points[-1].step,
        ymin=low - margin,
        ymax=high + margin,
    )
    for before, after in itertools.pairwise(points):
        canvas.line(before.step, before.loss, after.step, after.loss)
    return str(canvas.plot()).splitlines()


def _stars(
    points: Sequence[CurvePoint], low: float, high: float, columns: int, lines: int
) -> list[str]:
    grid = [[" "] * columns for _ in range(lines)]
    span, steps = (high - low) or 1.0, points[-1].step - points[0].step
    for point in points:
        column = round((point.step - points[0].step) / steps * (columns - 1))
        line = round((high - point.loss) / span * (lines - 1))
        grid[line][column] = "*"
    return ["".join(line) for line in grid]
