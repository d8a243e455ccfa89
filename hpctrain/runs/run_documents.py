"""Reads the plan and the trainer configuration of a run, if they can be read.

Belongs here: one reader for each. Does not belong here: the schemas (`hpctrain.plan.documents`,
`hpctrain.plan.trainer_plan`, `hpctrain.engines`).
"""

from __future__ import annotations

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.formats import NewerFormatError, refuse_newer
from hpctrain.engines.train_json import train_config_of
from hpctrain.engines.trainer import TrainerSettings, trainer_settings_of
from hpctrain.engines.training import TrainConfig
from hpctrain.plan.documents import Plan
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.records.layout import RunLayout

AnyPlan = Plan | TrainerPlan


def known_any_plan(layout: RunLayout) -> AnyPlan | None:
    """Read the plan of a run of either kind; None if it cannot be read. Raises NewerFormatError."""
    try:
        text = layout.plan.read_bytes()
    except OSError:
        return None
    for kind in (Plan, TrainerPlan):
        try:
            return kind.model_validate_json(text)
        except ValidationError:
            refuse_newer(layout.plan, text, kind)
    return None


def known_plan(layout: RunLayout) -> Plan | None:
    """Read what was predicted of a run; None for a trainer of its own. Raises NewerFormatError."""
    plan = known_any_plan(layout)
    return plan if isinstance(plan, Plan) else None


def reports_steps(plan: AnyPlan | None) -> bool:
    """Return False if only checkpoints show how far a run is."""
    return not isinstance(plan, TrainerPlan) or plan.reports_steps


def known_train_config(layout: RunLayout) -> TrainConfig | None:
    """Read the configuration of an engine; None if it cannot be read. Raises NewerFormatError."""
    try:
        return train_config_of(layout.train_config, layout.train_config.read_bytes())
    except NewerFormatError:
        raise
    except (OSError, InvalidInputError):
        return None


def known_trainer_settings(layout: RunLayout) -> TrainerSettings | None:
    """Read how a trainer of its own is run; None for other runs. Raises NewerFormatError."""
    try:
        return trainer_settings_of(layout.train_config, layout.train_config.read_bytes())
    except NewerFormatError:
        raise
    except (OSError, InvalidInputError):
        return None
