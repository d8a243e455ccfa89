"""Find ranks that compute longer than their peers, window after window. Pure.

One slow GPU slows down every rank, because all wait for it, so the step time does not show which
one it is; the time inside forward and backward passes does. Peers are the ranks of one pipeline
stage: stages differ by what the plan gives them. Belongs here: comparing. Does not belong here:
measuring (the trainer does, see `records.run_records.RankTimes`), and what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low

from hpctrain.records.run_records import RankTimes

# Windows in a row. One window may be slow for a reason that has passed: a page fault, a monitor.
_WINDOWS = 3
StageOf = Callable[[int], int]


@dataclass(frozen=True)
class SlowRank:
    """A rank that computed `factor` times as long as the median of its peers, three times."""

    rank: int
    node: str
    factor: float


class Stragglers:
    """Counts slow windows, over all launches of an attempt."""

    def __init__(self, limit_factor: float) -> None:
        self._limit_factor = limit_factor
        self._last: tuple[int, int] | None = None
        self._streaks: dict[int, int] = {}
        self._current: dict[int, SlowRank] = {}
        self._reported: set[tuple[int, str]] = set()

    @property
    def current(self) -> tuple[SlowRank, ...]:
        """The ranks that are slow now, with their factor in the last window, in rank order."""
        return tuple(self._current[rank] for rank in sorted(self._current))

    def launched(self) -> None:
        """Reset all counts for a new launch, whose ranks may be on other nodes."""
        self._last = None
        self._streaks.clear()
        self._current.clear()

    def window(self, times: RankTimes, stage_of: StageOf) -> tuple[SlowRank, ...]:
        """Add one window, unless it was added before; return the ranks to report.

        Each rank is reported once per node.
        """
        if self._last == (times.epoch, times.last_step):
            return ()
        self._last = (times.epoch, times.last_step)
        factors = slowness(times.compute_seconds, stage_of)
        slow = {rank for rank, factor in enumerate(factors) if factor > self._limit_factor}
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in slow}
        nodes = dict(enumerate(times.nodes))
        self._current = {
            rank: SlowRank(rank, nodes.get(rank, ""), factors[rank])
            for rank, streak in self._streaks.items()
            if streak >= _WINDOWS
        }
        new = [s for s in self.current if (s.rank, s.node) not in self._reported]
        self._reported.update((s.rank, s.node) for s in new)
        return tuple(new)


def slowness(compute_seconds: Sequence[float], stage_of: StageOf) -> list[float]:
    """For each rank its compute time over the median of its stage; 1 for a rank without peers.

    Of two middle ones the lower is taken: of two ranks the slower one is the slow one.
    """
    by_stage: dict[int, list[float]] = {}
    for rank, seconds in enumerate(compute_seconds):
        by_stage.setdefault(stage_of(rank), []).append(seconds)
    medians = {stage: median_low(seconds) for stage, seconds in by_stage.items()}
    return [
        seconds / medians[stage_of(rank)] if medians[stage_of(rank)] > 0 else 1.0
        for rank, seconds in enumerate(compute_seconds)
    ]


def one_stage(rank: int) -> int:
    """All ranks are peers."""
    return 0
