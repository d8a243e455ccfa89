"""The text of a whole `train.json` or `plan.json`, as `submit` writes it, with fields changed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from planned_job import planned_job

from hpctrain.engines.train_json import train_config
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt-tiny.yaml"


def train_json(engine: str = "megatron", **changes: Any) -> str:
    """The document of the smallest example for this engine; it need not be one that can train."""
    return json.dumps({**_document(engine), **changes})


def plan_json(**changes: Any) -> str:
    """The plan of the smallest example."""
    document = json.loads(_job("megatron").plan.model_dump_json())
    return json.dumps({**document, **changes})


@cache
def _document(engine: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(train_config(_job(engine)).model_dump_json())
    return document


@cache
def _job(engine: str) -> TrainingJob:
    layout = ["parallel.tp=2", "parallel.pp=2"] if engine == "megatron" else ["parallel=auto"]
    spec = load_run_spec(_EXAMPLE, [f"engine.name={engine}", *layout]).document
    return planned_job(spec, load_profile(find_profile("sandbox")).document)
