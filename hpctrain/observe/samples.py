"""Values of metric families, checked against the table of families, and their text. Pure.

Belongs here: a sample, the samples of one run or service, OpenMetrics and Prometheus' older text.
Does not belong here: where values come from (`hpctrain.observe.run_metrics`, `service_metrics`),
serving them (`metrics_outlets`). prometheus_client is imported when something is written.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from hpctrain.observe.families import BY_NAME, Family
from hpctrain.telemetry.scraped_text import Histogram

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


class Sample(NamedTuple):
    """One value of a family; `labels` are names and values in the order of the family.

    `part`: of a histogram, whose buckets have `le` as their last label.
    """

    family: Family
    labels: tuple[tuple[str, str], ...]
    value: float
    part: Literal["", "bucket", "sum", "count"] = ""

    @property
    def name(self) -> str:
        """Its name in a query."""
        return f"{self.family.name}_{self.part}" if self.part else self.family.sample_name


class Samples:
    """Collects the samples of one run or service; values that are not known are left out."""

    def __init__(self, subject: Literal["run", "service"], name: str) -> None:
        self._subject, self._prefix = (subject, name), f"hpctrain_{subject}"
        self.samples: list[Sample] = []

    def put(self, name: str, value: float | None, **labels: str) -> None:
        """Add a value of the family of that name; None is left out."""
        if value is not None:
            self._put(BY_NAME[f"{self._prefix}_{name}"], value, labels)

    def put_each(self, name: str, label: str, values: Mapping[str, float | None]) -> None:
        """Add a value for each value of the only label of a family."""
        for key, value in values.items():
            self.put(name, value, **{label: key})

    def put_info(self, name: str = "", **labels: str | None) -> None:
        """Add a sample of an info family; a label that is not known is empty."""
        family = BY_NAME["_".join(filter(None, (self._prefix, name)))]
        self._put(family, 1.0, {key: value or "" for key, value in labels.items()})

    def put_state(self, state: str, states: Iterable[str]) -> None:
        """Add the state set: 1 for the state that the subject is in, 0 for all others."""
        family = BY_NAME[f"{self._prefix}_state"]
        for one in states:
            self._put(family, float(one == state), {family.name: one})

    def put_histogram(self, name: str, values: Histogram, **labels: str) -> None:
        """Add the buckets, the count and the sum of a histogram."""
        family = BY_NAME[f"{self._prefix}_{name}"]
        for bound, count in values.buckets:
            le = ("le", "+Inf" if bound == float("inf") else repr(bound))
            self._put(family, count, labels, "bucket", le)
        self._put(family, values.count, labels, "count")
        self._put(family, values.sum, labels, "sum")

    def _put(
        self,
        family: Family,
        value: float,
        labels: Mapping[str, str],
        part: Literal["", "bucket", "sum", "count"] = "",
        *more: tuple[str, str],
    ) -> None:
        assert set(labels) == set(family.labels), (family.name, labels)
        named = (self._subject, *((name, labels[name]) for name in family.labels), *more)
        self.samples.append(Sample(family, named, float(value), part))


def own_sample(name: str, value: float, **labels: str) -> Sample:
    """Build a sample of the exporter itself, which has no subject."""
    family = BY_NAME[name]
    assert set(labels) == set(family.labels) and not family.subject, (name, labels)
    return Sample(family, tuple((one, labels[one]) for one in family.labels), float(value))


# -- Write samples as OpenMetrics or as Prometheus' older text ----------------------------------


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
                    family.name, family.help, family.type, family.unit
                )
            metric.add_sample(sample.name, dict(sample.labels), sample.value)
        yield from families.values()


def exposed(samples: Iterable[Sample], *, open_metrics: bool) -> bytes:
    """Write samples as text: OpenMetrics, or the older format that node_exporter reads."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(SampleCollector(samples))
    module = "prometheus_client." + ("openmetrics.exposition" if open_metrics else "exposition")
    written: Any = importlib.import_module(module).generate_latest(registry)
    return bytes(written)
