"""Watch the runs of a sandbox with a real Prometheus: its configuration and command lines.

Belongs here: the settings, prometheus.yml, alertmanager.yml, and how the four daemons are called:
Prometheus, Alertmanager, node exporter, and `hpctrain exporter`. Does not belong here: starting
them (see `daemons`), the rules themselves (`hpctrain/observe/rules`). Pure.

Sources: prometheus(1), the configuration pages of Prometheus 2.42 and Alertmanager 0.25 and trials
on both.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from hpctrain.sandbox.debian import PrometheusPrograms
from hpctrain.sandbox.paths import Ports, SandboxPaths

# In the order of their start: who is asked comes before who asks.
MONITORS = ("exporter", "node_exporter", "alertmanager", "prometheus")
SCRAPE_SECONDS = 5.0
_RETENTION = "7d"
# An alert of these says the same as others of its run, with more detail.
_INHIBITED = {
    "HpctrainRunHangs": ("HpctrainNoProgress", "HpctrainCheckpointTooOld"),
    "HpctrainRestartStorm": ("HpctrainNoProgress", "HpctrainCheckpointTooOld"),
}


@dataclass(frozen=True)
class Monitoring:
    """What is watched, and how.

    `programs` is the directory that Prometheus was unpacked in, `runs` the directory of runs.
    `webhook` is sent the alerts; None is nobody. `scrape_seconds` is the time between two scrapes
    and between two evaluations of rules, `collect_seconds` between two passes of the exporter, each
    of which asks Slurm. `delay_factor` shortens the time that alerts wait
    before they fire (`for` in the rules), for rehearsals.
    """

    programs: Path
    runs: Path
    webhook: str | None = None
    scrape_seconds: float = SCRAPE_SECONDS
    collect_seconds: float = SCRAPE_SECONDS
    delay_factor: float = 1.0


@dataclass(frozen=True)
class MonitorFiles:
    """Where the monitors of one sandbox keep what they need; all below its private directory."""

    paths: SandboxPaths

    @property
    def directory(self) -> Path:
        return self.paths.directory / "monitoring"

    @property
    def prometheus_yaml(self) -> Path:
        return self.directory / "prometheus.yml"

    @property
    def alertmanager_yaml(self) -> Path:
        return self.directory / "alertmanager.yml"

    @property
    def rules(self) -> Path:
        return self.directory / "hpctrain-rules.yaml"

    @property
    def series(self) -> Path:
        return self.directory / "series"

    @property
    def alerts(self) -> Path:
        return self.directory / "alerts"

    @property
    def textfiles(self) -> Path:
        """What lies here as NAME.prom is exposed by the node exporter."""
        return self.directory / "textfiles"

    def all_directories(self) -> tuple[Path, ...]:
        return (self.directory, self.series, self.alerts, self.textfiles)


def prometheus_yaml(files: MonitorFiles, ports: Ports, monitoring: Monitoring) -> str:
    """Generate the configuration of Prometheus. JSON is YAML, and quotes every path safely."""
    interval = f"{round(monitoring.scrape_seconds * 1000)}ms"
    document = {
        "global": {
            "scrape_interval": interval,
            "scrape_timeout": interval,
            "evaluation_interval": interval,
        },
        "rule_files": [str(files.rules)],
        "alerting": {
            "alertmanagers": [{"static_configs": [{"targets": [loopback(ports.alertmanager)]}]}]
        },
        "scrape_configs": [
            {**_job("hpctrain", ports.exporter), "honor_labels": True},  # `job` is Slurm's
            _job("node", ports.node_exporter),
            _job("prometheus", ports.prometheus),
            {
                "job_name": "hpctrain-jobs",
                "honor_labels": True,
                "file_sd_configs": [
                    {
                        "files": [str(job_endpoints(monitoring.runs) / "*.json")],
                        "refresh_interval": interval,
                    }
                ],
            },
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def job_endpoints(runs: Path) -> Path:
    """Return the directory in which jobs name the endpoints that they have opened."""
    return runs / ".file_sd"


def _job(name: str, port: int) -> dict[str, object]:
    return {"job_name": name, "static_configs": [{"targets": [loopback(port)]}]}


def alertmanager_yaml(monitoring: Monitoring) -> str:
    """Generate the configuration of Alertmanager: one receiver, one message per alert and run."""
    interval = f"{round(monitoring.scrape_seconds * 1000)}ms"
    receiver: dict[str, object] = {"name": "people"}
    if monitoring.webhook is not None:
        receiver["webhook_configs"] = [{"url": monitoring.webhook, "send_resolved": True}]
    document = {
        "route": {
            "receiver": "people",
            "group_by": ["alertname", "run"],
            "group_wait": interval,
            "group_interval": interval,
            "repeat_interval": "4h",
        },
        "receivers": [receiver],
        "inhibit_rules": [
            {
                "source_matchers": [f"alertname = {source}"],
                "target_matchers": [f"alertname =~ {'|'.join(targets)}"],
                "equal": ["run"],
            }
            for source, targets in _INHIBITED.items()
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def monitor_argv(name: str, files: MonitorFiles, ports: Ports, monitoring: Monitoring) -> list[str]:
    """Build the command line of one of MONITORS; all listen on the loopback device only."""
    programs = PrometheusPrograms(monitoring.programs)
    share = monitoring.programs / "root" / "usr" / "share" / "prometheus"
    if name == "exporter":
        return [
            *(sys.executable, "-m", "hpctrain", "exporter", "--runs", str(monitoring.runs)),
            f"--listen={loopback(ports.exporter)}",
            f"--every={monitoring.collect_seconds:g}s",
        ]
    if name == "node_exporter":
        return [
            programs.node_exporter,
            f"--web.listen-address={loopback(ports.node_exporter)}",
            f"--collector.textfile.directory={files.textfiles}",
        ]
    if name == "alertmanager":
        return [
            programs.alertmanager,
            f"--config.file={files.alertmanager_yaml}",
            f"--storage.path={files.alerts}",
            f"--web.listen-address={loopback(ports.alertmanager)}",
            f"--web.ui-path={share / 'alertmanager' / 'ui'}",
            # Otherwise it listens on all network devices for others of its kind.
            "--cluster.listen-address=",
        ]
    assert name == "prometheus", name
    return [
        programs.prometheus,
        f"--config.file={files.prometheus_yaml}",
        f"--storage.tsdb.path={files.series}",
        f"--storage.tsdb.retention.time={_RETENTION}",
        f"--web.listen-address={loopback(ports.prometheus)}",
        f"--web.local-assets={share / 'web'}",
        # The default lets every page that a browser of this machine shows read the answers.
        f"--web.cors.origin=http://{re.escape(loopback(ports.prometheus))}",
    ]


def monitor_port(name: str, ports: Ports) -> int:
    """Return the port that one of MONITORS listens on."""
    return {
        "exporter": ports.exporter,
        "node_exporter": ports.node_exporter,
        "alertmanager": ports.alertmanager,
        "prometheus": ports.prometheus,
    }[name]


def ready_page(name: str, ports: Ports) -> str:
    """Return the page that one of MONITORS answers with 200 from when on it is of use."""
    page = "-/ready" if name in ("prometheus", "alertmanager") else "metrics"
    return f"http://{loopback(monitor_port(name, ports))}/{page}"


def monitor_addresses(ports: Ports) -> dict[str, str]:
    """Return the address of each monitor, by its name."""
    return {name: f"http://{loopback(monitor_port(name, ports))}" for name in MONITORS}


def alerts_page(ports: Ports) -> str:
    """Return the page of Prometheus with all alerts; Debian's has the classic pages only."""
    return f"http://{loopback(ports.prometheus)}/classic/alerts"


def loopback(port: int) -> str:
    """Write a port of the loopback device as host:port."""
    return f"127.0.0.1:{port}"
