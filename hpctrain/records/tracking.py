"""What goes to TensorBoard and W&B, and how far it has been written.

Belongs here: the formats, the segments on disk, and the command that uploads them. Does not belong
here: which rows are written (`hpctrain.tracking`), reading metrics (`step_times`).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from hpctrain.records.layout import RunLayout
from hpctrain.records.run_records import Record, RecordPart, read_record

# W&B takes ids of up to 128 characters; older servers took 64.
MOST_ID_CHARACTERS = 64
_SEGMENTS = "offline-run-*"
_SYNCED = ".synced"


class WandbSettings(RecordPart):
    """The W&B run that all attempts belong to; `run_id` is W&B's id of it."""

    run_id: str
    project: str
    entity: str | None = None
    name: str
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["offline", "online"] = "offline"


class TrackingConfig(Record):
    """What is written (`tracking.json`).

    `tensorboard`: the directory of this run's event files, relative to the run's: a run may move.
    `description`: what W&B shows as the config of the run.
    """

    tensorboard: str | None = None
    wandb: WandbSettings | None = None
    description: dict[str, JsonValue] = Field(default_factory=dict)


class TensorboardPosition(Record):
    """How far metrics are in event files. Kept beside them, as `position.json`.

    `offset`: of the first byte of `metrics.jsonl` that was not read. `epoch`, `step`: of the newest
    row that was written. `file_number`, `size_bytes`: of the newest event file, and how much of it
    counts: what is behind it was written by a process that was killed.
    """

    offset: int = 0
    epoch: int = 0
    step: int = 0
    file_number: int = 0
    size_bytes: int = 0


class WandbPosition(Record):
    """How far metrics are in finished segments: also inside each segment.

    `offset`: of the first line of `metrics.jsonl` that is not in a segment and may still get into
    one. `epoch`, `step`: of the newest row that was written. `kept_first`: rows that were trained
    again after they had been written; W&B has the first ones.
    """

    offset: int = 0
    epoch: int = 0
    step: int = 0
    kept_first: int = 0


def tracking_config(run: RunLayout) -> TrackingConfig | None:
    """What the run writes; None for a run without tracking."""
    return read_record(run.tracking_config, TrackingConfig)


def tensorboard_directory(run: RunLayout, config: TrackingConfig) -> Path | None:
    """Where this run's event files are; None if there are to be none."""
    return None if config.tensorboard is None else run.directory / config.tensorboard


def position_file(directory: Path) -> Path:
    """Where the position of event files, or of a segment, is kept."""
    return directory / "position.json"


def finished_segments(run: RunLayout) -> list[Path]:
    """The finished segments of the W&B run, oldest first."""
    return sorted(run.wandb.glob(_SEGMENTS))


def unsynced_segments(run: RunLayout) -> list[Path]:
    """The finished segments that `wandb sync` has not uploaded."""
    return [one for one in finished_segments(run) if not list(one.glob(f"*{_SYNCED}"))]


def tracking_commands(run: RunLayout) -> list[str]:
    """The commands that show what is written: of TensorBoard, and of W&B what is not uploaded."""
    config = tracking_config(run)
    if config is None:
        return []
    commands = []
    directory = tensorboard_directory(run, config)
    if directory is not None and directory.is_dir():
        commands.append(shlex.join(["tensorboard", "--logdir", str(directory)]))
    if config.wandb is not None and unsynced_segments(run):
        commands.append(shlex.join(["wandb", "sync", str(run.wandb)]))
    return commands
