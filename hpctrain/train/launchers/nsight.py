"""Restart a rank under Nsight Systems if the run's `profile` selects it.

`nsys` has to be the parent of what it records, and srun starts all ranks with one command. A
selected rank therefore starts `nsys profile ... the same command`, and becomes the task above it.
Belongs here: that command. Does not belong here: the task (see `nsight_task`), the range that nsys
records (see `profiling`). Imports nothing heavy: it runs before torch is imported.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from hpctrain.base.durable import make_private_directory
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.training import TrainConfig
from hpctrain.records.layout import RunLayout
from hpctrain.train.launchers.nsight_task import record, report_pid_to_task
from hpctrain.train.rank_environment import Launch
from hpctrain.train.stop import StopSignals


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
