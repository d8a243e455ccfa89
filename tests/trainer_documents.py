"""The text of a whole `train.json`, as `submit` writes it, with some of its fields changed."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain.engines.documents import train_config
from hpctrain.plan.planner import make_plan
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt-tiny.yaml"


def train_json(engine: str = "megatron", **changes: Any) -> str:
    """The document of the smallest example for this engine; it need not be one that can train."""
    return json.dumps({**_document(engine), **changes})


@cache
def _document(engine: str) -> dict[str, Any]:
    layout = ["parallel.tp=2", "parallel.pp=2"] if engine == "megatron" else ["parallel=auto"]
    spec = load_run_spec(_EXAMPLE, [f"engine.name={engine}", *layout]).document
    site = load_profile(find_profile("sandbox")).document
    config = train_config(spec, make_plan(spec, site), None)
    document: dict[str, Any] = json.loads(config.model_dump_json())
    return document
