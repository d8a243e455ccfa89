"""The settings of a service's router and controller (`service.json`), made from spec and plan.

Belongs here: the document and its reader. Does not belong here: what follows from the settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.errors import InvalidInputError, Problem, StorageError
from hpctrain.base.formats import refuse_newer


class _Settings(BaseModel):
    """Unlike in records, an unknown field is an error: nobody would act on it."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class RouterSettings(_Settings):
    """The router itself; paths are absolute. See `spec.service.RouterSpec`.

    `program` and `python` say where it is looked for; `ports`: the first and the last that it may
    take, None: any. `processes`: the threads of HAProxy.
    """

    name: Literal["vllm-router", "haproxy"]
    program: str | None = None
    python: str | None = None
    policy: Literal["least_loaded", "round_robin", "cache_aware"]
    place: Literal["job", "login"]
    port: int | None = None
    ports: tuple[int, int] | None = None
    address: str | None = None
    certificate: str | None = None
    key: str | None = None
    token_file: str | None = None
    rate_limit: float | None = None
    retries: int = 2
    processes: int = 1


class ScalingSettings(_Settings):
    """How many replicas; see `spec.service.ReplicasSpec` and the plan.

    `count` is for the busiest hour and contains `spare`; `capacity_rate` are requests per second of
    one replica within the objectives. `hours`: minute of the day in `time_zone`, and the share of
    the busiest hour's rate from then on, in order. `idle_seconds`: None where the last replica
    stays. `most_jobs`: how many jobs of replicas there may be at a time; None: no limit.
    """

    count: int
    spare: int
    least: int
    most: int
    capacity_rate: float
    hours: tuple[tuple[int, float], ...] = ()
    time_zone: str = "UTC"
    react: bool = False
    idle_seconds: float | None = None
    most_jobs: int | None = None


class ServiceSettings(_Settings):
    """Written when the service is started; durations in seconds.

    `load_seconds` is the plan's word until a replica has been measured. Slurm is not asked more
    often than every `poll_seconds`.
    """

    schema_version: Literal[1] = 1
    service_id: str
    engine: str
    router: RouterSettings
    scaling: ScalingSettings
    load_seconds: float
    drain_seconds: float
    poll_seconds: float = 10.0


def read_service_settings(path: Path) -> ServiceSettings:
    """Read the settings of a service.

    Raises StorageError when the file cannot be read, NewerFormatError when a newer hpctrain has
    written it, InvalidInputError when it is no such file.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return ServiceSettings.model_validate_json(text)
    except ValidationError as error:
        refuse_newer(path, text, ServiceSettings)
        problem = Problem("cannot be read: not a service.json", str(path))
        raise InvalidInputError([problem]) from error
