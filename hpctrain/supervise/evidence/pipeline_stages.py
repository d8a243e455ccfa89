"""Read from the trainer's configuration which pipeline stage each rank computes.

Belongs here: this reading. Does not belong here: comparing ranks (`judge.stragglers`).
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.engines.train_json import train_config_of
from hpctrain.errors import InvalidInputError
from hpctrain.supervise.judge.stragglers import StageOf, one_stage


def read_stages(train_config: Path) -> StageOf:
    """The pipeline stage of each rank; all ranks are peers if the file cannot be read."""
    try:
        return train_config_of(train_config, train_config.read_bytes()).pipeline_stage
    except (OSError, InvalidInputError):
        return one_stage
