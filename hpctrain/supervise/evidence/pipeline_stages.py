"""Read from `train.json` which pipeline stage each rank computes.

Belongs here: this reading. Does not belong here: comparing ranks (`judge.stragglers`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpctrain.supervise.judge.stragglers import StageOf, one_stage

_DEFAULT_ORDER = "tp-cp-ep-dp-pp"


def read_stages(train_config: Path) -> StageOf:
    """The pipeline stage of each rank, from the trainer's file; all ranks are peers if it does
    not say.

    Ranks count tp first, then cp, then by the order of the layout dp and pp or pp and dp
    (megatron-core: parallel_state.py, RankGenerator).
    """
    try:
        config = json.loads(train_config.read_bytes())
        stages, inner = _sizes(config)
        if str(config.get("parallel_order", _DEFAULT_ORDER)).endswith("-dp-pp"):
            inner *= int(config["data_parallel_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return one_stage
    return lambda rank: rank // inner % stages if inner > 0 and stages > 0 else 0


def _sizes(config: dict[str, Any]) -> tuple[int, int]:
    """(stages, neighbouring ranks with the same samples), by the words of either engine."""
    if "pipeline_stages" in config:
        return max(1, len(config["pipeline_stages"])), int(config.get("tensor_parallel", 1))
    inner = int(config["tensor_model_parallel_size"]) * int(config["context_parallel_size"])
    return int(config["pipeline_model_parallel_size"]), inner
