"""An engine that trains a linear model: what a distribution of its own would bring along.

Nothing of hpctrain knows it. `test_sixth_engine.py` installs it as an entry point.
"""

from __future__ import annotations

from hpctrain.spec.engines.abilities import EngineAbilities

ABILITIES = EngineAbilities(
    name="toy",
    title="a toy",
    document="toy_engine_document:ToyConfig",
    fill="toy_engine_document:toy_config",
    assembly="toy_engine_training",
    rules="toy_engine_document",
    model_classes="a line",
    families=("gpt",),
    recomputes=("none",),
    calibration="megatron-core",
)
