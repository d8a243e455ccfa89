"""What W&B's server would get from the files of segments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.tracking.wandb_run import log_records


def records(segment: Path) -> Iterator[Any]:
    """The records of the one file in the directory of a segment."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = segment.glob("*.wandb")
    for data in log_records(file):
        record = Record()
        record.ParseFromString(data)
        yield record


def history(segment: Path) -> list[dict[str, Any]]:
    """What was logged, in order; each with W&B's own `_step`."""
    rows = []
    for record in records(segment):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            items["_step"] = record.history.step.num
            rows.append(items)
    return rows


def run_records(segment: Path) -> list[Any]:
    """What the segment says about its run."""
    return [one.run for one in records(segment) if one.WhichOneof("record_type") == "run"]
