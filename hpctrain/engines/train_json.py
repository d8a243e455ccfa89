"""Read `train.json` back as the document of its engine, with errors that name the file. Pure.

The bytes are handed in, because only the rooms around this one open files. Does not belong here:
which engine has which document (see `documents`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from hpctrain.engines.documents import parse_train_config
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.formats import refuse_newer


def train_config_of(path: Path, text: bytes) -> TrainConfig:
    """The configuration of the trainer in `text`, which is the content of `path`.

    Raises NewerFormatError when a newer hpctrain has written it, InvalidInputError with all that
    is wrong in it.
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
