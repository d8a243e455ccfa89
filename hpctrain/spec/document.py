"""The base class of all documents.

A module of its own, because `status` needs it on a login node, where building the classes of a run
spec would take longer than the rest of `status`. Does not belong here: any field.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """Base of all parts of a spec or a profile: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)
