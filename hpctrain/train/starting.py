"""The weights that a run starts from, looked at before torch is imported.

Belongs here: whether the directory is there on this node and is the model of the configuration.
Does not belong here: the same at submission (see `hpctrain.actions.pretrained`), loading.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoints.staged import Kind, Staged, open_staged, require_kind
from hpctrain.engines.described import disagreements
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.model import ModelSpec


def starting_problems(config: TrainConfig, *, resumes: bool) -> tuple[Problem, ...]:
    """Everything that is wrong with them; empty for a run that starts from random weights.

    megatron-core needs them once; a module is built by its config.json each time.
    """
    if resumes and isinstance(config, MegatronConfig):
        return ()
    try:
        open_weights(config)
    except InvalidInputError as error:
        return error.problems
    return ()


def open_weights(config: TrainConfig) -> Staged | None:
    """The directory of `model.pretrained`; None without. Raises InvalidInputError."""
    if isinstance(config, MegatronConfig) and config.pretrained:
        return _opened(config.pretrained, "megatron_core", config.model)
    if isinstance(config, ModuleConfig) and config.model.pretrained:
        return _opened(config.model.pretrained, "hugging_face", config.model)
    return None


def _opened(path: str, kind: Kind, model: ModelSpec) -> Staged:
    staged = open_staged(Path(path))
    require_kind(staged, kind)
    if wrong := disagreements(model, staged.config):
        raise InvalidInputError([Problem(words, path) for words in wrong])
    return staged
