"""Reads the plan and the trainer configuration of a run, if they can be read.

Belongs here: one reader for each. Does not belong here: the schemas (`hpctrain.plan.documents`,
`hpctrain.engines`).
"""

from __future__ import annotations

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.formats import NewerFormatError, refuse_newer
from hpctrain.engines.train_json import train_config_of
from hpctrain.engines.training import TrainConfig
from hpctrain.plan.documents import Plan
from hpctrain.records.layout import RunLayout


def known_plan(layout: RunLayout) -> Plan | None:
    """Read the plan of a run; None when it cannot be read. Raises NewerFormatError."""
    try:
        text = layout.plan.read_bytes()
    except OSError:
        return None
    try:
        return Plan.model_validate_json(text)
    except ValidationError:
        refuse_newer(layout.plan, text, Plan)
        return None


def known_train_config(layout: RunLayout) -> TrainConfig | None:
    """Read the trainer's configuration; None if it cannot be read. Raises NewerFormatError."""
    try:
        return train_config_of(layout.train_config, layout.train_config.read_bytes())
    except NewerFormatError:
        raise
    except (OSError, InvalidInputError):
        return None
