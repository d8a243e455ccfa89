"""`python -m hpctrain.serve.replica RUN_DIRECTORY/replica.json`: one task of a replica.

Belongs here: the beginning and the end of the process. Does not belong here: what is in between
(`lifecycle`).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hpctrain.base.errors import HpctrainError, InvalidInputError
from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import TrainerExit
from hpctrain.serve.replica.config import ReplicaConfig, read_program_settings
from hpctrain.serve.replica.life import Life, say
from hpctrain.serve.replica.lifecycle import Replica
from hpctrain.train.network_interface import set_gloo_interface
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.stacks import open_stack_dump
from hpctrain.train.stop import StopSignals, leave
from hpctrain.train.storage import outlast


def main(arguments: list[str]) -> int:
    """Run one task; returns its exit code."""
    stop = StopSignals()
    stop.install()
    if len(arguments) != 1:
        say("usage: python -m hpctrain.serve.replica RUN_DIRECTORY/replica.json")
        return TrainerExit.CONFIG_ERROR
    path = Path(arguments[0]).absolute()
    run = RunLayout(path.parent)
    try:
        launch = read_launch(os.environ)
    except InvalidInputError as error:
        say(str(error))
        return TrainerExit.CONFIG_ERROR
    life, dump = Life(run, launch), None
    try:
        dump = open_stack_dump(run, launch)
    except OSError as error:
        say(f"stacks cannot be written: {error}")
    try:
        address = set_gloo_interface(os.environ, launch.node)
        config = outlast(run, lambda: read_program_settings(path, ReplicaConfig))
        code = Replica(config, life, stop, os.environ, address).run()
    except HpctrainError as error:
        code = life.refused(str(error))
    if dump is not None:
        dump.discard_if_unused()
    return code


if __name__ == "__main__":
    leave(main(sys.argv[1:]))  # threads that read the engine's output may still wait for it
