"""What one job of the router is told besides the service's own settings (`router.json`).

Belongs here: the document and its reader. Does not belong here: where its values come from
(`hpctrain.serve.start_router`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.formats import refuse_newer


class RouterJobSettings(BaseModel):
    """`service`: the service directory. Slurm waits `term_seconds` between SIGTERM and the end."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    service: str
    term_seconds: float


def read_router_job_settings(path: Path) -> RouterJobSettings:
    """Read the settings. Raises OSError, InvalidInputError when it is no such file."""
    text = path.read_bytes()
    try:
        return RouterJobSettings.model_validate_json(text)
    except ValidationError as error:
        refuse_newer(path, text, RouterJobSettings)
        problem = Problem(f"cannot be read: not a {path.name}: {error}", str(path))
        raise InvalidInputError([problem]) from error
