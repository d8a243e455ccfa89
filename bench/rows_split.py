"""Which published rows the constants are fitted to, and which are kept for validation.

Belongs here: that rule, used by `calibrate_planner` and `planner_accuracy` alike.
"""

from __future__ import annotations

import hashlib

from bench.published import PublishedRow


def in_calibration(row: PublishedRow, share: float) -> bool:
    """True for about `share` of the rows; by a hash of what a row runs, not of what it measured."""
    facts = (row.source, row.model, row.gpus, row.tp, row.pp, row.micro_batch, row.precision)
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return digest[0] / 256 < share
