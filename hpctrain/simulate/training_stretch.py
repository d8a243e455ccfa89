"""Compute the work done and kept in one uninterrupted stretch of training, in closed form. Pure.

A stretch is a number of whole cycles of work and stall, and a remainder. Does not belong here:
what ends a stretch (see `simulated_run`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUNDING_SECONDS = 1e-6


@dataclass(frozen=True)
class Stretch:
    """Seconds: `done` of work, of which `kept` are durable, `stalled` for saves."""

    done: float
    kept: float
    stalled: float


@dataclass(frozen=True)
class Cycle:
    """`work` seconds, then `stall` without training; durable `delay` after the stall.

    `last` is the duration of a foreground save, at the end of the run or of an attempt.
    """

    work: float
    stall: float
    delay: float
    last: float

    def to_the_end(self, left: float) -> float:
        """Return the seconds until `left` seconds of work are done and durable."""
        return left + self._saves_before_the_end(left) * self.stall + self.last

    def finished(self, left: float) -> Stretch:
        return Stretch(left, left, self.to_the_end(left) - left)

    def cut_off(self, seconds: float, left: float) -> Stretch:
        """Return the stretch after `seconds`, before `left` is done; unsaved work is lost."""
        period = self.work + self.stall
        saves = self._saves_before_the_end(left)
        whole = min(math.floor(seconds / period), saves)
        done = min(whole * self.work + min(seconds - whole * period, self.work), left)
        durable = min(max(0, math.floor((seconds - self.delay) / period)), saves)
        return Stretch(done, durable * self.work, seconds - done)

    def _saves_before_the_end(self, left: float) -> int:
        return max(0, math.ceil(left / self.work - _ROUNDING_SECONDS) - 1)
