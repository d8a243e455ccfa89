"""Space out repeated calls of Slurm's controller, which serves every user of the site.

slurmctld answers one user's calls from a bucket of 30 that refills by 2 per second where the site
limits them (slurm.conf(5), SlurmctldParameters=rl_enable, rl_bucket_size, rl_refill_rate), and a
controller that comes back is asked by all jobs at once. So pauses double, and each is shortened at
random by up to a half ("equal jitter": M. Brooker, Exponential Backoff And Jitter, AWS, 2015).
Belongs here: the lengths of pauses. Does not belong here: sleeping, when to give up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FIRST_SECONDS, LONGEST_SECONDS = 0.5, 5.0


class Backoff:
    """The pauses of one series of calls; `draw` gives numbers from 0 up to 1."""

    def __init__(
        self,
        first_seconds: float = FIRST_SECONDS,
        longest_seconds: float = LONGEST_SECONDS,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._seconds = first_seconds
        self._longest_seconds = longest_seconds
        self._draw = draw

    def next_seconds(self) -> float:
        """The length of the next pause."""
        full, self._seconds = self._seconds, min(2 * self._seconds, self._longest_seconds)
        return full * (1.0 - self._draw() / 2.0)
