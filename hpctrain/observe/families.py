"""The metric families of runs and services: one table, `families.yaml`, and how it is read.

Belongs here: name, type, unit, labels, help of each. Does not belong here: their values
(`samples`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hpctrain.spec.document import Document
from hpctrain.spec.files import load_packaged

PACKAGED_FAMILIES = Path(__file__).with_name("families.yaml")
Subject = Literal["run", "service", ""]
_UNITS = ("seconds", "bytes", "ratio")

# Values of the label `phase` (hpctrain.records.service_records.ReplicaState).
PHASES = ("queued", "loading", "ready", "draining", "ended", "failed")
# Values of the label `result` of drains.
DRAIN_RESULTS = ("finished", "broken_off")


class Family(Document):
    """One metric family; `labels` are without that of its subject, and `le` of histograms."""

    name: str
    type: Literal["gauge", "counter", "histogram", "info", "stateset"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def subject(self) -> Subject:
        """The label that says what it is of; "" for the exporter itself."""
        subjects: tuple[Subject, ...] = ("run", "service")
        return next((one for one in subjects if self.name.startswith(f"hpctrain_{one}")), "")

    @property
    def unit(self) -> str:
        """The end of the name, which OpenMetrics forbids for infos and state sets; "" for none."""
        if self.type in ("info", "stateset"):
            return ""
        return next((unit for unit in _UNITS if self.name.endswith(f"_{unit}")), "")

    @property
    def all_labels(self) -> tuple[str, ...]:
        """All labels that its series have."""
        own = (self.subject,) if self.subject else ()
        return (*own, *self.labels, *(("le",) if self.type == "histogram" else ()))

    @property
    def sample_name(self) -> str:
        """Its name in a query; that of the buckets of a histogram."""
        ends = {"counter": "_total", "info": "_info", "histogram": "_bucket"}
        return self.name + ends.get(self.type, "")


class FamilyTable(Document):
    """`families.yaml`."""

    families: tuple[Family, ...]


FAMILIES = load_packaged(FamilyTable, PACKAGED_FAMILIES).families
BY_NAME = {family.name: family for family in FAMILIES}
