"""Write the metrics of a run for TensorBoard or W&B, or as CSV.

The first two by the same program that follows a run in its job (`hpctrain.tracking`), from where it
ended. Belongs here: starting it, settings that a run was submitted without, CSV. Does not belong
here: writing event files and segments.
"""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.base.module_subprocess import ModuleProgram, run_module
from hpctrain.job.supervisor_settings import wandb_id
from hpctrain.records.find import RunFiles
from hpctrain.records.run_records import StepMetrics, lineage, read_metrics, write_record
from hpctrain.records.tracking import (
    TrackingConfig,
    WandbSettings,
    tensorboard_directory,
    tracking_config,
    unsynced_segments,
)

_TIMEOUT_SECONDS = 86400.0
_COLUMNS = tuple(name for name in StepMetrics.model_fields if name != "schema_version")


def export_tensorboard(
    run: RunFiles, directory: Path | None = None, *, python: str = sys.executable
) -> Path:
    """Write event files below `directory`, where each run has its own; return that one.

    Without `directory` those that the run's jobs write. Rows that are written already are not
    written again. Raises HpctrainError.
    """
    layout = run.layout
    if directory is not None:
        target = directory.absolute() / run.run_id
    else:
        config = tracking_config(layout) or TrackingConfig()
        target = tensorboard_directory(layout, config) or layout.tensorboard
        if config.tensorboard is None:
            own = {"tensorboard": str(target.relative_to(layout.directory))}
            write_record(layout.tracking_config, config.model_copy(update=own))
    _run(run, python, "tensorboard", "--tensorboard", str(target))
    return target


def export_wandb(
    run: RunFiles,
    *,
    project: str | None = None,
    entity: str | None = None,
    python: str = sys.executable,
) -> int:
    """Write what is missing of the W&B run; return how many segments can be uploaded.

    `project` and `entity` are for a run that was submitted without W&B, and are kept. Raises
    UsageError where the run has no project or another one, HpctrainError.
    """
    layout = run.layout
    config = tracking_config(layout) or TrackingConfig()
    known = config.wandb
    if known is None:
        if project is None:
            raise UsageError(
                f"run `{run.run_id}` was submitted without W&B", hint="give `--project NAME`"
            )
        known = WandbSettings(
            run_id=wandb_id(layout), project=project, entity=entity, name=run.run_id
        )
        write_record(layout.tracking_config, config.model_copy(update={"wandb": known}))
    elif project not in (None, known.project) or entity not in (None, known.entity):
        raise UsageError(
            f"run `{run.run_id}` belongs to project {known.project} of W&B",
            hint="`wandb sync --project NAME --entity NAME` uploads it into another one",
        )
    _run(run, python, "wandb", "--wandb")
    return len(unsynced_segments(layout))


def csv_text(run: RunFiles) -> str:
    """Write the rows of the steps that count, one per step, with a heading."""
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in lineage(read_metrics(run.layout)):
        writer.writerow(row.model_dump(include=set(_COLUMNS)))
    return text.getvalue()


def _run(run: RunFiles, python: str, extra: str, *arguments: str) -> None:
    program = ModuleProgram("hpctrain.tracking", "export", extra, python)
    ended = run_module(
        program,
        *("--run-directory", str(run.layout.directory.absolute())),
        *arguments,
        timeout_seconds=_TIMEOUT_SECONDS,
    )
    if ended.returncode:
        hint = None
        if ended.last_line.endswith("is not installed"):
            hint = f"pip install 'hpctrain[{extra}]'"
        raise HpctrainError(f"{ended.last_line} ({python})" if hint else ended.last_line, hint=hint)
