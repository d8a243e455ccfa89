"""Choose the samples to skip after a rollback, and extend the list of skipped data.

Belongs here: from the step of an anomaly to the samples of its batches, read from the run's own
records. Does not belong here: whether to roll back (`judge.loss_anomalies`), skipping them (the
trainer).
"""

from __future__ import annotations

from hpctrain.base import clock
from hpctrain.base.errors import InvalidInputError, StorageError
from hpctrain.base.formats import NewerFormatError
from hpctrain.engines.train_json import train_config_of
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import (
    SkipList,
    SkippedData,
    parse_record,
    read_metrics,
    write_record,
)


def skip_batches(run: RunLayout, step: int, skip_steps: int, reason: str) -> SkippedData | None:
    """Have the trainer skip the batches of the last `skip_steps` steps up to and with `step`.

    Returns the skipped samples. Returns None and changes nothing if there is nothing to skip, or if
    the samples are unknown (no row of the step before, no readable train.json). Raises OSError if
    the list cannot be extended; see `read_skip_list`.
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
        time=clock.now(),
    )
    known = read_skip_list(run)
    write_record(run.skips, SkipList(skips=(*known.skips, skipped)))
    return skipped


def read_skip_list(run: RunLayout) -> SkipList:
    """Read the data skipped so far; empty if there is no file.

    Raises OSError if the file cannot be read, StorageError if its content is no such list. Writing
    a new list over either would train on data that was left out.
    """
    try:
        text = run.skips.read_bytes()
    except FileNotFoundError:
        return SkipList()
    try:
        skips = parse_record(run.skips, text, SkipList)
    except NewerFormatError as error:
        raise StorageError(str(error)) from error
    if skips is None:
        raise StorageError(f"{run.skips} is not a list of skipped data")
    return skips
