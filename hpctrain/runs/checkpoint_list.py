"""Lists the checkpoints of a run: whether each is good, why it is kept, and how long it took.

It also reports the free space, and whether the save interval is a good one. Reads the run directory
only; nothing is moved or deleted. Belongs here: collecting this. Does not belong here: what a good
checkpoint is (`hpctrain.checkpoints`), the formula of the interval
(`hpctrain.plan.forecast.intervals`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from hpctrain.base import clock
from hpctrain.base.errors import CheckpointError
from hpctrain.checkpoints.discover import Checkpoint, Verified, verify_all
from hpctrain.checkpoints.discover import checkpoints as inspect_all
from hpctrain.checkpoints.publish import QUARANTINE_NAME
from hpctrain.engines.training import TrainConfig
from hpctrain.judge.launch_history import (
    loaded_instead,
    mean_time_to_failure,
    pending_rejections,
)
from hpctrain.plan.forecast.intervals import daly_seconds
from hpctrain.records.epochs import current_epoch
from hpctrain.records.evaluations import needed_steps
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event
from hpctrain.records.manifest import partial_epoch
from hpctrain.records.run_records import (
    SaveRecord,
    SkipList,
    read_record,
    read_saves,
    tail_metrics,
)
from hpctrain.records.supervise_config import known_supervise_config
from hpctrain.runs.evaluations import EvaluatedDocument, evaluation_rows
from hpctrain.runs.run_documents import known_train_config, known_trainer_settings
from hpctrain.telemetry.rates import median_known

# The first save of a launch is slower, and individual saves can be slowed by a busy file system.
_MEASURED_SAVES = 5
_RECENT_STEPS = 20
# The cost is flat near Daly's interval: twice or half of it costs a quarter more than the best.
_FAR = 2.0
# Retention renames a checkpoint before it deletes it; a crash may leave it.
_DISCARDED = ".discarded-"
_LEAST_STALL_SECONDS = 1e-3


class CheckpointRow(BaseModel):
    """One published checkpoint. `problem` None: good; `verified`: how it was checked."""

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


class FreeSpace(BaseModel):
    """Bytes that the user may still use (statvfs(3), f_bavail).

    `fits` is how many checkpoints of the newest one's size that is.
    """

    model_config = ConfigDict(frozen=True)

    free_bytes: int
    fits: int | None


class SaveInterval(BaseModel):
    """How often the run saves and how often it should, in seconds and optimizer steps.

    `configured` describes the spec's setting, `used_seconds` is the time between saves in the run,
    `best_seconds` is Daly's interval for the measured stall and time between failures.
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


class CheckpointReport(EvaluatedDocument):
    """The output of `hpctrain checkpoints`; checkpoints newest first."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    directory: str
    rows: tuple[CheckpointRow, ...]
    unfinished: tuple[Unfinished, ...]
    quarantined: tuple[Quarantined, ...]
    room: FreeSpace
    interval: SaveInterval | None

    @property
    def bad(self) -> tuple[CheckpointRow, ...]:
        return tuple(row for row in self.rows if row.problem is not None)


def report_checkpoints(
    run: RunFiles,
    *,
    verify: bool = False,
    workers: int = 4,
    progress: Callable[[Verified], None] | None = None,
    now: float | None = None,
) -> CheckpointReport:
    """Inspect the checkpoints of a run; `verify` reads every byte with `workers` threads.

    Raises CheckpointError when their directory does not exist.
    """
    now = clock.now() if now is None else now
    layout, root = run.layout, run.layout.checkpoints
    if not root.is_dir():
        raise CheckpointError(
            f"{root} is not there", hint="a file system that is not mounted, or somebody deleted it"
        )
    found = verify_all(root, "sha256", workers, progress) if verify else inspect_all(root)
    events = run.ledger.events()
    rejected = pending_rejections(events)  # the next launch will quarantine these
    found = [
        replace(one, problem=f"given up: {rejected[one.step]}")
        if one.good and one.step in rejected
        else one
        for one in found
    ]
    saves = read_saves(layout)
    measured = {save.step: save for save in saves}
    config = known_train_config(layout)
    settings = None if config is not None else known_trainer_settings(layout)
    kept = settings.trainer.checkpoint if settings is not None else None
    reasons = _retention_reasons(
        layout,
        found,
        events,
        keep=config.keep_checkpoints if config else kept.keep if kept else None,
        every=config.keep_every_steps if config else kept.keep_every_steps if kept else None,
    )
    evaluations = evaluation_rows(run)
    epochs = {one.step: one.manifest.epoch if one.manifest else None for one in found}
    needed = needed_steps(layout, epochs) if evaluations else set()
    for row in evaluations:
        if row.state not in ("done", "failed") and row.step in needed:
            reasons.get(row.step, []).append(f"evaluation {row.name} {row.state}")
    rows = []
    for one in found:
        manifest, save = one.manifest, measured.get(one.step)
        rows.append(
            CheckpointRow(
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
    file_system = os.statvfs(root)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    sizes = [one.manifest.total_bytes for one in found if one.good and one.manifest]
    return CheckpointReport(
        run_id=run.run_id,
        directory=str(root),
        rows=tuple(rows),
        unfinished=tuple(_unfinished(layout, now)),
        quarantined=tuple(_quarantined(root)),
        room=FreeSpace(
            free_bytes=free_bytes, fits=free_bytes // sizes[0] if sizes and sizes[0] else None
        ),
        interval=None if config is None else _interval(run, config, saves),
        evaluations=evaluations,
    )


def _retention_reasons(
    layout: RunLayout,
    found: Sequence[Checkpoint],
    events: Sequence[Event],
    *,
    keep: int | None,
    every: int | None,
) -> dict[int, list[str]]:
    """List why `hpctrain.checkpoints.publish.Retention` keeps each checkpoint.

    So many newest ones, and each step that is a multiple; unless `keep` is known, all are kept.
    """
    good = [one.step for one in found if one.good]
    reasons: dict[int, list[str]] = {one.step: [] for one in found}
    keep = len(good) if keep is None else keep
    for step in good[:keep]:
        reasons[step].append("newest" if step == good[0] else f"newest {keep}")
    for step in good:
        if every and step % every == 0:
            reasons[step].append(f"every {every:,} steps")
    loaded = loaded_instead(events)
    if loaded in good:
        reasons[loaded].append("loads, where a newer one was given up")
    # The newest checkpoint before each skipped window of samples allows a return.
    before = set()
    for skip in (read_record(layout.skips, SkipList) or SkipList()).skips:
        earlier = [
            one.step
            for one in found
            if one.manifest and (one.manifest.consumed_samples or 0) <= skip.from_samples
        ]
        before.update(earlier[:1])
    for step in before:
        reasons[step].append("before data left out")
    for step in good:
        if not reasons[step]:
            reasons[step].append("until the next save")
    return reasons


def _unfinished(layout: RunLayout, now: float) -> list[Unfinished]:
    owner, found = current_epoch(layout.epochs), []
    for path in _entries(layout.checkpoints):
        epoch = partial_epoch(path.name.removeprefix(_DISCARDED))
        if epoch is None:
            continue
        try:
            changed_time = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
        except OSError:
            changed_time = 0.0
        found.append(
            Unfinished(
                name=path.name,
                epoch=epoch,
                size_bytes=_size_bytes(path),
                changed_seconds_ago=max(0.0, now - changed_time),
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
    """Add up the sizes of all files; files that vanish meanwhile are ignored."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _interval(run: RunFiles, config: TrainConfig, saves: Sequence[SaveRecord]) -> SaveInterval:
    """Compare the save interval of a run with Daly's for its measured costs and failures."""
    recent = saves[-_MEASURED_SAVES:]
    stall = median_known(save.stall_seconds for save in recent)
    publish = median_known(save.publish_seconds for save in recent)
    rows = tail_metrics(run.layout, _RECENT_STEPS)
    step_seconds = median_known(row.step_seconds for row in rows)
    supervise = known_supervise_config(run.layout.supervise_config)
    prior_seconds = supervise.mttf_seconds if supervise else None
    mttf = mean_time_to_failure(run.ledger.events(), prior_seconds)
    best = None
    if stall is not None and publish is not None and mttf:
        best = max(daly_seconds(max(stall, _LEAST_STALL_SECONDS), mttf), publish)
    # A save starts at the step or the time that comes first.
    configured, used_seconds = [], []
    if config.save_interval_steps is not None:
        configured.append(f"every {config.save_interval_steps:,} steps")
        if step_seconds:
            used_seconds.append(config.save_interval_steps * step_seconds)
    timed = best if config.save_interval_auto and best else config.save_interval_seconds
    if timed is not None:
        used_seconds.append(timed)
    if config.save_interval_auto:
        configured.append("by measured cost and failures (auto)")
    elif config.save_interval_seconds is not None:
        configured.append(f"every {config.save_interval_seconds:,.0f} s")
    used = min(used_seconds, default=None)
    if best is None:
        advice = "nothing has been measured yet"
    elif used is None:
        advice = "the run saves at its end only: set `checkpoint.every: auto`"
    elif used > _FAR * best:
        advice = "saves are rare: more work is lost at a failure than saving costs"
    elif used * _FAR < best:
        advice = "saves are frequent: they cost more than failures would"
    else:
        advice = f"the interval is good{' (auto)' if config.save_interval_auto else ''}"
    return SaveInterval(
        configured=", ".join(configured) or "only at the end",
        used_seconds=used,
        stall_seconds=stall,
        publish_seconds=publish,
        mttf_seconds=mttf,
        best_seconds=best,
        best_steps=max(1, round(best / step_seconds)) if best and step_seconds else None,
        advice=advice,
    )
