"""Check the pretrained weights of a run before torch is imported.

Belongs here: whether the directory exists on this node and matches the configured model. Does not
belong here: the same at submission (see `hpctrain.actions.pretrained`), loading.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.checkpoints.staged import Kind, Staged, open_staged, require_kind
from hpctrain.engines.described import disagreements
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.shape import shape_of
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.model import ModelSpec


def starting_problems(config: TrainConfig, *, resumes: bool) -> tuple[Problem, ...]:
    """List all problems of the weights; empty for a run that starts from random weights.

    megatron-core reads them in the first launch only; a module is built from its config.json in
    every launch.
    """
    if resumes and isinstance(config, MegatronConfig):
        return ()
    try:
        open_weights(config)
    except InvalidInputError as error:
        return error.problems
    return ()


def open_weights(config: TrainConfig) -> Staged | None:
    """Open the directory of `model.pretrained`; None without one. Raises InvalidInputError."""
    if isinstance(config, MegatronConfig) and config.pretrained:
        return _open(config.pretrained, "megatron", shape_of(config))
    if isinstance(config, ModuleConfig) and config.model.pretrained:
        return _open(config.model.pretrained, "hugging_face", config.model)
    return None


def _open(path: str, kind: Kind, model: ModelSpec) -> Staged:
    staged = open_staged(Path(path))
    require_kind(staged, kind)
    if reasons := disagreements(model, staged.config):
        raise InvalidInputError([Problem(reason, path) for reason in reasons])
    return staged
