"""The dashboard of messages between GPUs: time and bytes by axis of the layout. Pure.

What is measured comes from one measured step of each launch; what is planned is the time that
computation does not hide, so measured times are larger where messages overlap with computation.
Belongs here: its panels and queries. Does not belong here: JSON (`grafana`), drawing.
"""

from __future__ import annotations

from hpctrain.observe.panel_queries import of, ratio, worse_from
from hpctrain.observe.panel_shapes import NEEDS_MEASURED, NEEDS_PLAN, RUNS, USER, bars, lines, stat
from hpctrain.observe.panel_types import Column, DashboardPlan, Panel, PanelRow, Query

_SECONDS = of("message_seconds", "axis")
_BYTES = of("message_bytes", "axis")
_PLANNED = of("planned_message_seconds", "axis")
_SHARE = f"sum by (run) ({_SECONDS}) / on (run) ({of('step_seconds')} > 0)"
_PLANNED_SHARE = f"sum by (run) ({_PLANNED}) / on (run) ({of('planned_step_seconds')} > 0)"

_SUMMARY = PanelRow(
    "Share of a step",
    (
        stat(
            "Share, longest",
            "The largest share of a step in messages among the chosen runs.",
            f"max({_SHARE})",
            "percentunit",
            worse_from(0.3, 0.5),
            width=6,
            needs=NEEDS_MEASURED,
        ),
        stat(
            "Share as planned, longest",
            "The largest planned share: only what computation does not hide.",
            f"max({_PLANNED_SHARE})",
            "percentunit",
            width=6,
            needs=NEEDS_PLAN,
        ),
        stat(
            "Bytes of a step, most",
            "Bytes that a rank hands to messages in a step, of the run with the most.",
            f"max(sum by (run) ({_BYTES}))",
            "bytes",
            width=6,
            needs=NEEDS_MEASURED,
        ),
        stat(
            "Bandwidth, lowest",
            "Bytes over seconds of the slowest axis of all chosen runs.",
            f"min({ratio(_BYTES, _SECONDS)})",
            "Bps",
            width=6,
            needs=NEEDS_MEASURED,
        ),
        lines(
            "Share of a step in messages",
            "Measured seconds in messages over the median time of a step.",
            Query(_SHARE, "{{run}}"),
            Query(_PLANNED_SHARE, "{{run}} planned", dashed=True),
            unit="percentunit",
            width=12,
            from_zero=True,
            needs=NEEDS_MEASURED,
        ),
        bars(
            "Share of a step, by axis",
            "Which axis of which run costs most of a step.",
            f"{_SECONDS} / on (run) group_left () ({of('step_seconds')} > 0)",
            "{{run}} {{axis}}",
            "percentunit",
            worse_from(0.2, 0.4),
            width=12,
            needs=NEEDS_MEASURED,
        ),
    ),
)

_BY_AXIS = PanelRow(
    "By axis of the layout",
    (
        lines(
            "Seconds of a step in messages",
            "The mean of ranks in the measured step; dashed what the plan predicts beside "
            "computation.",
            Query(_SECONDS, "{{run}} {{axis}}"),
            Query(_PLANNED, "{{run}} {{axis}} planned", dashed=True),
            unit="s",
            width=12,
            from_zero=True,
            needs=NEEDS_MEASURED,
        ),
        lines(
            "Bytes of a step",
            "Bytes that a rank hands to messages, the mean of ranks.",
            Query(_BYTES, "{{run}} {{axis}}"),
            unit="bytes",
            width=12,
            from_zero=True,
            needs=NEEDS_MEASURED,
        ),
        lines(
            "Bandwidth",
            "Bytes over seconds in messages: what ranks get, waiting for each other included.",
            Query(ratio(_BYTES, _SECONDS), "{{run}} {{axis}}"),
            unit="Bps",
            width=12,
            from_zero=True,
            needs=NEEDS_MEASURED,
        ),
        bars(
            "Measured over planned",
            "Seconds in messages over those that the plan leaves beside computation.",
            ratio(_SECONDS, _PLANNED),
            "{{run}} {{axis}}",
            "percentunit",
            width=12,
            needs=NEEDS_MEASURED,
        ),
        Panel(
            "Measured and planned",
            "One line per run and axis. Measured over planned is large where computation hides "
            "messages, and where the network is slower than the profile says.",
            "table",
            columns=(
                Column(_SECONDS, "Measured", "s", labels=("run", "axis")),
                Column(_PLANNED, "Planned", "s", labels=("run", "axis")),
                Column(ratio(_SECONDS, _PLANNED), "Measured over planned", "percentunit"),
                Column(_BYTES, "Bytes", "bytes"),
                Column(ratio(_BYTES, _SECONDS), "Bandwidth", "Bps"),
            ),
            width=24,
            height=10,
            needs=NEEDS_MEASURED,
        ),
    ),
)

COMMUNICATION = DashboardPlan(
    uid="hpctrain-communication",
    title="hpctrain: communication",
    description="Time and bytes in messages between GPUs by axis of the layout, against the plan.",
    variables=(USER, RUNS),
    rows=(_SUMMARY, _BY_AXIS),
)
