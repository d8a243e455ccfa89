"""The dashboard of nodes: slow ones, memory against plan, other exporters' figures. Pure.

Other exporters know hosts, not runs: `hpctrain_run_node_info` says which nodes a run has.
Belongs here: its panels and queries. Does not belong here: JSON (`grafana`), drawing.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.observe.panel_queries import of, on_nodes, ratio, worse_from
from hpctrain.observe.panel_shapes import (
    NEEDS_DCGM,
    NEEDS_NODE,
    RUNS,
    USER,
    bars,
    lines,
    stat,
)
from hpctrain.observe.panel_types import Column, DashboardPlan, Panel, PanelRow, Query, Threshold

_SLOWDOWN = of("node_slowdown_ratio", "node")
_MEMORY_OF_PLAN = ratio(of("peak_memory_bytes", "stage"), of("planned_memory_bytes", "stage"))
_MIB = 1048576
_IDLE = 'rate(node_cpu_seconds_total{mode="idle"}[5m])'
_AVAILABLE = "node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes"


def _gpus(metric: str, summary: str = "avg", factor: str = "") -> str:
    """Select a metric of DCGM exporter for the nodes of the chosen runs."""
    return on_nodes(metric, "Hostname", summary) + factor


def _hosts(vector: str, summary: str = "avg") -> str:
    """Select a metric of node_exporter for the nodes of the chosen runs."""
    return on_nodes(vector, "instance", summary)


def _of_nodes(
    title: str,
    description: str,
    expression: str,
    unit: str,
    needs: str,
    odd: Literal["lowest", "highest"] = "highest",
) -> Panel:
    """Make curves of each run from another exporter: the mean of its nodes, and the odd node."""
    chosen = "min" if odd == "lowest" else "max"
    return lines(
        title,
        f"{description} Dashed: the {odd} node of the run.",
        Query(f"avg by (run) ({expression})", "{{run}}"),
        Query(f"{chosen} by (run) ({expression})", f"{{{{run}}}} {odd}", dashed=True),
        unit=unit,
        width=6,
        from_zero=True,
        needs=needs,
    )


_SLOW = PanelRow(
    "Slow nodes",
    (
        stat(
            "Slowest node",
            "Compute time of the slowest rank of a node over the median of the ranks.",
            f"max({_SLOWDOWN})",
            "percentunit",
            worse_from(1.1, 1.25),
            width=6,
        ),
        stat(
            "Nodes above the limit",
            "Nodes slower than the ratio from which the supervisor of their run reports them.",
            f"count({_SLOWDOWN} > on (run) group_left () {of('slow_rank_limit_ratio')})"
            " or vector(0)",
            thresholds=worse_from(1),
            width=6,
        ),
        stat(
            "Suspect nodes",
            "Nodes that new launches avoid, by evidence of all runs (`hpctrain nodes`).",
            "max(hpctrain_suspect_nodes)",
            thresholds=worse_from(1, 4),
            width=6,
        ),
        stat(
            "Nodes held",
            "Nodes of the chosen runs, spares included.",
            f"sum({of('nodes')})",
            width=6,
        ),
        lines(
            "Slowdown of nodes",
            "The slowest node of each run, and the ratio from which the supervisor reports it.",
            Query(f"max by (run) ({_SLOWDOWN})", "{{run}}"),
            Query(f"max({of('slow_rank_limit_ratio')})", "limit", dashed=True),
            unit="percentunit",
            width=12,
        ),
        bars(
            "Slowest nodes",
            "Nodes with the largest slowdown now.",
            _SLOWDOWN,
            "{{run}} {{node}}",
            "percentunit",
            worse_from(1.1, 1.25),
            width=12,
        ),
    ),
)

_MEMORY = PanelRow(
    "Memory and nodes",
    (
        bars(
            "Peak memory over plan, by stage",
            "Most memory that PyTorch has allocated on a GPU of a pipeline stage, over the plan.",
            _MEMORY_OF_PLAN,
            "{{run}} stage {{stage}}",
            "percentunit",
            worse_from(1.05, 1.2),
            width=8,
        ),
        Panel(
            "Memory by stage",
            "Measured and planned memory of a GPU, by pipeline stage.",
            "table",
            columns=(
                Column(of("peak_memory_bytes", "stage"), "Peak", "bytes", labels=("run", "stage")),
                Column(
                    of("planned_memory_bytes", "stage"),
                    "Planned",
                    "bytes",
                    labels=("run", "stage"),
                ),
                Column(
                    _MEMORY_OF_PLAN,
                    "Peak over plan",
                    "percentunit",
                    thresholds=worse_from(1.05, 1.2),
                ),
            ),
            width=8,
        ),
        Panel(
            "Nodes of running jobs",
            "Which run has which node, and how slow it is.",
            "table",
            columns=(
                Column(of("node_info", "node"), labels=("run", "node")),
                Column(_SLOWDOWN, "Slowdown", "percentunit", thresholds=worse_from(1.1, 1.25)),
            ),
            width=8,
        ),
    ),
)

_GPUS = PanelRow(
    "GPUs, by DCGM exporter",
    (
        _of_nodes(
            "GPU utilization",
            "Share of time in which any kernel ran.",
            _gpus("DCGM_FI_DEV_GPU_UTIL"),
            "percent",
            NEEDS_DCGM,
            "lowest",
        ),
        _of_nodes(
            "Tensor cores active",
            "Share of cycles in which tensor cores were busy.",
            _gpus("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
            "percentunit",
            NEEDS_DCGM,
            "lowest",
        ),
        _of_nodes(
            "GPU memory used",
            "The fullest GPU of each node.",
            _gpus("DCGM_FI_DEV_FB_USED", "max", f" * {_MIB}"),
            "bytes",
            NEEDS_DCGM,
        ),
        _of_nodes(
            "Memory bandwidth active",
            "Share of cycles in which device memory was busy.",
            _gpus("DCGM_FI_PROF_DRAM_ACTIVE"),
            "percentunit",
            NEEDS_DCGM,
            "lowest",
        ),
        _of_nodes(
            "NVLink sent",
            "Bytes per second that a node's GPUs sent over NVLink.",
            _gpus("DCGM_FI_PROF_NVLINK_TX_BYTES", "sum"),
            "Bps",
            NEEDS_DCGM,
            "lowest",
        ),
        _of_nodes(
            "Temperature",
            "The hottest GPU of each node.",
            _gpus("DCGM_FI_DEV_GPU_TEMP", "max"),
            "celsius",
            NEEDS_DCGM,
        ),
        _of_nodes(
            "Power",
            "Power of all GPUs of a node.",
            _gpus("DCGM_FI_DEV_POWER_USAGE", "sum"),
            "watt",
            NEEDS_DCGM,
        ),
        bars(
            "Last XID",
            "The number of the newest XID error of a GPU of the node; none is not shown.",
            f"{_gpus('DCGM_FI_DEV_XID_ERRORS', 'max')} > 0",
            "{{run}} {{node}}",
            "none",
            (Threshold("red"),),
            width=6,
            needs=f"{NEEDS_DCGM}, and a GPU with an XID error",
        ),
    ),
)

_HOSTS = PanelRow(
    "Hosts, by node_exporter",
    (
        _of_nodes(
            "CPUs busy",
            "Share of CPU time that is not idle.",
            f"1 - ({_hosts(_IDLE)})",
            "percentunit",
            NEEDS_NODE,
        ),
        _of_nodes(
            "Host memory used",
            "Share of memory that programs could not get.",
            f"1 - ({_hosts(_AVAILABLE)})",
            "percentunit",
            NEEDS_NODE,
        ),
        _of_nodes(
            "InfiniBand sent",
            "Bytes per second over all ports of a node.",
            _hosts("rate(node_infiniband_port_data_transmitted_bytes_total[5m])", "sum"),
            "Bps",
            NEEDS_NODE,
            "lowest",
        ),
    ),
)

_EACH = PanelRow(
    "Each node, by both exporters",
    (
        Panel(
            "Every node",
            "Means of the GPUs of a node; memory and temperature of the GPU with most.",
            "table",
            columns=(
                Column(of("node_info", "node"), labels=("run", "node")),
                Column(_SLOWDOWN, "Slowdown", "percentunit", thresholds=worse_from(1.1, 1.25)),
                Column(_gpus("DCGM_FI_DEV_GPU_UTIL"), "GPU utilization", "percent"),
                Column(_gpus("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"), "Tensor cores", "percentunit"),
                Column(_gpus("DCGM_FI_DEV_FB_USED", "max", f" * {_MIB}"), "GPU memory", "bytes"),
                Column(
                    _gpus("DCGM_FI_DEV_GPU_TEMP", "max"),
                    "Temperature",
                    "celsius",
                    thresholds=worse_from(80, 87),
                ),
                Column(_gpus("DCGM_FI_DEV_POWER_USAGE", "sum"), "Power", "watt"),
                Column(f"1 - ({_hosts(_IDLE)})", "CPUs busy", "percentunit"),
            ),
            width=24,
            height=12,
            needs=f"{NEEDS_DCGM} and {NEEDS_NODE}",
        ),
    ),
)

NODES = DashboardPlan(
    uid="hpctrain-nodes",
    title="hpctrain: nodes",
    description="Slow and suspect nodes, memory against plan, and what other exporters know.",
    variables=(USER, RUNS),
    rows=(_SLOW, _MEMORY, _GPUS, _HOSTS, _EACH),
)
