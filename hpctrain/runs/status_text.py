"""Formats the states of runs: for pipes one line each, for terminals what fits, and more below.

Belongs here: columns, colours and sentences about rows. Does not belong here: finding out states
(`hpctrain.runs.status`), the page of one run (`run_page`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpctrain.base.units import short_duration
from hpctrain.page.output import coloured
from hpctrain.page.text import aligned, fitting, is_numeric, or_dash, paragraph, used_widths
from hpctrain.records.requests import user_name

if TYPE_CHECKING:
    from hpctrain.runs.status import RunStatus

HEADERS = (
    *("RUN", "STATE", "JOB", "TRY", "STEP", "LOSS", "S/STEP", "TOK/S", "UPDATED", "LEFT"),
    "REASON",
)
# Only on terminals, and only where some runs are other people's.
_USER = "USER"
# What a terminal that is too narrow does without, first to last. RUN is what people type, STATE is
# what they ask for; REASON has lines of its own.
_DROPPED = ("TRY", "TOK/S", "S/STEP", "JOB", "UPDATED", "LOSS", "LEFT", _USER, "STEP")
_TIMES = ("UPDATED", "LEFT")
_ALL = ("RUN", "STATE", _USER, *HEADERS[2:-1])
_GAP = "  "
# A longer name than this takes no columns from all rows: it has a line of its own.
_LONG_NAME = 32
COLOURS = {
    "RUNNING": "green",
    "PENDING": "yellow",
    "DONE": "cyan",
    "FAILED": "red",
    "PREPARED": "yellow",
    "NOT SUBMITTED": "red",
    "STOPPED": "yellow",
    "UNKNOWN": "magenta",
}


def cells(row: RunStatus) -> list[str]:
    """Format one row; `-` for what is not known."""
    target = "" if row.target_step is None else f"/{row.target_step:,}"
    step = None if row.step is None else f"{row.step:,}{target}"
    updated = None if row.updated_seconds_ago is None else short_duration(row.updated_seconds_ago)
    if row.stale:
        updated = f"{updated} stale"
    return [
        row.run_id,
        row.state.value,
        or_dash(row.job_id),
        str(row.attempts),
        or_dash(step),
        or_dash(None if row.loss is None else f"{row.loss:.4f}"),
        or_dash(None if row.step_seconds is None else f"{row.step_seconds:.3g}"),
        or_dash(None if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}"),
        or_dash(updated),
        or_dash(None if row.eta_seconds is None else short_duration(row.eta_seconds)),
        or_dash(row.reason),
    ]


def people_lines(rows: Sequence[RunStatus], width: int) -> Iterator[str]:
    """Format rows for a terminal of so many columns; names and states are never cut."""
    me = user_name()
    others = any(row.owner not in (None, me) for row in rows)
    body = [
        {**dict(zip(HEADERS, cells(row), strict=True)), _USER: row.owner or "-" if others else "-"}
        for row in rows
    ]
    shown, longest = _columns(body, width)
    for one in body:
        one["RUN"] = "" if len(one["RUN"]) > longest else one["RUN"]
    numeric = [name in _TIMES or is_numeric([one[name] for one in body]) for name in shown]
    grid = aligned([shown, *([one[name] for name in shown] for one in body)], numeric)
    yield _GAP.join(next(grid)).rstrip()
    for row, one, line in zip(rows, body, grid, strict=True):
        if not one["RUN"]:
            yield row.run_id
        state = shown.index("STATE")
        line[state] = coloured(line[state], COLOURS.get(row.state.value))
        yield _GAP.join(line).rstrip()
        for sentence in sentences(row):
            yield from paragraph(sentence, _GAP, width=width)


def sentences(row: RunStatus) -> Iterator[str]:
    """Say why a run is in its state, what a failure would cost now, and what is left."""
    if row.reason:
        yield row.reason
    if row.at_risk_seconds:
        yield f"lose {short_duration(row.at_risk_seconds)} if it dies now"
    if row.eta_seconds and row.queue_ahead_seconds:
        yield (
            f"{short_duration(row.eta_seconds)} of steps are left, and about "
            f"{short_duration(row.queue_ahead_seconds)} in the queue"
        )


def _columns(body: Sequence[dict[str, str]], width: int) -> tuple[list[str], int]:
    """Choose columns: none that is empty, and no more than fit; and the longest name inside them.

    A name that is much longer than others would leave no room for anything else in all rows.
    """
    widths = used_widths(_ALL, body, always=("RUN", "STATE"))
    others = sum(widths[name] + len(_GAP) for name in widths if name != "RUN")
    longest = max(_LONG_NAME, width - others)
    short = [len(one["RUN"]) for one in body if len(one["RUN"]) <= longest]
    widths["RUN"] = max(len("RUN"), *short, 0)
    return fitting(widths, _DROPPED, width), longest
