"""Several numbers of GPUs side by side, in columns."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.actions.plan import Option


def option_rows(options: Sequence[Option]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: one for each number of GPUs; `-` where nothing is known."""
    headers = ["GPUS", "S/STEP", "MFU%", "DAYS", "GPU-HOURS", "COST", "LAYOUT"]
    return headers, [_row(option) for option in options]


def _row(option: Option) -> list[str]:
    plan, forecast = option.plan, option.forecast
    if plan is None:
        reason = str(option.refusal).splitlines()[0].partition(" (")[0]
        return [str(option.gpus), "-", "-", "-", "-", "-", reason]
    mfu = f"{100 * plan.prediction.mfu:.1f}" if plan.prediction else "-"
    cost = forecast.cost if forecast else None
    return [
        str(option.gpus),
        f"{plan.step_seconds:.4g}" if plan.step_seconds else "-",
        mfu,
        f"{forecast.days:.1f}" if forecast else "-",
        f"{forecast.gpu_hours:,.0f}" if forecast else "-",
        f"{cost.amount:,.0f} {cost.currency}" if cost else "-",
        str(plan.layout),
    ]
