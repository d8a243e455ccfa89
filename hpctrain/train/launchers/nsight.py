"""Restart a rank under Nsight Systems if the run's `profile` selects it.

`nsys` has to be the parent of what it records, and srun starts all ranks with one command. A
selected rank therefore starts `nsys profile ... the same command`, and becomes the task above it.
Does not belong here: the range that nsys records (see `profiling`). Imports nothing heavy: it runs
before torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.durable import make_private_directory
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.training import TrainConfig
from hpctrain.records.layout import RunLayout
from hpctrain.train.launchers.agent_ranks import SignalForwarder, die_with_parent
from hpctrain.train.rank_environment import Launch
from hpctrain.train.stop import StopSignals

# ------------------------------------------------------------------------------------------------
# Run `nsys` as a child of the Slurm task, and forward the task's signals to the rank below it.
# task (this) -> nsys profile -> the rank
#
# Slurm signals the task. nsys would only end its recording and not pass the signal on. The task
# therefore stays this program, like an agent, and forwards signals to the rank, which writes its
# process id into a file.


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


def nsight_command(
    config: TrainConfig, launch: Launch, run: RunLayout, program: list[str]
) -> list[str] | None:
    """Return the command that runs `program` under nsys; None if this rank is not selected.

    Nothing is recorded before cudaProfilerStart, and the end of the range leaves the program
    running (nsys profile --help: --capture-range, --capture-range-end, --kill).
    """
    settings = config.profile
    if settings is None or settings.tool != "nsys" or launch.rank not in settings.ranks:
        return None
    first, last = settings.windows[0]
    report = run.trace(launch.epoch, launch.rank, first, last)
    return [
        "nsys",
        "profile",
        f"--output={report.with_name(report.name.removesuffix('.json.gz'))}",
        "--force-overwrite=true",
        "--trace=cuda,nvtx,cublas,cudnn",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--kill=none",
        *program,
    ]


def run_under_nsight(
    path: Path,
    config: TrainConfig,
    launch: Launch,
    run: RunLayout,
    environment: Mapping[str, str],
    stop: StopSignals,
) -> None:
    """Run the same program under nsys and exit with its code; returns if there is nothing to do.

    `path` is the file that `config` was read from, which differs on fewer nodes. `stop` has caught
    signals until now. Raises InvalidInputError when nsys is not installed.
    """
    if report_pid_to_task(environment):
        return
    program = [sys.executable, "-m", "hpctrain.train", str(path)]
    command = nsight_command(config, launch, run, program)
    if command is None:
        return
    executable = shutil.which(command[0], path=environment.get("PATH"))
    if executable is None:
        raise InvalidInputError(
            [
                Problem(
                    f"profile.tool is nsys, and rank {launch.rank} on {launch.node} finds no "
                    "`nsys` on its PATH",
                    hint="load the module of Nsight Systems in the profile's `software.modules`, "
                    "or set `profile.tool: torch`",
                    node_dependent=True,
                )
            ]
        )
    make_private_directory(run.traces)
    sys.stdout.flush()
    os._exit(record([executable, *command[1:]], environment, stop))
