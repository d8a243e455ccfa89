"""The stand-in with faults that a plan names: `faulty_stand_in.py PLAN STEP_SECONDS train.json`.

Its ranks start in a tenth of the time of the real trainer's, so that most faults of processes,
nodes and Slurm are rehearsed with it; what a fault does to the supervisor is the same. Does not
belong here: deeds that need an engine (`faulty_trainer`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from rank_deeds import ASKED_TO_LEAVE, LASTING, Fault, planned, settled
from rank_deeds import DEEDS as COMMON_DEEDS

from tests.rig.stand_in import rank


def hear_nothing(fault: Fault) -> None:
    """Neither signals nor files make this rank leave."""
    from tests.rig.stand_in import leader

    ASKED_TO_LEAVE.clear()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    leader.is_requested = lambda run, kind: False


def publish_slowly(fault: Fault) -> None:
    """From now on, wait between a checkpoint's last byte and its publication."""
    from tests.rig.stand_in import leader

    real = leader.publish

    def slow(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(fault["seconds"])
        return real(*arguments, **keywords)

    leader.publish = slow


def die_unpublished(fault: Fault) -> None:
    """End between a checkpoint's last byte and its publication."""
    from tests.rig.stand_in import leader

    leader.publish = lambda *arguments, **keywords: os._exit(fault["code"])


DEEDS: dict[str, Callable[[Fault], None]] = COMMON_DEEDS | {
    "settle": settled,  # saves end before training goes on
    "hear_nothing": hear_nothing,
    "publish_slowly": publish_slowly,
    "die_unpublished": die_unpublished,
}


def strike_at_steps(faults: list[Fault]) -> None:
    """Have ranks stumble when a planned step begins; every step is a round of its own."""
    real = rank.train

    def train(state: int, first: int, count: int) -> tuple[int, list[int]]:
        assert count == 1
        for fault in faults:
            if fault["step"] == first or (fault["do"] in LASTING and fault["step"] < first):
                DEEDS[fault["do"]](fault)
        return real(state, first, count)

    rank.train = train  # `node` takes it from there when it is imported


def main() -> None:
    arguments = sys.argv[2:]
    rank.install_signals()
    ASKED_TO_LEAVE.append(lambda: bool(rank._stop_signals))
    faults = planned()
    # before deeds that import `leader`, which binds what it trains with
    strike_at_steps([fault for fault in faults if fault["step"]])
    for fault in faults:
        if not fault["step"]:
            if fault["do"] == "hear_nothing":  # signals that come later are not installed again
                rank.install_signals = lambda: None
            DEEDS[fault["do"]](fault)
    from tests.rig.stand_in import leader

    leader._ROUND_SECONDS = 0.0
    ASKED_TO_LEAVE.append(_leader_asked(leader))
    code = _recorded(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leader_asked(leader: Any) -> Callable[[], bool]:
    """Whether rank 0, which listens with handlers of its own, has been asked to leave."""
    made: list[Any] = []

    class Remembered(leader.StopSignals):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    leader.StopSignals = Remembered
    return lambda: any(one.requested for one in made)


def _recorded(arguments: list[str]) -> int:
    """Run the rank; one that is not the first of its node records what it stumbles over, too."""
    try:
        return rank.main(arguments)
    except Exception as error:
        from tests.rig.stand_in.leader import record_failure

        return record_failure(arguments[1], error)


if __name__ == "__main__":
    main()
