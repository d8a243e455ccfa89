"""Writes the report about a team as CSV: one row per run, category and cause.

Belongs here: rows and columns. Does not belong here: any number that is not in the document.
"""

from __future__ import annotations

from hpctrain.base.errors import UsageError
from hpctrain.report.team_report import TeamReport

COLUMNS = (
    "begin",
    "end",
    "run",
    "directory",
    "user",
    "project",
    "cluster",
    "engine",
    "gpus",
    "category",
    "cause",
    "hours",
    "gpu_hours",
    "cost",
    "currency",
)
# A spreadsheet takes a cell that begins so for a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(report: TeamReport) -> str:
    """Write the table; numbers with all their digits, unknown ones empty.

    Raises UsageError where pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            "--csv is written by pandas, which is not installed",
            hint="`pip install pandas`, or `--json` for the same figures",
        ) from error
    begin, end = (moment.isoformat(timespec="seconds") for moment in (report.begin, report.end))
    rows = [
        (
            begin,
            end,
            _text(run.run_id),
            _text(run.directory),
            _text(run.user),
            _text(run.project),
            _text(run.cluster),
            run.engine,
            run.gpus,
            str(part.category),
            _text(part.cause or ""),
            part.hours,
            part.gpu_hours if run.gpus is not None else None,
            part.cost if run.gpus is not None else None,
            part.currency,
        )
        for run in report.runs
        for part in run.parts
    ]
    table = pandas.DataFrame(rows, columns=list(COLUMNS)).astype({"gpus": "Int64"})
    return str(table.to_csv(index=False, lineterminator="\n"))


def _text(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
