"""The data section of a run spec.

Belongs here: the fields of `data`. Does not belong here: reading any file, the formats
that a model can train on (see `hpctrain.plan.abilities.trainable`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.spec.document import Document
from hpctrain.spec.job_text import SubmitText

DataFormat = Literal["tokens", "packed", "examples", "images", "arrays"]
Documents = Literal["joined", "restart", "separate"]
Augmentation = Literal["none", "crop", "crop_flip"]
Colors = tuple[float, ...]

# Of a million photographs, with colors from 0 to 1 (torchvision's reference training,
# references/classification/presets.py); a plain range of -1 to 1 for everything else.
_PHOTOGRAPHS: tuple[Colors, Colors] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_PLAIN: tuple[Colors, Colors] = ((0.5,), (0.5,))
_CHANNELS = (1, 3)
_SPLIT = "98,2,0"
# Fields that apply to some formats only.
_ONLY_FOR: dict[str, tuple[DataFormat, ...]] = {
    "document_end": ("tokens",),
    "validation": ("packed", "examples", "images", "arrays"),
    "workers": ("packed", "examples", "images", "arrays"),
    "augment": ("images", "arrays"),
    "mean": ("images", "arrays"),
    "std": ("images", "arrays"),
}


class DataSource(Document):
    """One dataset: a Megatron pair with its weight in the blend, an .npz file, or a directory."""

    path: SubmitText = Field(
        min_length=1,
        description="tokens: prefix of the .bin/.idx pair; images: directory with one per class, "
        "or what `data prepare` made of it; others: .npz file; `$NAME` is put in where you submit",
    )
    weight: float = Field(1.0, gt=0, description="tokens: share in the blend, relative to others")


class DataSpec(Document):
    """What the model reads. Without sources it is made up: enough to try a run out."""

    format: DataFormat = Field(
        "tokens",
        description="tokens: Megatron .bin/.idx; packed: conversations for fine-tuning, packed; "
        "examples: labelled texts; images: folders by class; arrays: .npz with x and y",
    )
    sources: tuple[DataSource, ...] = Field(
        (),
        description="tokens: a blend; other formats: all of them, one behind the other. Or the "
        "path of a file with weights and prefixes by turns (Megatron-LM's data-args-path)",
    )
    document_end: int | None = Field(
        None, ge=0, description="tokens: the token that ends a document, for the two fields below"
    )
    documents: Documents = Field(
        "joined",
        description="Of documents in one sample. joined: one text; restart: positions begin anew, "
        "attention goes on (megatron); separate: attention does not, either (ddp, fsdp)",
    )
    mask_document_ends: bool = Field(
        False, description="Leave what follows the end of a document out of the loss"
    )
    made_up: bool = Field(
        False, description="Train on made-up samples, on purpose: a trial of cluster and layout"
    )
    tokenizer: SubmitText | None = Field(
        None,
        description="Path of the tokenizer.json they were made by; `$NAME` is put in where you "
        "submit",
    )
    split: str = Field(
        _SPLIT,
        pattern=r"^\d{1,9}(\.\d{1,9})?(,\d{1,9}(\.\d{1,9})?){2}$",
        description="Shares of training, validation and test: of documents, or of samples",
    )
    validation: SubmitText | None = Field(
        None,
        min_length=1,
        description="Validation data of their own, in place of a share; `$NAME` is put in where "
        "you submit",
    )
    cache: SubmitText | None = Field(
        None,
        description="Directory of the index cache; default: the run's; `$NAME` is put in where "
        "you submit",
    )
    workers: int | None = Field(
        None,
        ge=0,
        description="Processes of each rank that read ahead; default: images on a GPU: as many as "
        "the rank has CPUs to spare, 8 at most; else none",
    )
    stage: bool = Field(
        False,
        description="Copy the sources to a disk of each node that reads them, once per launch: "
        "below `software.scratch` of the profile, which says with `scratch_capacity` how much fits",
    )
    augment: Augmentation | None = Field(
        None,
        description="Random crop and mirroring while training; default: images: crop_flip, "
        "arrays: none",
    )
    mean: Colors | None = Field(
        None, description="Subtracted from colors 0 to 1: one number or three; default: by format"
    )
    std: Colors | None = Field(
        None, description="Colors are divided by it afterwards; default: by format"
    )

    @model_validator(mode="after")
    def _fields_fit_the_format(self) -> Self:
        for field, formats in _ONLY_FOR.items():
            if getattr(self, field) is not None and self.format not in formats:
                raise ValueError(f"{field} is not for format {self.format}: remove it")
        if self.format != "tokens" and any(source.weight != 1 for source in self.sources):
            raise ValueError(
                "weights are for a blend of tokens: other formats are read as a whole, so a "
                "source that shall count twice is listed twice"
            )
        needs_end = self.documents != "joined" or self.mask_document_ends
        if needs_end != (self.document_end is not None):
            raise ValueError("`document_end` goes with `documents` or `mask_document_ends`")
        if self.validation is not None and self.split != _SPLIT:
            raise ValueError("`validation` takes the place of `split`: give one of them")
        if self.made_up and self.sources:
            raise ValueError("`made_up` is for a run without `sources`: give one of them")
        if self.stage and not self.sources:
            raise ValueError("`stage` copies `sources`, and there are none")
        if self.stage and self.format == "images":
            raise ValueError(
                "`stage` copies files, not directories of images, which cost the file system an "
                "open on each node for each image: prepare them as `arrays`"
            )
        return self

    @field_validator("split")
    @classmethod
    def _trains_on_some(cls, split: str) -> str:
        if float(split.partition(",")[0]) == 0:
            raise ValueError("the first share is that of training, and nothing is left for it")
        return split

    @model_validator(mode="after")
    def _colors_make_sense(self) -> Self:
        for field in ("mean", "std"):
            given = getattr(self, field)
            if given is not None and len(given) not in _CHANNELS:
                raise ValueError(f"{field} has one number or three, not {len(given)}")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError("std must be above 0")
        return self

    @property
    def augmentation(self) -> Augmentation:
        """`augment`, or the default of the format."""
        if self.augment is not None:
            return self.augment
        return "crop_flip" if self.format == "images" else "none"

    @property
    def normalization(self) -> tuple[Colors, Colors]:
        """Mean and standard deviation of each color: one number for all of them, or three."""
        mean, std = _PHOTOGRAPHS if self.format == "images" else _PLAIN
        return self.mean or mean, self.std or std
