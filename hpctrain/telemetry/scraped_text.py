"""Read what an engine or a router shows to Prometheus, as far as hpctrain exports it. Pure.

Belongs here: the text, and sums over what one process shows apart (its engines, its models). Does
not belong here: which name means what (`hpctrain.serve`), asking for the text
(`hpctrain.observe.service_metrics`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Histogram:
    """Counts of values up to each bound, the last of which is infinite, and the values' sum."""

    buckets: tuple[tuple[float, float], ...]
    sum: float

    @property
    def count(self) -> float:
        return self.buckets[-1][1]

    def above(self, limit: float) -> float:
        """Count the values above a limit; inside a bucket they count as evenly distributed.

        It never falls from one reading to the next, because no bucket's own count does. Prometheus
        interpolates quantiles alike (docs/querying/functions.md, histogram_quantile).
        """
        lower, below = 0.0, 0.0
        for bound, up_to in self.buckets:
            if limit < bound:
                share = 0.0 if bound == float("inf") else (limit - lower) / (bound - lower)
                return self.count - below - share * (up_to - below)
            lower, below = bound, up_to
        return 0.0


_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_PARTS = ("_bucket", "_sum", "_count")


class ScrapedText:
    """The samples of some names in one answer. Raises ValueError for what is no such text."""

    def __init__(self, text: str, names: Collection[str]) -> None:
        from prometheus_client.parser import text_string_to_metric_families

        wanted = {f"{name}{part}" for name in names for part in ("", *_PARTS)}
        kept = [
            line
            for line in text.splitlines()
            if (found := _NAME.match(line)) is not None and found[0] in wanted
        ]
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families("\n".join([*kept, ""])):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, float(sample.value)))

    def total(self, name: str | None) -> float | None:
        """Add up a number over all label values; None where it is not shown."""
        values = [value for _, value in self._samples.get(name or "", ())]
        return math.fsum(values) if values else None

    def largest(self, name: str | None) -> float | None:
        """Take the largest of all label values, which is what a share of memory means."""
        return max((value for _, value in self._samples.get(name or "", ())), default=None)

    def by(self, name: str | None, label: str) -> dict[str, float]:
        """Add up a number for each value of a label."""
        found: dict[str, float] = defaultdict(float)
        for labels, value in self._samples.get(name or "", ()):
            found[labels.get(label, "")] += value
        return dict(found)

    def histogram(self, name: str | None) -> Histogram | None:
        """Add up a histogram over all label values; None where it is not shown."""
        buckets: dict[float, float] = defaultdict(float)
        for labels, value in self._samples.get(f"{name}_bucket", ()):
            buckets[float(labels["le"])] += value
        count = self.total(f"{name}_count")
        if count is None or not buckets:
            return None
        buckets[math.inf] = count
        return Histogram(tuple(sorted(buckets.items())), self.total(f"{name}_sum") or 0.0)
