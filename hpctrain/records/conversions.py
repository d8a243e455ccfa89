"""What the program that converts weights answers: a report, or what was wrong.

Belongs here: these documents, which `hpctrain.convert` writes and its command reads.
Does not belong here: converting.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from hpctrain.base.errors import InvalidInputError, Problem

Form = Literal["Hugging Face", "megatron-core"]


class ConversionReport(BaseModel):
    """`parameters` are those of the model, each once; `merged_lora`: thin matrices are in them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    source: str
    target: str
    form: Form
    model_type: str
    parameters: int
    dtype: str
    merged_lora: bool = False


class ReportedFault(BaseModel):
    """One problem, as `hpctrain.base.errors.Problem` has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    message: str
    file: str | None = None
    hint: str | None = None


class ConversionFailure(BaseModel):
    """Why the program has written nothing."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    faults: tuple[ReportedFault, ...]

    @classmethod
    def of(cls, error: InvalidInputError) -> ConversionFailure:
        return cls(
            faults=tuple(
                ReportedFault(message=one.message, file=one.file, hint=one.hint)
                for one in error.problems
            )
        )

    def error(self) -> InvalidInputError:
        """The exception on this side of the process."""
        return InvalidInputError(
            [Problem(one.message, file=one.file, hint=one.hint) for one in self.faults]
        )
