"""Run `nsys` as a child of the Slurm task, and forward the task's signals to the rank below it.

    task (this) -> nsys profile -> the rank

Slurm signals the task. nsys would only end its recording and not pass the signal on. The task
therefore stays this program, like an agent, and forwards signals to the rank, which writes its
process id into a file. Does not belong here: the command (see `nsight`), forwarding (see
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

from hpctrain.train.launchers.agent_rank_setup import die_with_parent
from hpctrain.train.launchers.signal_forwarding import SignalForwarder
from hpctrain.train.stop import StopSignals

# For the rank below nsys: the file that it writes its process id into.
UNDER_NSIGHT = "HPCTRAIN_UNDER_NSIGHT"
_POLL_SECONDS = 0.1


def report_pid_to_task(environment: Mapping[str, str]) -> bool:
    """On the rank: write its pid for the task and return True, if it runs under nsys.

    Signal handlers must be installed already. If the file cannot be written, the task forwards
    nothing.
    """
    path = environment.get(UNDER_NSIGHT)
    if not path:
        return False
    with contextlib.suppress(OSError):
        Path(path).write_text(str(os.getpid()))
    return True


def record(command: list[str], environment: Mapping[str, str], stop: StopSignals) -> int:
    """Run `command`, which starts the rank under nsys, to its end.

    Returns its exit code, or 128 + signal number if it was killed. A signal that `stop` has caught
    until now is forwarded too.
    """
    forwarder = SignalForwarder()
    forwarder.install()
    if stop.name is not None:
        os.kill(os.getpid(), signal.Signals[stop.name])
    directory = Path(tempfile.mkdtemp(prefix="hpctrain-nsight-"))
    pid_file = directory / "rank"
    try:
        nsys = subprocess.Popen(
            command,
            env={**environment, UNDER_NSIGHT: str(pid_file)},
            close_fds=False,
            # some ways in which Slurm signals a task reach its whole process group
            process_group=0,
            preexec_fn=die_with_parent,
        )
        while (code := nsys.poll()) is None:
            with contextlib.suppress(OSError, ValueError):  # until the rank has written it
                forwarder.forward([int(pid_file.read_text())])
            time.sleep(_POLL_SECONDS)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return code if code >= 0 else 128 - code
