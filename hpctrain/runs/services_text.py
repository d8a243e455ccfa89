"""Formats services as lines below the runs of `hpctrain status`.

Belongs here: columns. Does not belong here: finding them (`hpctrain.runs.service_rows`), the
page of one service (`serve status`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpctrain.base.units import short_duration
from hpctrain.page.text import or_dash

if TYPE_CHECKING:
    from hpctrain.runs.service_rows import ServiceRow

SERVICE_HEADERS = ("SERVICE", "STATE", "READY", "REQ/S", "P99", "ADDRESS", "PROBLEM")


def service_cells(row: ServiceRow) -> list[str]:
    """Format one service; `-` for what is not known."""
    p99 = None
    if row.p99_seconds is not None:
        p99 = f"{row.latency} {short_duration(row.p99_seconds)}"
        if row.promised_seconds is not None:
            p99 += f" of {short_duration(row.promised_seconds)}"
    return [
        row.service_id,
        row.state.upper(),
        f"{row.ready}/{row.wanted}",
        or_dash(None if row.rate is None else f"{row.rate:.3g}"),
        or_dash(p99),
        or_dash(row.url),
        or_dash(row.problem),
    ]
