"""Which samples to leave out after going back.

Belongs here: from the step of an anomaly to the samples of its batches, by what the run itself has
written. Does not belong here: whether to go back (see `loss_anomalies`), or doing it in the
trainer.
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


def leave_out(run: RunLayout, step: int, skip_steps: int, reason: str) -> SkippedData | None:
    """Have the trainer skip the batches of the last `skip_steps` steps up to and with `step`.

    Returns what is left out from now on; None if there is nothing to leave out, or no telling
    which samples (no row of the step before, no readable train.json): then nothing is changed.
    """
    first = _consumed_before(run, step - skip_steps + 1)
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


def _consumed_before(run: RunLayout, step: int) -> int | None:
    """Samples consumed when `step` began: those after the step before it, newest row."""
    if step <= 1:
        return 0
    rows = [row for row in read_metrics(run) if row.step == step - 1]
    return rows[-1].consumed_samples if rows else None
