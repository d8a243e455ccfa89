"""What one rank is given before torch is imported: configuration, launch, run directory, stop flag,
and the keeper of how it ends.

Belongs here: reading `train.json`. Does not belong here: checking it (see `preflight`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.train_json import train_config_of
from hpctrain.engines.training import TrainConfig
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import FileDigest, Manifest
from hpctrain.train.rank_environment import Launch
from hpctrain.train.stop import StopSignals


class Keeper(Protocol):
    """Who keeps what the record of how the rank ended needs: the last finished step, the step of
    the checkpoint while it is being loaded, whether the start is over, and whether a program
    that catches signals itself has been asked to stop."""

    step: Callable[[], int]
    loading_step: int | None
    asked: Callable[[], bool]

    def begin(self) -> None:
        """All ranks have started: from now on they agree on when to stop."""


@dataclass(frozen=True)
class Job:
    """Everything that is constant for the lifetime of the process.

    `copies`: where this node has a copy of a data source, by the path in the configuration.
    """

    config: TrainConfig
    launch: Launch
    run: RunLayout
    stop: StopSignals
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def data_cache(self) -> Path:
        """Cache directory of the sample order; every rank must see the same directory."""
        return Path(self.config.data_cache) if self.config.data_cache else self.run.data_cache

    @property
    def resume_directory(self) -> Path | None:
        if not self.launch.resume:
            return None
        return self.run.checkpoints / self.launch.resume

    def manifest(
        self,
        step: int,
        consumed_samples: int,
        files: Mapping[FileDigest, int],
        library_version: str | None = None,
    ) -> Manifest:
        """Make the manifest of a checkpoint from its files, each with the rank that wrote it."""
        return launch_manifest(
            self.launch,
            step,
            files,
            engine=self.config.engine,
            layout=self.config.layout_words,
            consumed_samples=consumed_samples,
            writers=tuple(files.values()),
            library_version=library_version,
        )


def launch_manifest(launch: Launch, step: int, files: Iterable[FileDigest], **own: Any) -> Manifest:
    """Make the manifest of what a launch has saved; `own` are the fields of one kind of trainer."""
    return Manifest(
        step=step,
        epoch=launch.epoch,
        world_size=launch.world_size,
        time=time.time(),
        files=tuple(files),
        **own,
    )


def read_config(path: Path) -> TrainConfig:
    """Read `train.json`. Raises InvalidInputError with all of its problems."""
    try:
        text = path.read_bytes()
    except OSError as error:
        message = error.strerror or str(error)
        raise InvalidInputError([Problem(message, str(path), node_dependent=True)]) from error
    return train_config_of(path, text)
