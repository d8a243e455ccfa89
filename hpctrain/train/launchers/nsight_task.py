"""A chosen rank's task as long as `nsys` records it: it starts nsys, and signals go past it.

    task (this) -> nsys profile -> the rank

Slurm signals the task. What nsys would make of it is its own business: it ends its recording, and
is told to leave the program alone, which then hears nothing. So the task stays ours, as an agent's
does, and what it gets is meant for the rank, which says who it is in a file. Belongs here:
starting, handing on, ending. Does not belong here: the command (see `nsight`), signals (see
`signal_forwarding`). Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.train.launchers.below_agent import die_with_parent
from hpctrain.train.launchers.signal_forwarding import Passing
from hpctrain.train.stop import StopSignals

# For the rank below nsys: the file that it writes its process id into.
UNDER_NSIGHT = "HPCTRAIN_UNDER_NSIGHT"
_POLL_SECONDS = 0.1


def tell_task(environment: Mapping[str, str]) -> bool:
    """On the rank: True if it is below nsys, and its task knows it from now on.

    Its handlers have to be in force. A task that cannot be told hands nothing on.
    """
    path = environment.get(UNDER_NSIGHT)
    if not path:
        return False
    with contextlib.suppress(OSError):
        Path(path).write_text(str(os.getpid()))
    return True


def record(command: list[str], environment: Mapping[str, str], stop: StopSignals) -> int:
    """Run `command`, whose program is the rank, to its end; its exit code, or 128 and the number of
    the signal that killed it.

    `stop` has caught signals until now: what has come before is for the rank, too.
    """
    passing = Passing()
    passing.install()
    if stop.name is not None:
        os.kill(os.getpid(), signal.Signals[stop.name])
    directory = Path(tempfile.mkdtemp(prefix="hpctrain-nsight-"))
    try:
        code = _follow(command, environment, directory / "rank", passing)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _follow(
    command: list[str], environment: Mapping[str, str], told: Path, passing: Passing
) -> int:
    """In a process group of its own, for some of Slurm's ways to signal a task reach its group."""
    nsys = subprocess.Popen(
        command,
        env={**environment, UNDER_NSIGHT: str(told)},
        close_fds=False,
        process_group=0,
        preexec_fn=die_with_parent,
    )
    while (code := nsys.poll()) is None:
        passing.hand_on(_rank(told))
        time.sleep(_POLL_SECONDS)
    return code


def _rank(told: Path) -> list[int]:
    """Its process id; none until it has said so."""
    try:
        return [int(told.read_text())]
    except (OSError, ValueError):
        return []
