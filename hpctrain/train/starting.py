"""The weights that a run starts from, looked at before torch is imported.

Belongs here: whether the directory is there on this node and is the model of the configuration.
Does not belong here: the same at submission (see `hpctrain.actions.input_checks`), loading.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoints.staged import Staged, open_staged, require_kind
from hpctrain.engines.described import disagreements
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.engines.registry import abilities_of


def starting_problems(config: TrainConfig, *, resumes: bool) -> tuple[Problem, ...]:
    """Everything that is wrong with them; empty for a run that starts from random weights.

    megatron-core needs them once; a module is built by its config.json each time.
    """
    if resumes and abilities_of(config.engine).weights == "megatron_core":
        return ()
    try:
        open_weights(config)
    except InvalidInputError as error:
        return error.problems
    return ()


def open_weights(config: TrainConfig) -> Staged | None:
    """Open the directory of `model.pretrained`; None without. Raises InvalidInputError."""
    if not isinstance(config, MegatronConfig | ModuleConfig) or not config.pretrained:
        return None
    staged = open_staged(Path(config.pretrained))
    require_kind(staged, abilities_of(config.engine).weights)
    if wrong := disagreements(config.model, staged.config):
        raise InvalidInputError([Problem(words, config.pretrained) for words in wrong])
    return staged
