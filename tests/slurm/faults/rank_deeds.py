"""What a rank may do to itself, whatever trains in it: end, fail, wait, stand still.

Belongs here: the plan of a test, and deeds that need nothing of a trainer. Does not belong here:
when they are done (`faulty_trainer`, `faulty_stand_in`), faults from outside
(`hpctrain.sandbox.faults`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Fault = dict[str, Any]
PLAN = Path(sys.argv[1])
# Whether somebody has asked this rank to leave; the programs add what their trainers hear.
ASKED_TO_LEAVE: list[Callable[[], bool]] = [Path("control/stop").exists]
_KEPT: list[Any] = []


def planned() -> list[Fault]:
    """The faults of this rank and launch; rank -1 stands for all, and so does epoch 0."""
    if not PLAN.exists():
        return []
    rank, epoch = int(os.environ["SLURM_PROCID"]), int(os.environ["HPCTRAIN_EPOCH"])
    return [
        fault
        for fault in json.loads(PLAN.read_text())
        if fault["rank"] in (rank, -1) and fault["epoch"] in (epoch, 0)
    ]


def leave(fault: Fault) -> None:
    """End at once with a code, after some words."""
    say(fault)
    os._exit(fault["code"])


def fail(fault: Fault) -> None:
    """Raise what a library raises."""
    raise RuntimeError(fault["text"])


def misspell(fault: Fault) -> None:
    """A mistake in the code of the user that one rank alone comes to."""
    json.no_such_name  # type: ignore[attr-defined]  # noqa: B018


def say(fault: Fault) -> None:
    if fault["text"]:
        print(fault["text"], file=sys.stderr, flush=True)


def kernel(fault: Fault) -> None:
    """The kernel of this node says something, in the format of `journalctl -o short-unix`."""
    node = os.environ["SLURMD_NODENAME"]
    log = Path(os.environ["HPCTRAIN_KERNEL_LOG"].replace("{node}", node))
    with log.open("a") as stream:
        stream.write(f"{time.time():.6f} {node} kernel: {fault['text']}\n")


def sleep(fault: Fault) -> None:
    """Never come to the collective that the others wait in."""
    time.sleep(fault["seconds"] or 3600)


def await_warning(fault: Fault) -> None:
    """A step that lasts until somebody asks this rank to leave."""
    _wait_for(lambda: False)


def await_word(fault: Fault) -> None:
    """This step and those after it wait until the test says `text`, or somebody wants a save."""
    word, request = PLAN.with_name(f"said-{fault['text']}"), Path("control/save")
    _wait_for(lambda: word.exists() or request.exists())


def _wait_for(reached: Callable[[], bool]) -> None:
    """Or until this rank is asked to leave."""
    deadline = time.monotonic() + 3600
    while not (reached() or any(asked() for asked in ASKED_TO_LEAVE)):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def stop(fault: Fault) -> None:
    """All threads stand still, as after a SIGSTOP from outside."""
    os.kill(os.getpid(), signal.SIGSTOP)


def import_nothing(fault: Fault) -> None:
    """A mistake in the code of the user: the traceback is Python's own.

    All ranks come to it together: one that is late would be ended before it can say the same.
    """
    _meet()
    import a_module_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401


def _meet() -> None:
    """Wait for all ranks of this launch."""
    place = PLAN.with_name(f"met-{os.environ['HPCTRAIN_EPOCH']}")
    place.mkdir(exist_ok=True)
    (place / os.environ["SLURM_PROCID"]).touch()
    _wait_for(lambda: len(list(place.iterdir())) == int(os.environ["SLURM_NTASKS"]))


def die_of_term(fault: Fault) -> None:
    """TERM ends the process, as it ends most programs: code 143 for Slurm."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def take_port(fault: Fault) -> None:
    """Listen where rank 0 is about to."""
    taken = socket.create_server(("", int(os.environ["MASTER_PORT"])))
    _KEPT.append(taken)


def settled(fault: Fault) -> None:
    """Note that no save is under way when the step begins, once for all ranks."""
    if os.environ["SLURM_PROCID"] == "0":
        PLAN.with_name(f"settled-{os.environ['HPCTRAIN_EPOCH']}-{fault['step']}").touch()


DEEDS: dict[str, Callable[[Fault], None]] = {
    "leave": leave,
    "fail": fail,
    "misspell": misspell,
    "say": say,
    "kernel": kernel,
    "sleep": sleep,
    "await_warning": await_warning,
    "await_word": await_word,
    "stop": stop,
    "import_nothing": import_nothing,
    "die_of_term": die_of_term,
    "take_port": take_port,
}
# What is done at all later steps, too.
LASTING = ("await_word", "pace")
