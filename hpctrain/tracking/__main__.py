"""`python -m hpctrain.tracking --run-directory DIRECTORY [--follow]`: write metrics elsewhere.

With `--follow` it runs beside training until its stdin is closed, which also happens when whoever
started it is killed. Without, it writes what there is and ends. `--tensorboard DIRECTORY` and
`--wandb` choose what is written; without them it is what `tracking.json` says. Failures are lines
on stderr, and exit code 1. Belongs here: the process. Does not belong here: what is written when
(`follower`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hpctrain.store.layout import RunLayout
from hpctrain.store.tracking import TrackingConfig, tracking_config
from hpctrain.tracking.follower import Follower, writers

# Slurm and people send these to all processes of a job; the supervisor says when it is over.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LEAST_PRIORITY = 19
_KILL_FIRST = "1000"


def main(argv: Sequence[str]) -> int:
    """Write the metrics; the exit code is 1 if anything could not be written."""
    options = _options(argv)
    run = RunLayout(options.run_directory.absolute())
    config = tracking_config(run) or TrackingConfig()
    if options.tensorboard is not None or options.wandb:
        directory, wandb = options.tensorboard, config.wandb if options.wandb else None
        config = config.model_copy(
            update={"tensorboard": None if directory is None else str(directory), "wandb": wandb}
        )
    follower = Follower(writers(run, config))
    if options.follow:
        _give_way()
        follower.follow(_stdin_closed_within)
    else:
        follower.finish()
    for failure in follower.failures:
        print(" ".join(failure.split()), file=sys.stderr)
    return 1 if follower.failures else 0


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tracking")
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--tensorboard", type=Path)
    parser.add_argument("--wandb", action="store_true")
    return parser.parse_args(argv)


def _give_way() -> None:
    """Leave CPUs and memory to training: where memory ends, the kernel kills this process first."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_LEAST_PRIORITY)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILL_FIRST)


def _stdin_closed_within(seconds: float) -> bool:
    """Wait so long for the end of stdin; what is written to it is ignored."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and not os.read(sys.stdin.fileno(), 4096):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
