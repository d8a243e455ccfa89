"""`python -m hpctrain.tracking --run-directory DIRECTORY [--follow]`: write metrics elsewhere.

With `--follow` it runs beside training until its stdin is closed, which also happens when whoever
started it is killed. Without, it writes what there is and ends. `--tensorboard DIRECTORY` and
`--wandb` choose what is written; without them it is what `tracking.json` says. Failures are lines
on stderr, and exit code 1. Belongs here: the process, and which
writers it has. Does not belong here: what is written when
(`follower`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hpctrain.base.beside_training import give_way, stdin_closed_within
from hpctrain.records.layout import RunLayout
from hpctrain.records.tracking import TrackingConfig, tensorboard_directory, tracking_config
from hpctrain.tracking.follower import Follower, Writer


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
        give_way()
        follower.follow(stdin_closed_within)
    else:
        follower.finish()
    for failure in follower.failures:
        print(" ".join(failure.split()), file=sys.stderr)
    return 1 if follower.failures else 0


def writers(run: RunLayout, config: TrackingConfig) -> list[Callable[[], Writer]]:
    """What makes the writers that the settings ask for; making one imports its package."""

    def event_files() -> Writer:
        from hpctrain.tracking.event_files import EventFiles

        assert directory is not None
        return EventFiles(run, directory)

    def wandb_run() -> Writer:
        from hpctrain.tracking.wandb_run import WandbRun

        return WandbRun(run, config)

    directory = tensorboard_directory(run, config)
    made = [event_files] if directory is not None else []
    return made + ([wandb_run] if config.wandb is not None else [])


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hpctrain.tracking")
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--follow", action="store_true")
    parser.add_argument("--tensorboard", type=Path)
    parser.add_argument("--wandb", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
