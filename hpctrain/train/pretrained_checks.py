"""Check the pretrained weights of a run before torch is imported.

Belongs here: whether the directory exists on this node and matches the configured model. Does not
belong here: the same at submission (see `hpctrain.job.input_checks`), loading.
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.staged import Staged, open_staged, require_kind
from hpctrain.engines.hugging_face import disagreements
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.spec.engines.registry import abilities_of


def starting_problems(config: TrainConfig, *, resumes: bool) -> tuple[Problem, ...]:
    """List all problems of the weights; empty for a run that starts from random weights.

    megatron-core reads them in the first launch only; a module is built from its config.json in
    every launch.
    """
    if resumes and abilities_of(config.engine).weights == "megatron_core":
        return ()
    try:
        open_weights(config)
    except InvalidInputError as error:
        return error.problems
    return ()


def open_weights(config: TrainConfig) -> Staged | None:
    """Open the directory of `model.pretrained`; None without one. Raises InvalidInputError."""
    if not isinstance(config, MegatronConfig | ModuleConfig) or not config.pretrained:
        return None
    staged = open_staged(Path(config.pretrained))
    require_kind(staged, abilities_of(config.engine).weights)
    if reasons := disagreements(config.model, staged.config):
        raise InvalidInputError([Problem(reason, config.pretrained) for reason in reasons])
    return staged
