"""Write samples as OpenMetrics or as Prometheus' older text. Pure.

Belongs here: families with their samples in the form that prometheus_client writes. Does not belong
here: serving them, files. prometheus_client is imported when something is written.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hpctrain.observe.families import Family
from hpctrain.observe.samples import Sample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class SampleCollector:
    """Gives the newest samples to prometheus_client, whose registry asks for them."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples = tuple(samples)

    def replace(self, samples: Iterable[Sample]) -> None:
        """Take new samples; a scrape sees the old or the new ones, never both."""
        self._samples = tuple(samples)

    def collect(self) -> Iterator[Metric]:
        """Yield each family with its samples, in the order of their first samples."""
        from prometheus_client.metrics_core import Metric

        families: dict[str, Metric] = {}
        for sample in self._samples:
            family = sample.family
            metric = families.get(family.name)
            if metric is None:
                metric = families[family.name] = Metric(
                    family.name, family.help, family.type, _unit(family)
                )
            metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield from families.values()


def _unit(family: Family) -> str:
    """The unit of a family, which OpenMetrics forbids for infos and state sets."""
    return "" if family.type in ("info", "stateset") else family.unit


def exposed(samples: Iterable[Sample], *, open_metrics: bool) -> bytes:
    """Write samples as text: OpenMetrics, or the older format that node_exporter reads."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(SampleCollector(samples))
    module = "prometheus_client." + ("openmetrics.exposition" if open_metrics else "exposition")
    written: Any = importlib.import_module(module).generate_latest(registry)
    return bytes(written)
