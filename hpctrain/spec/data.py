"""What a run reads, and how many samples make one step.

Belongs here: the fields of `data` and `batch`. Does not belong here: reading any file.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hpctrain.spec.document import Document


class DataSource(Document):
    """One Megatron dataset: `PATH.bin` and `PATH.idx`, with its weight in the blend."""

    path: str = Field(min_length=1, description="Prefix of the .bin/.idx pair")
    weight: float = Field(1.0, gt=0, description="Share in the blend, relative to the others")


class DataSpec(Document):
    """What the model reads. Without sources, Megatron's mock data is used."""

    format: Literal["tokens", "packed", "examples", "images", "arrays"] = Field(
        "tokens",
        description="tokens: Megatron .bin/.idx; packed: conversations for fine-tuning, packed; "
        "examples: labelled texts; images: folders by class; arrays: .npz with x and y",
    )
    sources: tuple[DataSource, ...] = Field((), description="Blend of Megatron datasets")
    tokenizer: str | None = Field(None, description="Path of the tokenizer.json they were made by")
    split: str = Field(
        "98,2,0",
        pattern=r"^\d+(\.\d+)?,\d+(\.\d+)?,\d+(\.\d+)?$",
        description="Shares of training, validation and test documents",
    )
    cache: str | None = Field(None, description="Directory of the index cache; default: the run's")


class BatchSpec(Document):
    """How many sequences make one optimizer step."""

    global_: int = Field(alias="global", ge=1, description="Sequences per step, over all GPUs")
    micro: int | Literal["auto"] = Field("auto", description="Sequences per GPU and microbatch")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro != "auto" and self.micro < 1:
            raise ValueError("micro must be at least 1, or `auto`")
        return self
