"""When the clock says that a checkpoint is due: a fixed interval, or one that follows the costs.

Belongs here: seconds between saves. Does not belong here: saves by steps and on request (see
`loop`), the formula itself (see `hpctrain.plan.forecast.intervals`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable

from hpctrain.engines.training import TrainConfig
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.store.run_records import SaveRecord

# The first save of a launch is slower than the rest, and single ones meet a busy file system.
_MEASURED_SAVES = 5
# A stall below the clock's own noise would make the interval zero.
_LEAST_STALL_SECONDS = 1e-3


class SaveInterval:
    """Rank 0's clock; `earlier` are the saves of the run before this launch."""

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
        """The present interval; None when the clock has no say.

        Automatic: Daly's interval from the measured stall, but at least the time until a save
        counts, for the next one cannot begin before.
        """
        if not self._automatic or not self._saves:
            return self._fixed_seconds
        stall = statistics.median(save.stall_seconds for save in self._saves)
        publish = statistics.median(save.publish_seconds for save in self._saves)
        best = daly_seconds(max(stall, _LEAST_STALL_SECONDS), self._mttf_seconds)
        return max(best, publish)

    @property
    def overdue(self) -> bool:
        seconds = self.seconds
        return seconds is not None and time.monotonic() - self._begun_at >= seconds

    def begun(self) -> None:
        """A save begins now, or the launch: the interval counts from here."""
        self._begun_at = time.monotonic()

    def published(self, save: SaveRecord) -> None:
        self._saves.append(save)
