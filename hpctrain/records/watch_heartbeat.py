"""The last complete pass of `hpctrain watch` over a directory of runs: its place and its record.

Belongs here: them. Does not belong here: making a pass (`hpctrain.runs.watch`).
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.records.requests import user_name

WATCH_DIRECTORY = ".watch"


class WatchHeartbeat(BaseModel):
    """Proof of a complete pass; `pass_time` in seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    pass_time: float
    host: str
    act: bool
    runs: int
    open_runs: int
    sightings: int


def watch_directory(runs: Path) -> Path:
    """Return the directory of lock and heartbeat; in a shared `runs` each user has one.

    A pass only checks the runs of its own user.
    """
    common = runs / WATCH_DIRECTORY
    try:
        foreign = common.stat().st_uid != os.getuid()
    except OSError:
        foreign = False
    return runs / f"{WATCH_DIRECTORY}-{user_name()}" if foreign else common


def heartbeat_path(runs: Path) -> Path:
    return watch_directory(runs) / "heartbeat.json"


def heartbeat_age_seconds(path: Path) -> float | None:
    """Return the age of the last complete pass; None without a readable heartbeat."""
    try:
        beat = WatchHeartbeat.model_validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return clock.now() - beat.pass_time
