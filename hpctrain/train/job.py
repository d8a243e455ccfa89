"""The inputs of one rank before torch is imported: configuration, launch, run directory, stop flag.

Belongs here: reading `train.json`. Does not belong here: checking it (see `preflight`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hpctrain.engines.documents import parse_train_config
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import InvalidInputError, Problem
from hpctrain.store.layout import RunLayout
from hpctrain.train.rank_environment import Launch
from hpctrain.train.stop import StopSignals


@dataclass(frozen=True)
class Job:
    """Everything that is constant for the lifetime of the process."""

    config: TrainConfig
    launch: Launch
    run: RunLayout
    stop: StopSignals

    @property
    def data_cache(self) -> Path:
        """Cache directory of the sample order; every rank must see the same directory."""
        return Path(self.config.data_cache) if self.config.data_cache else self.run.data_cache

    @property
    def resume_directory(self) -> Path | None:
        if not self.launch.resume:
            return None
        return self.run.checkpoints / self.launch.resume


def read_config(path: Path) -> TrainConfig:
    """Read `train.json`. Raises InvalidInputError with all of its problems."""
    try:
        return parse_train_config(path.read_bytes())
    except OSError as error:
        message = error.strerror or str(error)
        raise InvalidInputError([Problem(message, str(path), node_dependent=True)]) from error
    except ValidationError as error:
        raise InvalidInputError(
            [
                Problem(f"{'.'.join(map(str, item['loc']))}: {item['msg']}", str(path))
                for item in error.errors()
            ]
        ) from error
