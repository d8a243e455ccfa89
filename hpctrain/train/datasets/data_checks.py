"""Check the data files of a run before torch is imported.

Belongs here: which files a configuration names. Does not belong here: the checks of each (see
`hpctrain.records.datasets`), the same at submission (`hpctrain.job.input_checks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import Problem
from hpctrain.engines.hugging_face import classes_of
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.training import TrainConfig
from hpctrain.records.datasets import (
    DatasetSidecar,
    Expected,
    bin_path,
    idx_path,
    problems_of,
    sidecar_path,
)


def data_problems(config: TrainConfig) -> Iterator[Problem]:
    """Yield all problems of the data files; mock data has none."""
    if isinstance(config, ModuleConfig) and config.data_format != "tokens":
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
        for source in paths:
            yield from problems_of(Path(source), expected)
        return
    for _, name in config.data_blend:
        prefix = Path(name)
        for path in (bin_path(prefix), idx_path(prefix)):
            if not path.is_file():
                yield Problem("data file not found", str(path), node_dependent=True)
        try:
            sidecar = DatasetSidecar.model_validate_json(sidecar_path(prefix).read_bytes())
        except (OSError, ValidationError):
            continue  # data from elsewhere has no sidecar
        if sidecar.vocab_size > config.vocab_size:
            yield Problem(
                f"the data was made with a vocabulary of {sidecar.vocab_size} tokens, "
                f"the model has vocab_size {config.vocab_size}",
                str(sidecar_path(prefix)),
            )
