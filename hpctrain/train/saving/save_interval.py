"""Decide when a time-based save is due.

Does not belong here: saves by steps and on request (see `loop`), the formula (see
`hpctrain.plan.forecast.intervals`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable

from hpctrain.engines.training import TrainConfig
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.records.run_records import SaveRecord

# The first save of a launch is slower, and a busy file system slows single saves.
_MEASURED_SAVES = 5
# A stall below the clock's own noise would make the interval zero.
_LEAST_STALL_SECONDS = 1e-3


class SaveInterval:
    """Rank 0's timer; `earlier` are the saves of the run before this launch."""

    def __init__(
        self, config: TrainConfig, mttf_seconds: float, earlier: Iterable[SaveRecord] = ()
    ) -> None:
        self._fixed_seconds = config.save_interval_seconds
        self._automatic = config.save_interval_auto and math.isfinite(mttf_seconds)
        self._mttf_seconds = mttf_seconds
        self._saves: deque[SaveRecord] = deque(earlier, maxlen=_MEASURED_SAVES)
        self._begun_at = time.monotonic()

    @property
    def seconds(self) -> float | None:
        """The current interval; None if time-based saving is off.

        Automatic: Daly's interval from the measured stall, but at least the time until a checkpoint
        is published, because the next save cannot begin before.
        """
        if not self._automatic or not self._saves:
            return self._fixed_seconds
        stall = statistics.median(save.stall_seconds or 0.0 for save in self._saves)
        publish = statistics.median(save.publish_seconds for save in self._saves)
        best = daly_seconds(max(stall, _LEAST_STALL_SECONDS), self._mttf_seconds)
        return max(best, publish)

    @property
    def overdue(self) -> bool:
        seconds = self.seconds
        return seconds is not None and time.monotonic() - self._begun_at >= seconds

    def begun(self) -> None:
        """Restart the interval: a save begins now, or the launch."""
        self._begun_at = time.monotonic()

    def published(self, save: SaveRecord) -> None:
        self._saves.append(save)
