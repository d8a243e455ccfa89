"""The checkpoints of a run: which there are, whether they are good, why they are kept, whether
there is room for more, and whether the interval between them is a good one.

Reads the run directory only; nothing is moved or deleted. Belongs here: putting that together.
Does not belong here: what a good checkpoint is (`hpctrain.checkpoints`), the formula of the
interval (`hpctrain.plan.forecast.intervals`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.actions.run_documents import known_train_config
from hpctrain.actions.runs import RunFiles
from hpctrain.checkpoints.discover import Checkpoint
from hpctrain.checkpoints.discover import checkpoints as inspect_all
from hpctrain.checkpoints.manifest import partial_epoch
from hpctrain.checkpoints.publish import QUARANTINE_NAME
from hpctrain.checkpoints.verify import Verified, verify_all
from hpctrain.engines.training import TrainConfig
from hpctrain.errors import CheckpointError
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.store.epochs import current_epoch
from hpctrain.store.layout import RunLayout
from hpctrain.store.ledger import Event
from hpctrain.store.run_records import (
    SaveRecord,
    SkipList,
    read_record,
    read_saves,
    tail_metrics,
)
from hpctrain.store.supervise_config import known_supervise_config
from hpctrain.supervise.judge.launch_history import (
    loaded_instead,
    mean_time_to_failure,
    pending_rejections,
)

# The first save of a launch is slower, and single ones meet a busy file system.
_MEASURED_SAVES = 5
_RECENT_STEPS = 20
# Daly's interval is flat at its minimum: twice or half of it costs a quarter more than the best.
_FAR = 2.0
# What is deleted first has been renamed by retention; a crash may leave it.
_DISCARDED = ".discarded-"
_LEAST_STALL_SECONDS = 1e-3


class Row(BaseModel):
    """One published checkpoint. `problem` None: good; `verified` says how that is known."""

    model_config = ConfigDict(frozen=True)

    step: int
    epoch: int | None
    age_seconds: float | None
    size_bytes: int | None
    files: int | None
    layout: str | None
    verified: str
    problem: str | None
    kept_because: tuple[str, ...]
    stall_seconds: float | None = None
    publish_seconds: float | None = None


class Unfinished(BaseModel):
    """A checkpoint that does not count: being written, or left by an older launch (`stale`)."""

    model_config = ConfigDict(frozen=True)

    name: str
    epoch: int
    size_bytes: int
    changed_seconds_ago: float
    stale: bool


class Quarantined(BaseModel):
    """A checkpoint that was moved out of the way, and why."""

    model_config = ConfigDict(frozen=True)

    name: str
    reason: str
    size_bytes: int


class Room(BaseModel):
    """The file system: bytes that the user may still use (statvfs(3), f_bavail), and how many
    checkpoints of the newest one's size that is."""

    model_config = ConfigDict(frozen=True)

    free_bytes: int
    fits: int | None


class Interval(BaseModel):
    """How often the run saves and how often it should, in seconds and optimizer steps.

    `configured` is the spec's own setting in words, `used_seconds` what saves are apart in the
    run, `best_seconds` Daly's interval for the measured stall and the time between failures.
    """

    model_config = ConfigDict(frozen=True)

    configured: str
    used_seconds: float | None
    stall_seconds: float | None
    publish_seconds: float | None
    mttf_seconds: float | None
    best_seconds: float | None
    best_steps: int | None
    advice: str


class Shelf(BaseModel):
    """Everything that `hpctrain checkpoints` tells; checkpoints newest first."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    directory: str
    rows: tuple[Row, ...]
    unfinished: tuple[Unfinished, ...]
    quarantined: tuple[Quarantined, ...]
    room: Room
    interval: Interval | None

    @property
    def bad(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.problem is not None)


def shelf(
    run: RunFiles,
    *,
    verify: bool = False,
    workers: int = 4,
    progress: Callable[[Verified], None] | None = None,
    now: float | None = None,
) -> Shelf:
    """Look at the checkpoints of a run; `verify` reads every byte with `workers` threads.

    Raises CheckpointError when their directory is not there.
    """
    now = time.time() if now is None else now
    root = run.layout.checkpoints
    if not root.is_dir():
        raise CheckpointError(
            f"{root} is not there", hint="a file system that is not mounted, or somebody deleted it"
        )
    found = verify_all(root, "sha256", workers, progress) if verify else inspect_all(root)
    events = run.ledger.events()
    found = _with_rejections(found, pending_rejections(events))
    saves = read_saves(run.layout)
    config = known_train_config(run.layout)
    return Shelf(
        run_id=run.run_id,
        directory=str(root),
        rows=tuple(_rows(found, saves, _reasons(run.layout, found, config, events), now)),
        unfinished=tuple(_unfinished(run.layout, now)),
        quarantined=tuple(_quarantined(root)),
        room=_room(root, found),
        interval=None if config is None else _interval(run, config, saves),
    )


# -- what there is -----------------------------------------------------------------------------


def _rows(
    found: Sequence[Checkpoint],
    saves: Sequence[SaveRecord],
    reasons: dict[int, list[str]],
    now: float,
) -> list[Row]:
    measured = {save.step: save for save in saves}
    rows = []
    for one in found:
        manifest, save = one.manifest, measured.get(one.step)
        rows.append(
            Row(
                step=one.step,
                epoch=manifest.epoch if manifest else None,
                age_seconds=max(0.0, now - manifest.time) if manifest else None,
                size_bytes=manifest.total_bytes if manifest else None,
                files=len(manifest.files) if manifest else None,
                layout=manifest.layout if manifest else None,
                verified="sha256" if one.deep else "size",
                problem=one.problem,
                kept_because=tuple(reasons.get(one.step, ())),
                stall_seconds=save.stall_seconds if save else None,
                publish_seconds=save.publish_seconds if save else None,
            )
        )
    return rows


def _with_rejections(
    found: Sequence[Checkpoint], rejections: Mapping[int, str]
) -> list[Checkpoint]:
    """With what the supervisor has given up, and the next launch will put aside."""
    return [
        replace(one, problem=f"given up: {rejections[one.step]}")
        if one.good and one.step in rejections
        else one
        for one in found
    ]


def _reasons(
    layout: RunLayout,
    found: Sequence[Checkpoint],
    config: TrainConfig | None,
    events: Sequence[Event],
) -> dict[int, list[str]]:
    """Why retention leaves each one, as `hpctrain.checkpoints.publish.retire` is told; without
    the trainer's file nothing is known to go."""
    good = [one.step for one in found if one.good]
    reasons: dict[int, list[str]] = {one.step: [] for one in found}
    keep = config.keep_checkpoints if config else len(good)
    every = config.keep_every_steps if config else None
    for step in good[:keep]:
        reasons[step].append("newest" if step == good[0] else f"newest {keep}")
    for step in good:
        if every and step % every == 0:
            reasons[step].append(f"every {every:,} steps")
    loaded = loaded_instead(events)
    if loaded in good:
        reasons[loaded].append("loads, where a newer one was given up")
    for step in _before_skipped(layout, found):
        reasons[step].append("before data left out")
    for step in good:
        if not reasons[step]:
            reasons[step].append("until the next save")
    return reasons


def _before_skipped(layout: RunLayout, found: Sequence[Checkpoint]) -> set[int]:
    """The last one before each window of samples that is left out: the way back."""
    skips = read_record(layout.skips, SkipList) or SkipList()
    before = set()
    for skip in skips.skips:
        earlier = [
            one.step
            for one in found
            if one.manifest and one.manifest.consumed_samples <= skip.from_samples
        ]
        before.update(earlier[:1])
    return before


def _unfinished(layout: RunLayout, now: float) -> list[Unfinished]:
    owner, found = current_epoch(layout.epochs), []
    for path in _entries(layout.checkpoints):
        name = path.name.removeprefix(_DISCARDED)
        epoch = partial_epoch(name)
        if epoch is not None:
            found.append(
                Unfinished(
                    name=path.name,
                    epoch=epoch,
                    size_bytes=_size_bytes(path),
                    changed_seconds_ago=max(0.0, now - _changed_at(path)),
                    stale=epoch != owner or path.name.startswith(_DISCARDED),
                )
            )
    return found


def _quarantined(root: Path) -> list[Quarantined]:
    found = []
    for path in _entries(root / QUARANTINE_NAME):
        if not path.is_dir():
            continue
        try:
            reason = path.with_name(f"{path.name}.reason").read_text(errors="replace").strip()
        except OSError:
            reason = "no reason was written down"
        found.append(Quarantined(name=path.name, reason=reason, size_bytes=_size_bytes(path)))
    return found


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []


def _size_bytes(directory: Path) -> int:
    """Of all files; those that vanish meanwhile count nothing."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _changed_at(directory: Path) -> float:
    try:
        return max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
    except OSError:
        return 0.0


def _room(root: Path, found: Sequence[Checkpoint]) -> Room:
    state = os.statvfs(root)
    free_bytes = state.f_bavail * state.f_frsize
    sizes = [one.manifest.total_bytes for one in found if one.good and one.manifest]
    return Room(free_bytes=free_bytes, fits=free_bytes // sizes[0] if sizes and sizes[0] else None)


# -- how often ---------------------------------------------------------------------------------


def _interval(run: RunFiles, config: TrainConfig, saves: Sequence[SaveRecord]) -> Interval:
    recent = saves[-_MEASURED_SAVES:]
    stall = statistics.median(save.stall_seconds for save in recent) if recent else None
    publish = statistics.median(save.publish_seconds for save in recent) if recent else None
    step_seconds = _step_seconds(run.layout)
    mttf = mean_time_to_failure(run.ledger.events(), _prior_seconds(run.layout))
    best = None
    if stall is not None and publish is not None and mttf:
        best = max(daly_seconds(max(stall, _LEAST_STALL_SECONDS), mttf), publish)
    used = _used_seconds(config, step_seconds, best)
    return Interval(
        configured=_configured(config),
        used_seconds=used,
        stall_seconds=stall,
        publish_seconds=publish,
        mttf_seconds=mttf,
        best_seconds=best,
        best_steps=max(1, round(best / step_seconds)) if best and step_seconds else None,
        advice=_advice(config, used, best),
    )


def _configured(config: TrainConfig) -> str:
    parts = []
    if config.save_interval_steps is not None:
        parts.append(f"every {config.save_interval_steps:,} steps")
    if config.save_interval_auto:
        parts.append("by measured cost and failures (auto)")
    elif config.save_interval_seconds is not None:
        parts.append(f"every {config.save_interval_seconds:,.0f} s")
    return ", ".join(parts) or "only at the end"


def _used_seconds(
    config: TrainConfig, step_seconds: float | None, best: float | None
) -> float | None:
    """Seconds of work between saves: whichever of steps and clock comes first."""
    choices = []
    if config.save_interval_steps is not None and step_seconds:
        choices.append(config.save_interval_steps * step_seconds)
    clock = best if config.save_interval_auto and best else config.save_interval_seconds
    if clock is not None:
        choices.append(clock)
    return min(choices, default=None)


def _advice(config: TrainConfig, used: float | None, best: float | None) -> str:
    if best is None:
        return "nothing has been measured yet"
    if used is None:
        return "the run saves at its end only: set `checkpoint.every: auto`"
    if used > _FAR * best:
        return "saves are rare: more work is lost at a failure than saving costs"
    if used * _FAR < best:
        return "saves are frequent: they cost more than failures would"
    automatic = " (auto)" if config.save_interval_auto else ""
    return f"the interval is good{automatic}"


def _step_seconds(layout: RunLayout) -> float | None:
    rows = tail_metrics(layout, _RECENT_STEPS)
    return statistics.median(row.step_seconds for row in rows) if rows else None


def _prior_seconds(layout: RunLayout) -> float | None:
    config = known_supervise_config(layout.supervise_config)
    return config.mttf_seconds if config else None
