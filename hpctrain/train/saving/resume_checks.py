"""Checks common to all engines when they resume from a checkpoint.

Belongs here: whether the sample order is unchanged, and the exception for damaged files. Does not
belong here: loading (see the engines' rooms), choosing a checkpoint (the supervisor does).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.train.faults import LoadFailedError, is_damage


def check_sample_order(now: dict[str, Any], saved: dict[str, Any], directory: Path) -> None:
    """Raise InvalidInputError with every setting that would change the order of the samples."""
    problems = [
        Problem(
            f"{name} was {saved.get(name)} and is now {value}: the order of all samples "
            "would change",
            str(directory),
            hint="submit a new run",
        )
        for name, value in now.items()
        if saved.get(name) != value
    ]
    if problems:
        raise InvalidInputError(problems)


@contextlib.contextmanager
def damage_named(directory: Path) -> Iterator[None]:
    """Within the block, raise LoadFailedError for errors in decoding files; others pass."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if is_damage(error):
            raise LoadFailedError(f"cannot resume from {directory.name}: {error}") from error
        raise
