"""Two ways to make a step take turns in the same processes, so that whatever else the machine does
hits both.

Belongs here: whose turn it is, and how long it took. Does not belong here: steps.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

BARE, OURS = "bare", "hpctrain"
STEPS_PER_TURN = 1
LEAST_PAIRS = 16
_WARM_UP_ROUNDS = 4


@dataclass
class Took:
    """Seconds per step of each turn: by the clock, and of this process on its core."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


Found = dict[str, Took]


def nothing_found() -> Found:
    return {BARE: Took(), OURS: Took()}


def write_found(path: Path, found: Found) -> None:
    path.write_text(json.dumps({kind: asdict(took) for kind, took in found.items()}))


def read_found(path: Path) -> Found:
    return {kind: Took(**took) for kind, took in json.loads(path.read_text()).items()}


@dataclass
class Turns:
    """Yields the kind of each coming step; `found` has what the turns of each took.

    All ranks go through it together: `barrier` waits for them, and `agreed` gives all of them the
    same number. After about `seconds` seconds it ends.
    """

    seconds: float
    barrier: Callable[[], None]
    agreed: Callable[[float], float]
    found: Found = field(default_factory=nothing_found)

    def __iter__(self) -> Iterator[str]:
        scratch = nothing_found()
        for number in range(_WARM_UP_ROUNDS):
            yield from self._round(number, scratch)
        gc.freeze()  # as the trainer does, for both
        last = sum(took.wall[-1] for took in scratch.values()) * STEPS_PER_TURN
        rounds = max(LEAST_PAIRS, int(self.seconds / self.agreed(last)))
        for number in range(rounds):
            yield from self._round(number, self.found)

    def _round(self, number: int, found: Found) -> Iterator[str]:
        """One turn of each; who comes first changes."""
        for kind in (BARE, OURS) if number % 2 else (OURS, BARE):
            self.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(STEPS_PER_TURN):
                yield kind
            self.barrier()
            found[kind].wall.append((time.perf_counter() - wall) / STEPS_PER_TURN)
            found[kind].cpu.append((time.process_time() - cpu) / STEPS_PER_TURN)
