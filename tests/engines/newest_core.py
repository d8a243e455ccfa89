"""The newest megatron-core, unpacked by `make install` beside the environment.

Its wheel is for a newer Python, so it is not installed. Processes find it first by PYTHONPATH, as
on a site that has its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpctrain.train.engines.megatron.core_versions.supported import SUPPORTED

NEWEST = SUPPORTED[-1].number
DIRECTORY = Path(sys.prefix, "megatron-lm")


def environment_of_newest() -> dict[str, str]:
    """Return the variables of a process that imports the newest megatron-core."""
    return {"PYTHONPATH": str(DIRECTORY)}
