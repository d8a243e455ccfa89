"""Collect what a run writes for TensorBoard and W&B (`tracking.json`) from spec and plan.

Belongs here: which field becomes which setting, ids, and what W&B shows about a run. Does not
belong here: the document (`hpctrain.records.tracking`), writing the curves (`hpctrain.tracking`).
"""

from __future__ import annotations

import hashlib
import os

from pydantic import JsonValue

from hpctrain.plan.job import TrainingJob
from hpctrain.records.layout import RunLayout
from hpctrain.records.tracking import MOST_ID_CHARACTERS, TrackingConfig, WandbSettings
from hpctrain.version import __version__

_DIGEST_CHARACTERS = 8


def tracking_settings(run: RunLayout, job: TrainingJob) -> TrackingConfig | None:
    """Collect the settings of a run; None if nothing is to be written."""
    tracking, wandb = job.spec.tracking, job.spec.tracking.wandb
    if not tracking.wanted:
        return None
    directory = None
    if tracking.tensorboard:
        directory = str(run.tensorboard.relative_to(run.directory))
    if isinstance(tracking.tensorboard, str):
        directory = os.path.join(os.path.abspath(tracking.tensorboard), run.run_id)
    settings = None
    if wandb is not None:
        named = {"run_id": wandb_id(run), "name": wandb.name or run.run_id}
        settings = WandbSettings.model_validate(wandb.model_dump() | named)
    return TrackingConfig(tensorboard=directory, wandb=settings, description=_description(run, job))


def wandb_id(run: RunLayout) -> str:
    """Derive W&B's id from the run's. Runs of other directories may have the same run id."""
    digest = hashlib.sha256(str(run.directory.resolve()).encode()).hexdigest()
    ending = f"-{digest[:_DIGEST_CHARACTERS]}"
    return run.run_id[: MOST_ID_CHARACTERS - len(ending)] + ending


def _description(run: RunLayout, job: TrainingJob) -> dict[str, JsonValue]:
    """What is worth comparing between runs; no path, no variable, nothing about a machine."""
    spec, plan = job.spec, job.plan
    model = spec.model.model_dump(mode="json", exclude_defaults=True, exclude={"pretrained"})
    return {
        "run_id": run.run_id,
        "hpctrain": __version__,
        "engine": plan.engine,
        "precision": plan.precision,
        "layout": str(plan.layout),
        "nodes": plan.nodes.nodes,
        "gpus": plan.layout.world_size,
        "train_steps": plan.batch.train_steps,
        "global_batch": spec.batch.global_,
        "micro_batch": plan.batch.micro_batch,
        "seed": spec.seed,
        "model": model,
        "optimizer": spec.optimizer.model_dump(mode="json"),
        "schedule": spec.schedule.model_dump(mode="json"),
    }
