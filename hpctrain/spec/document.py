"""The base of all documents.

On its own, because `status` needs it on a login node, and making the classes of a whole run spec
takes pydantic longer than everything else that `status` does. Does not belong here: any field.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """Base of all parts of a spec or a profile: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, defer_build=True)
