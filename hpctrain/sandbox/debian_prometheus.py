"""Fetch Prometheus, Alertmanager and node exporter from Debian into a cache, without root.

Belongs here: the suite, the cache, and the programs that must be in it. Does not belong here: how
packages are unpacked (see `prometheus-from-debian` beside this file), starting what was unpacked
(see `monitoring`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpctrain.sandbox.debian_packages import cache_directory, unpack

# Prometheus 2.42 and Alertmanager 0.25. Named, not `stable`, which changes.
SUITE = "bookworm"
_SCRIPT = Path(__file__).with_name("prometheus-from-debian")


@dataclass(frozen=True)
class PrometheusPrograms:
    """The programs in `directory`, as Debian calls them."""

    directory: Path

    @property
    def prometheus(self) -> str:
        return str(self.directory / "bin" / "prometheus")

    @property
    def promtool(self) -> str:
        return str(self.directory / "bin" / "promtool")

    @property
    def alertmanager(self) -> str:
        return str(self.directory / "bin" / "prometheus-alertmanager")

    @property
    def node_exporter(self) -> str:
        return str(self.directory / "bin" / "prometheus-node-exporter")


def default_cache() -> Path:
    """Return the directory that they are unpacked in."""
    return cache_directory("prometheus")


def fetch_prometheus(directory: Path) -> PrometheusPrograms:
    """Return the programs in `directory`, which are fetched on first use.

    Raises SlurmUnreachableError if the Debian mirror cannot be reached, SlurmError if anything else
    prevents it.
    """
    unpack(_SCRIPT, SUITE, directory, "Prometheus")
    return PrometheusPrograms(directory)
