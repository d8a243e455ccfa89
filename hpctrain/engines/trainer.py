"""The document of the agent that runs a trainer of somebody's own: its `train.json`.

Belongs here: the document, filling it from a spec, reading it. Does not belong here: `train.json`
of hpctrain's engines (see `train_json`), what the agent does (`hpctrain.trainer.agent`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpctrain.base.formats import parse_document
from hpctrain.spec.document import Document
from hpctrain.spec.trainer import TrainerSpec

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainerJob


class TrainerSettings(Document):
    """What the agent runs and how it looks after it.

    `directory`: absolute, where the command runs. `gpus_per_node`: ranks that a node has. `logs`:
    each rank writes a log of its own, or those of a node share one.
    """

    schema_version: Literal[1] = 1
    engine: Literal["trainer"] = "trainer"
    run_name: str
    trainer: TrainerSpec
    directory: str
    gpus_per_node: int
    accelerator: Literal["cuda", "cpu"]
    logs: Literal["rank", "node"] = "rank"


def trainer_settings(
    job: TrainerJob, directory: Path, logs: Literal["rank", "node"]
) -> TrainerSettings:
    """Fill the document. `directory`: that of the spec, in which `trainer.directory` begins."""
    return TrainerSettings(
        run_name=job.spec.name,
        trainer=job.spec.trainer,
        directory=str(Path(directory, job.spec.trainer.directory).resolve()),
        gpus_per_node=job.plan.nodes.gpus_per_node,
        accelerator=job.plan.accelerator,
        logs=logs,
    )


def is_trainer(text: bytes) -> bool:
    """Tell from the text of a `train.json` whether it is of a run with a trainer of its own."""
    try:
        fields = json.loads(text)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("engine") == "trainer"


def trainer_settings_of(path: Path, text: bytes) -> TrainerSettings:
    """Parse `text`, the content of `path`. Raises InvalidInputError if it is no such document."""
    return parse_document(path, text, TrainerSettings, TrainerSettings.model_validate_json)
