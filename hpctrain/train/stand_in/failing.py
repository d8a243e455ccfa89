"""Record that a rank of the stand-in failed, by the trainer's own code.

Imported only when something failed: most ranks never pay for it. Does not belong here: what is
done about it (the supervisor's business).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from hpctrain.records.layout import RunLayout
from hpctrain.train.entry import Ending
from hpctrain.train.rank_environment import read_launch
from hpctrain.train.stop import StopSignals


def record_failure(train_json: str, error: Exception) -> int:
    """Record the failure of this process; returns its exit code."""
    launch = read_launch(os.environ)
    return record_failures(RunLayout(Path(train_json).absolute().parent), {launch.rank: error})


def record_failures(
    run: RunLayout,
    errors: Mapping[int, Exception],
    *,
    begun: bool = False,
    loading_step: int | None = None,
) -> int:
    """Record how ranks of this node have failed; returns the exit code of the first.

    `begun`: the launch has trained, so a lost connection is not the end of a stopped start.
    `loading_step`: they were loading the checkpoint of this step.
    """
    launch = read_launch(os.environ)
    codes = []
    for rank, error in errors.items():
        ending = Ending(run, replace(launch, rank=rank), StopSignals())
        ending.loading_step = loading_step
        if begun:
            ending.begin()
        codes.append(ending.of(partial(_raise, error)))
    return codes[0]


def _raise(error: Exception) -> NoReturn:
    raise error
