"""What megatron-core makes of options on the stub of TransformerEngine; called in its process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.layout import RunLayout


def recipe_of(directory: str) -> list[Any]:
    """Return the recipe of TransformerEngine that megatron-core makes from a run's settings."""
    run = RunLayout(Path(directory))
    config: Any = parse_train_config(run.train_config.read_text())
    from megatron.core.fp4_utils import get_fp4_recipe
    from megatron.core.fp8_utils import get_fp8_recipe

    from hpctrain.train.engines.megatron.model import transformer_settings

    settings = transformer_settings(config)
    recipe = get_fp4_recipe(settings) if settings.fp4 else get_fp8_recipe(settings)
    names = ("amax_history_len", "amax_compute_algo")
    return [
        type(recipe).__name__.removeprefix("TE"),
        *(getattr(recipe, name) for name in names if hasattr(recipe, name)),
    ]
