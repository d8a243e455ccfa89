"""Choose the samples to skip after a rollback.

Belongs here: from the step of an anomaly to the samples of its batches, read from the run's own
records. Does not belong here: whether to roll back (`judge.loss_anomalies`), skipping them (the
trainer).
"""

from __future__ import annotations

import time

from hpctrain.engines.train_json import train_config_of
from hpctrain.errors import InvalidInputError
from hpctrain.store.layout import RunLayout
from hpctrain.store.run_records import (
    SkipList,
    SkippedData,
    read_metrics,
    read_record,
    write_record,
)


def skip_batches(run: RunLayout, step: int, skip_steps: int, reason: str) -> SkippedData | None:
    """Have the trainer skip the batches of the last `skip_steps` steps up to and with `step`.

    Returns what is skipped from now on. None, and nothing changes, if there is nothing to skip, or
    if the samples are unknown (no row of the step before, no readable train.json).
    """
    first_step = step - skip_steps + 1
    first: int | None = 0
    if first_step > 1:
        # Consumed before the first skipped step, by the newest row of the step before it.
        rows = [row for row in read_metrics(run) if row.step == first_step - 1]
        first = rows[-1].consumed_samples if rows else None
    try:
        batch = train_config_of(run.train_config, run.train_config.read_bytes()).global_batch_size
    except (OSError, InvalidInputError):
        return None
    if skip_steps < 1 or first is None:
        return None
    skipped = SkippedData(
        from_samples=first,
        to_samples=first + skip_steps * batch,
        reason=reason,
        time=time.time(),
    )
    known = read_record(run.skips, SkipList) or SkipList()
    write_record(run.skips, SkipList(skips=(*known.skips, skipped)))
    return skipped
