"""The settings of the programs in the jobs of a service, written before these are submitted.

Belongs here: `replica.json`, `router.json` and their reader. Does not belong here: where the
values come from (`hpctrain.serve.service_job`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.formats import refuse_newer
from hpctrain.serve.engines.contract import EngineStart
from hpctrain.spec.document import Document
from hpctrain.spec.service import ServingEngineName

Settings = TypeVar("Settings", bound=BaseModel)


class ReplicaConfig(Document):
    """What one replica runs and how it lives; durations in seconds.

    `start` is what the engine is started with, on the first node: address and port are chosen
    there. `service`: the service directory, `name`: the replica's name in it. `url_host`: the name
    by which others reach the node, None: Slurm's. `ports`: the first and the last that the engine
    may take, None: any. `stage_directory`: where the weights are copied to on each node, None: they
    are read where they are; it may contain variables of the job such as `$TMPDIR`.

    `load_limit_seconds`: how long the engine may take to answer. `lease_seconds`: how long an
    endpoint counts that is not renewed. `notice_seconds`: how long the router may take to stop
    asking, `drain_seconds`: how long requests that have begun may take then. `term_seconds`: how
    long Slurm waits between its own SIGTERM and the end. Health is looked at every
    `health_seconds`, for at most `health_timeout_seconds`, and an idle engine computes a token
    every `canary_seconds`.
    """

    service: str
    name: str
    engine: ServingEngineName
    start: EngineStart
    nodes: int = 1
    url_host: str | None = None
    ports: tuple[int, int] | None = None
    stage_directory: str | None = None
    load_limit_seconds: float
    lease_seconds: float = 15.0
    notice_seconds: float
    drain_seconds: float
    term_seconds: float
    health_seconds: float = 2.0
    health_timeout_seconds: float = 5.0
    canary_seconds: float = 60.0


class RouterJobSettings(Document):
    """The settings of one job of the router (`router.json`), besides those of its service.

    `service`: the service directory. Slurm waits `term_seconds` between SIGTERM and the end.
    """

    service: str
    term_seconds: float


def read_program_settings(path: Path, kind: type[Settings]) -> Settings:
    """Read the settings of a program. Raises OSError, InvalidInputError if it is no such file."""
    text = path.read_bytes()
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        refuse_newer(path, text, kind)
        problem = Problem(f"cannot be read: not a {path.name}: {error}", str(path))
        raise InvalidInputError([problem]) from error
