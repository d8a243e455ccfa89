"""Formats plans for several numbers of GPUs as a table."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.job.plan import Option
from hpctrain.plan.forecast.options import days_column


def option_rows(options: Sequence[Option]) -> tuple[list[str], list[list[str]]]:
    """Tabulate one row for each number of GPUs; `-` where nothing is known."""
    headers = ["GPUS", "S/STEP", "MFU%", "DAYS", "GPU-HOURS", "COST", "LAYOUT"]
    rows = []
    for option in options:
        plan, forecast = option.plan, option.forecast
        if plan is None:
            reason = str(option.refusal).splitlines()[0].partition(" (")[0]
            rows.append([str(option.gpus), "-", "-", "-", "-", "-", reason])
            continue
        cost = forecast.cost if forecast else None
        rows.append(
            [
                str(option.gpus),
                f"{plan.step_seconds:.4g}" if plan.step_seconds else "-",
                f"{100 * plan.prediction.mfu:.1f}" if plan.prediction else "-",
                days_column(forecast) if forecast else "-",
                f"{forecast.gpu_hours:,.0f}" if forecast else "-",
                f"{cost.amount:,.0f} {cost.currency}" if cost else "-",
                str(plan.layout),
            ]
        )
    return headers, rows
