"""The data of a run, looked at before torch is imported.

Belongs here: which files a configuration names. Does not belong here: what is looked at in them
(see `hpctrain.store.prepared`), the same at submission (`hpctrain.actions.input_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from hpctrain.engines.hugging_face import classes_of
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import Problem
from hpctrain.store.datasets import DatasetSidecar, bin_path, idx_path, sidecar_path
from hpctrain.store.prepared import Expected, problems_of


def data_problems(config: TrainConfig) -> Iterator[Problem]:
    """Everything that is wrong with the files of the data; nothing for data that is made up."""
    if isinstance(config, ModuleConfig) and config.data_format != "tokens":
        yield from _problems_of_samples(config)
    else:
        for _, prefix in config.data_blend:
            yield from _problems_of_tokens(Path(prefix), config.vocab_size)


def _problems_of_samples(config: ModuleConfig) -> Iterator[Problem]:
    expected = Expected(
        format=config.data_format,
        seq_length=config.seq_length,
        vocab_size=config.vocab_size,
        classes=classes_of(config.model),
        side=config.model.image,
    )
    paths = [path for _, path in config.data_blend]
    if config.data_validation is not None:
        paths.append(config.data_validation)
    for path in paths:
        yield from problems_of(Path(path), expected)


def _problems_of_tokens(prefix: Path, vocab_size: int) -> Iterator[Problem]:
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            yield Problem("data file not found", str(path), node_dependent=True)
    vocab = _vocabulary_of(prefix)
    if vocab is not None and vocab > vocab_size:
        yield Problem(
            f"the data was made with a vocabulary of {vocab} tokens, "
            f"the model has vocab_size {vocab_size}",
            str(sidecar_path(prefix)),
        )


def _vocabulary_of(prefix: Path) -> int | None:
    """The vocabulary size that the dataset's sidecar names; None for data from elsewhere."""
    try:
        return DatasetSidecar.model_validate_json(sidecar_path(prefix).read_bytes()).vocab_size
    except (OSError, ValidationError):
        return None
