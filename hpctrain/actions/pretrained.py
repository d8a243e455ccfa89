"""Checks before submission that the directory of `model.pretrained` holds the model of the spec.

Belongs here: reading its small files, and reporting problems at the place in the spec. Does not
belong here: loading weights (see `hpctrain.train.engines.models`), which imports torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpctrain.checkpoints.staged import open_staged, require_kind
from hpctrain.engines.described import disagreements
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.spec.loader import Loaded
from hpctrain.spec.run import RunSpec

FIELD = "model.pretrained"


def check_pretrained(spec: Loaded[RunSpec]) -> None:
    """Raise InvalidInputError for everything that would end the job as soon as it starts."""
    model = spec.document.model
    if model.pretrained is None:
        return
    try:
        staged = open_staged(Path(os.path.abspath(model.pretrained)))
        require_kind(staged, spec.document.engine.abilities.weights)
    except InvalidInputError as error:
        placed = [found_at(spec, one.message, one.hint) for one in error.problems]
        raise InvalidInputError(placed) from None
    if wrong := disagreements(model, staged.config):
        raise InvalidInputError([found_at(spec, words) for words in wrong])


def found_at(spec: Loaded[RunSpec], words: str, hint: str | None = None) -> Problem:
    """Locate a problem with the directory at the place in the spec that names it."""
    return spec.problem(FIELD, f"`{FIELD}`: {words}", hint)
