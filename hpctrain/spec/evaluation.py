"""The evaluation section of a run spec: loss on held-out data, and jobs for each kept checkpoint.

Belongs here: the fields of `evaluation`, and what a command may contain. Does not belong here: the
script of such a job (`hpctrain.job.render.evaluation_script`), submitting it.
"""

from __future__ import annotations

import difflib
import re
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from hpctrain.base.units import ByteSize, Duration
from hpctrain.spec.document import Document

PLACEHOLDERS = ("checkpoint", "step", "run", "output")
_BRACES = re.compile(r"\{([A-Za-z_]+)\}")
JobName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,31}$")]


class EvaluationJobSpec(Document):
    """A Slurm job for each kept checkpoint, whose command writes numbers into a JSON file."""

    name: JobName = Field(description="Of its results, its jobs and its logs")
    command: tuple[str, ...] = Field(
        min_length=1,
        description="Program and arguments, run once on the node; `{checkpoint}`, `{step}`, "
        "`{run}` and `{output}` become the checkpoint's directory, its step, the run's directory "
        'and the file to write, as {"metric": value}; nothing else is replaced',
    )
    every_steps: int | None = Field(
        None,
        ge=1,
        description="Only checkpoints of these steps, and the last; default: "
        "`checkpoint.keep_every_steps`, or each checkpoint without that",
    )
    gpus: int = Field(1, ge=0, description="GPUs on one node")
    cpus: int | None = Field(None, ge=1, description="Default: the share of its GPUs, at least 1")
    memory_per_node: ByteSize | None = Field(
        None, description="Default: as the profile's `slurm.memory`"
    )
    walltime: Duration = Field(Duration(3600), gt=0, description="Time limit of one job")
    partition: str | None = Field(None, description="Default: that of the run")
    account: str | None = Field(None, description="Default: that of the run")
    qos: str | None = Field(None, description="Default: that of the run, or of the partition")

    @field_validator("command")
    @classmethod
    def _known_placeholders(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        names = [name for word in command for name in _BRACES.findall(word)]
        if "output" not in names:
            raise ValueError("no word contains `{output}`, the file from which results are read")
        for name in names:
            near = difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.7)
            if name not in PLACEHOLDERS and near:
                raise ValueError(f"`{{{name}}}` is not replaced: did you mean `{{{near[0]}}}`?")
        if any("\0" in word for word in command):
            raise ValueError("a word contains a NUL character")
        return command


class EvaluationSpec(Document):
    """Loss on validation data (off when `every_steps` is absent), and jobs on checkpoints."""

    every_steps: int | None = Field(None, ge=1, description="Evaluate after every so many steps")
    batches: int = Field(8, ge=1, description="Global batches per evaluation")
    jobs: tuple[EvaluationJobSpec, ...] = Field(
        (), description="Slurm jobs that run beside the training, on each kept checkpoint"
    )

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [job.name for job in self.jobs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two evaluation jobs are named `{twice[0]}`")
        return self
