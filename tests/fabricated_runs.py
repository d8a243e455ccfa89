"""Run directories as they look after submit, training, preemption or failure, made in no time.

The files are written by the same code as in a real run; only what they say is made up.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.durable import append_line, replace_text
from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.manifest import (
    MANIFEST_NAME,
    Manifest,
    checkpoint_name,
    digest_file,
)
from hpctrain.records.run_records import (
    DoneMarker,
    Progress,
    StepMetrics,
    append_metrics,
    write_record,
)
from hpctrain.records.supervise_config import SuperviseConfig
from tests.step_rows import trained_step

NOW = 1_800_000_000.0
TARGET_STEP = 60
Said = tuple[EventKind, dict[str, object]]


def said(kind: EventKind, **fields: object) -> Said:
    """One entry of a ledger."""
    return kind, fields


SUBMITTED = (
    said(EventKind.RENDERED, script_sha256="00"),
    said(EventKind.SUBMITTING),
    said(EventKind.SUBMITTED, job_id=1),
)
STARTED = said(EventKind.ATTEMPT_STARTED, job_id=1, restart_count=0, nodes="n[0-1]")
LAUNCHED = said(EventKind.LAUNCH_STARTED, job_id=1, restart_count=0, epoch=1, resume_step=0)


def ended(cause: str, reason: str, action: str, *, epoch: int = 1) -> tuple[Said, Said]:
    """The last words about a launch, and what was done about it."""
    return (
        said(
            EventKind.LAUNCH_ENDED,
            epoch=epoch,
            cause=cause,
            reason=reason,
            last_step=30,
            checkpoint_step=30,
        ),
        said(EventKind.ACTION, action=action, reason=f"because it was {cause}"),
    )


def fabricate(
    runs: Path,
    run_id: str = "gpt-tiny-7f3a",
    entries: Sequence[Said] = SUBMITTED,
    *,
    steps: int = 0,
    done: bool = False,
    last_loss: float | None = 2.5,
) -> RunFiles:
    """A run directory whose ledger holds `entries` and that has trained `steps` steps."""
    layout = RunLayout(runs / run_id)
    layout.create()
    config = SuperviseConfig(
        run_id=run_id,
        target_step=TARGET_STEP,
        continuation="requeue",
        failures_without_progress=3,
        stall_seconds=600.0,
        setup_stall_seconds=1800.0,
        kill_wait_seconds=5.0,
        verify="auto",
    )
    replace_text(layout.supervise_config, config.model_dump_json())
    replace_text(layout.script, "#!/bin/bash\n")
    for number, (kind, fields) in enumerate(entries):
        event = Event.model_validate({"event": kind, "time": NOW - 600 + number, **fields})
        append_line(layout.ledger, event.model_dump_json(exclude_defaults=True))
    for step in range(1, steps + 1):
        append_metrics(layout, _metrics(step, last_loss if step == steps else 3.0))
    if steps:
        write_record(layout.progress, _progress(steps))
    if done:
        marker = DoneMarker(step=TARGET_STEP, epoch=1, checkpoint="iter_0000060", time=NOW)
        write_record(layout.done, marker)
    # `status` shows the newest ledger last; a file system's clock may be too coarse for tests.
    os.utime(layout.ledger, (NOW, NOW + len(list(runs.iterdir()))))
    return RunFiles(layout)


def published(
    run: RunFiles, step: int, *, epoch: int = 1, time: float = NOW, size_kib: int = 1
) -> Path:
    """A good checkpoint of one file of `size_kib` KiB."""
    directory = run.layout.checkpoints / checkpoint_name(step)
    directory.mkdir()
    (directory / "shard.distcp").write_bytes(bytes([step % 256]) * 1024 * size_kib)
    manifest = Manifest(
        step=step,
        epoch=epoch,
        engine="megatron",
        layout="tp 1 · pp 2 · dp 1",
        world_size=2,
        consumed_samples=step * 8,
        time=time,
        files=(digest_file(directory, "shard.distcp"),),
    )
    replace_text(directory / MANIFEST_NAME, manifest.model_dump_json())
    return directory


def _metrics(step: int, loss: float | None) -> StepMetrics:
    figures = dict(step_seconds=2.0, tokens_per_second=512.0, memory_bytes=2**20)
    return trained_step(step, loss, time=NOW - 600 + step, **figures)


def _progress(step: int) -> Progress:
    return Progress(
        epoch=1,
        phase="training",
        step=step,
        target_step=TARGET_STEP,
        time=NOW - 12,
        step_seconds=2.0,
        loss=2.5,
        checkpoint_step=step // 10 * 10 or None,
    )
