"""All dashboards, in the order in which people open them. Pure.

`hpctrain.observe.grafana` writes them for Grafana and `hpctrain.report.dashboard_page` draws them,
both from these tables.
Belongs here: the list. Does not belong here: panels (`fleet_panels`, `run_panels`,
`communication_panels`, `node_panels`, `service_panels`), names of metrics (`families`).
"""

from __future__ import annotations

from hpctrain.observe.communication_panels import COMMUNICATION
from hpctrain.observe.fleet_panels import FLEET
from hpctrain.observe.node_panels import NODES
from hpctrain.observe.run_panels import RUN
from hpctrain.observe.service_panels import SERVICE

DASHBOARDS = (FLEET, RUN, COMMUNICATION, NODES, SERVICE)

# Metrics that panels read and hpctrain does not export, by who does.
FOREIGN_METRICS: dict[str, tuple[str, ...]] = {
    "Prometheus": ("ALERTS", "ALERTS_FOR_STATE"),
    "DCGM exporter": (
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_DEV_GPU_TEMP",
        "DCGM_FI_DEV_POWER_USAGE",
        "DCGM_FI_DEV_XID_ERRORS",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        "DCGM_FI_PROF_DRAM_ACTIVE",
        "DCGM_FI_PROF_NVLINK_TX_BYTES",
    ),
    "node_exporter": (
        "node_cpu_seconds_total",
        "node_memory_MemAvailable_bytes",
        "node_memory_MemTotal_bytes",
        "node_infiniband_port_data_transmitted_bytes_total",
    ),
}
