"""The task of a run, and its low-rank adapters (LoRA).

Belongs here: the fields of `task` and `tuning`. Does not belong here: the shape of the model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.spec.document import Document

Task = Literal["language_modeling", "masked_language_modeling", "classification"]


class LoraSpec(Document):
    """Low-rank adaptation: frozen weights and a product of two thin matrices beside them.

    Hu et al. 2021 (arXiv 2106.09685).
    """

    rank: int = Field(16, ge=1, description="Inner size of the two thin matrices (r)")
    alpha: float = Field(32.0, gt=0, description="Their product is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout before the thin matrices")
    targets: tuple[str, ...] | Literal["all"] = Field(
        "all", description="Names of linear layers to adapt; all: every one in the blocks"
    )
