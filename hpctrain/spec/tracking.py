"""The tracking section of a run spec: TensorBoard, and Weights & Biases.

Belongs here: the fields of `tracking`, and the refusal of secrets. Does not belong here: what is
written (`hpctrain.tracking`), the settings of a run (`hpctrain.job.tracking_settings`).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.spec.contradiction import Contradiction
from hpctrain.spec.document import Document
from hpctrain.spec.secrets import secret_reason

# W&B refuses these in names of projects.
_Project = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^/\\#?%:\x00-\x1f]+$")]
_Label = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f]+$")]
_Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f]+$")]
_SECRET_HINT = "remove it: a key belongs to `wandb login`, on the machine that uploads"


class WandbSpec(Document):
    """The W&B run, one for all attempts. Its key never stands in a spec."""

    project: _Project = Field(description="Project of W&B, such as `llama-pretraining`")
    entity: _Project | None = Field(
        None, description="Team or user of W&B; default: that of whoever uploads"
    )
    name: _Label | None = Field(None, description="Name of the run; default: the run id")
    group: _Label | None = Field(None, description="Group of runs that belong together")
    tags: tuple[_Tag, ...] = Field((), description="Tags, such as `[baseline, h100]`")
    mode: Literal["offline", "online"] = Field(
        "offline",
        description="offline: files in the run directory, for `wandb sync` on a login node; "
        "online: to the server at once, where compute nodes reach it",
    )

    @model_validator(mode="after")
    def _no_secrets(self) -> Self:
        texts = [("tags", tag) for tag in self.tags]
        texts += [
            (name, getattr(self, name) or "") for name in ("project", "entity", "name", "group")
        ]
        for field, text in texts:
            if reason := secret_reason(field, text):
                raise Contradiction(("tracking", "wandb", field), reason, _SECRET_HINT)
        return self


class TrackingSpec(Document):
    """What shows curves of the run elsewhere. A process beside training writes it."""

    tensorboard: bool | str = Field(
        False,
        description="Event files in the run directory; or a directory, below which each run has "
        "its own",
    )
    wandb: WandbSpec | None = Field(None, description="Weights & Biases; absent: nothing for it")

    @field_validator("tensorboard")
    @classmethod
    def _names_a_directory(cls, tensorboard: bool | str) -> bool | str:
        # a word such as `yes` would become the name of a directory
        if isinstance(tensorboard, str) and ("/" not in tensorboard or "\0" in tensorboard):
            raise ValueError("expected `true`, or the path of a directory with a `/`")
        return tensorboard

    @property
    def wanted(self) -> bool:
        """True if anything is to be written."""
        return bool(self.tensorboard) or self.wandb is not None

    @property
    def packages(self) -> tuple[str, ...]:
        """The Python packages that write it, which are also the extras of hpctrain."""
        wanted = {"tensorboard": bool(self.tensorboard), "wandb": self.wandb is not None}
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)
