"""Parse `train.json` as the document of its engine, with errors that name the file. Pure.

Callers pass the bytes, because this package opens no files. Does not belong here: the choice of the
document (see `documents`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.formats import refuse_newer
from hpctrain.engines.documents import parse_train_config
from hpctrain.engines.training import TrainConfig


def train_config_of(path: Path, text: bytes) -> TrainConfig:
    """Parse the trainer configuration `text`, the content of `path`.

    Raises NewerFormatError if a newer hpctrain wrote it, InvalidInputError with all its problems.
    """
    try:
        return parse_train_config(text)
    except ValidationError as error:
        refuse_newer(path, text, TrainConfig)
        problems = [
            Problem(f"{'.'.join(map(str, item['loc']))}: {item['msg']}", str(path))
            for item in error.errors()
        ]
        raise InvalidInputError(problems) from error
