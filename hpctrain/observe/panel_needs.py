"""What panels need for any data beside hpctrain's own metrics of a run that trains. Pure.

Another exporter, or an event that healthy runs do not have: a panel without data is then no fault.
Grafana has no field for that, and drops fields that it does not know, so that it stands here. The
description of such a panel ends with it, as `description_end` writes it.
Belongs here: the one table of them. Does not belong here: panels (`dashboards/*.json`).
"""

from __future__ import annotations

from collections.abc import Mapping

_DCGM, _NODE = "DCGM exporter", "node_exporter"
_PLAN = "a plan that predicts speed: GPUs of a known type"
_EARLY_END = "a launch that ended early"

# Titles of panels by dashboard and by what they need.
PANEL_NEEDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hpctrain-fleet": {
        "`hpctrain watch --act` from cron": ("Last watch",),
        "an alert that fires": ("Alerts that fire",),
        _PLAN: ("Step time over plan",),
        _EARLY_END: ("Time lost, by cause", "Ends of launches, by cause"),
        "a service": ("Every service",),
    },
    "hpctrain-run": {
        _PLAN: ("MFU of plan", "Model FLOPs utilization"),
        _EARLY_END: (
            *("Ends of launches, by cause", "Time lost, by cause"),
            "Retries left, by cause",
        ),
        "a budget or a plan with a price": ("Money so far", "Budget used"),
    },
    "hpctrain-communication": {
        "a measured step": (
            *("Share, longest", "Bytes of a step, most", "Bandwidth, lowest"),
            *("Share of a step in messages", "Share of a step, by axis"),
            *("Seconds of a step in messages", "Bytes of a step", "Bandwidth"),
            *("Measured over planned", "Measured and planned"),
        ),
        _PLAN: ("Share as planned, longest",),
    },
    "hpctrain-nodes": {
        _DCGM: (
            *("GPU utilization", "Tensor cores active", "GPU memory used"),
            *("Memory bandwidth active", "NVLink sent", "Temperature", "Power"),
        ),
        f"{_DCGM}, and a GPU with an XID error": ("Last XID",),
        _NODE: ("CPUs busy", "Host memory used", "InfiniBand sent"),
        f"{_DCGM} and {_NODE}": ("Every node",),
    },
    "hpctrain-service": {
        "an engine that answers the exporter": (
            *("Worst of what is promised", "In queues", "Fullest KV cache"),
            *("Time to the first token", "Time per further token", "Time of a request"),
            *("Slow requests", "Requests in engines", "Time in the queue", "Tokens per second"),
            *("KV cache and prefix cache", "Requests put back"),
        ),
        "a replica that has ended": ("Ends of replicas, by cause",),
        "a profile with prices": ("Money so far", "Money per hour", "Planned per hour"),
    },
}


def panel_needs(uid: str) -> dict[str, str]:
    """Return what panels of a dashboard need, by their titles; others need nothing."""
    grouped = PANEL_NEEDS.get(uid, {})
    return {title: need for need, titles in grouped.items() for title in titles}


def description_end(need: str) -> str:
    """Write what follows a panel's description in Grafana; nothing for a panel without a need."""
    return f" Needs {need}; empty without." if need else ""
