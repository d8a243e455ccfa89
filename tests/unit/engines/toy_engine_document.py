"""The train.json of the toy engine, and what it does not train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from hpctrain.engines.training import TrainConfig, shared_config
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.run import RunSpec


class ToyConfig(TrainConfig):
    """A linear model with this many inputs."""

    engine: Literal["toy"] = "toy"
    inputs: int


def toy_config(job: TrainingJob) -> ToyConfig:
    """Fill the document from a plan."""
    return ToyConfig(**dict(shared_config(job)), inputs=job.spec.model.hidden)


def untrainable(spec: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield what a line cannot be."""
    if spec.model.layers > 1:
        yield "model.layers", "a line has one layer"
