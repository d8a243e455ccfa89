"""Values of metric families, checked against the table of families. Pure.

Belongs here: a sample, and the samples of one run or service. Does not belong here: where values
come from (`hpctrain.observe.run_metrics`, `service_metrics`), text (`exposition`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from hpctrain.observe.families import BY_NAME, Family
from hpctrain.telemetry.scraped_text import Histogram


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


class _Samples:
    """Collects samples of one subject; values that are not known are left out."""

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

    def _put(self, family: Family, value: float, labels: Mapping[str, str]) -> None:
        self.samples.append(Sample(family, self._labels(family, labels), float(value)))

    def _labels(self, family: Family, labels: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
        assert set(labels) == set(family.labels), (family.name, labels)
        return (self._subject, *((name, labels[name]) for name in family.labels))


class RunSamples(_Samples):
    """Collects the samples of one run."""

    def __init__(self, run_id: str) -> None:
        super().__init__("run", run_id)

    def put_state(self, state: str, states: Iterable[str]) -> None:
        """Add the state set: 1 for the state that the run is in, 0 for all others."""
        family = BY_NAME["hpctrain_run_state"]
        for one in states:
            self._put(family, float(one == state), {family.name: one})


class ServiceSamples(_Samples):
    """Collects the samples of one service."""

    def __init__(self, service_id: str) -> None:
        super().__init__("service", service_id)

    def put_histogram(self, name: str, values: Histogram, **labels: str) -> None:
        """Add the buckets, the count and the sum of a histogram."""
        family = BY_NAME[f"{self._prefix}_{name}"]
        named = self._labels(family, labels)
        for bound, count in values.buckets:
            le = "+Inf" if bound == float("inf") else repr(bound)
            self.samples.append(Sample(family, (*named, ("le", le)), count, "bucket"))
        self.samples.append(Sample(family, named, values.count, "count"))
        self.samples.append(Sample(family, named, values.sum, "sum"))


def own_sample(name: str, value: float, **labels: str) -> Sample:
    """Build a sample of the exporter itself, which has no subject."""
    family = BY_NAME[name]
    assert set(labels) == set(family.labels) and not family.subject, (name, labels)
    return Sample(family, tuple((one, labels[one]) for one in family.labels), float(value))
