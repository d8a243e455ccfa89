"""Values of metric families, checked against the table of families. Pure.

Belongs here: a sample, and the samples of one run. Does not belong here: where values come from
(`hpctrain.actions.run_metrics`), text (`exposition`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hpctrain.observe.families import BY_NAME, Family


class Sample(NamedTuple):
    """One value of a family; `labels` are names and values in the order of the family."""

    family: Family
    labels: tuple[tuple[str, str], ...]
    value: float


class RunSamples:
    """Collects the samples of one run; values that are not known are left out."""

    def __init__(self, run_id: str) -> None:
        self._run = ("run", run_id)
        self.samples: list[Sample] = []

    def put(self, name: str, value: float | None, **labels: str) -> None:
        """Add a value of the family `hpctrain_run_NAME`; None is left out."""
        if value is not None:
            self._put(BY_NAME[f"hpctrain_run_{name}"], value, labels)

    def put_each(self, name: str, label: str, values: Mapping[str, float | None]) -> None:
        """Add a value for each value of the only label of a family."""
        for key, value in values.items():
            self.put(name, value, **{label: key})

    def put_info(self, name: str = "", **labels: str | None) -> None:
        """Add a sample of an info family; a label that is not known is empty."""
        family = BY_NAME["_".join(filter(None, ("hpctrain_run", name)))]
        self._put(family, 1.0, {key: value or "" for key, value in labels.items()})

    def put_state(self, state: str, states: Iterable[str]) -> None:
        """Add the state set: 1 for the state that the run is in, 0 for all others."""
        family = BY_NAME["hpctrain_run_state"]
        for one in states:
            self._put(family, float(one == state), {family.name: one})

    def _put(self, family: Family, value: float, labels: Mapping[str, str]) -> None:
        assert set(labels) == set(family.labels), (family.name, labels)
        named = tuple((name, labels[name]) for name in family.labels)
        self.samples.append(Sample(family, (self._run, *named), float(value)))


def own_sample(name: str, value: float, **labels: str) -> Sample:
    """Build a sample of the exporter itself, which has no label `run`."""
    family = BY_NAME[name]
    assert set(labels) == set(family.labels) and not family.per_run, (name, labels)
    return Sample(family, tuple((one, labels[one]) for one in family.labels), float(value))
