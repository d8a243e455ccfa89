"""The base class of what commands answer and print as JSON.

Belongs here: how such a class is made. Does not belong here: any field; documents that people
write, in which an unknown key is an error (`hpctrain.spec.document`).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Values that nobody changes; a validator is made when it is first used."""

    model_config = ConfigDict(frozen=True, defer_build=True)
