"""Says in the place of a card why it is empty. Pure.

Belongs here: that sentence. Does not belong here: what a card shows otherwise.
"""

from __future__ import annotations

from hpctrain.page.charts import nothing
from hpctrain.page.elements import Card
from hpctrain.report.collect import RunReport


def missing(title: str, report: RunReport, part: str, otherwise: str, wide: bool = False) -> Card:
    """Say in the place of a card why it is empty."""
    reason = report.why_not(part)
    words = f"Cannot be shown: {reason}" if reason else otherwise
    return Card(title, nothing(words), wide=wide)
