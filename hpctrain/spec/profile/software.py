"""Software of a cluster profile: interpreter, modules, variables of the fabric.

Belongs here: what runs on the compute nodes before the trainer, and around it. Does not belong
here: options of sbatch (`slurm`).
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from hpctrain.base.units import ByteSize
from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import EngineName
from hpctrain.spec.job_text import JobText
from hpctrain.spec.profile.container import ContainerProfile
from hpctrain.spec.run import VariableName
from hpctrain.spec.secrets import secret_reason

LimitValue = Annotated[int, Field(ge=0)] | Literal["unlimited"]


class ModulesProfile(Document):
    """Environment modules (Lmod or Tcl)."""

    init: str | None = Field(None, description="File to source first if shells lack `module`")
    purge: bool = Field(False, description="Run `module purge` first")
    use: tuple[JobText, ...] = Field((), description="Directories for `module use`, in this order")
    load: tuple[str, ...] = Field((), description="Modules to load, in this order")


class UlimitsProfile(Document):
    """Limits of each process (bash(1), ulimit); a limit that cannot be set ends the attempt."""

    core: LimitValue = Field(
        0, description="`-c`, 1024 B; 0: no core files, of which each rank would write one"
    )
    memlock: LimitValue | None = Field(
        None, description="`-l`, KiB; InfiniBand needs unlimited; absent: as it is"
    )
    nofile: int | None = Field(None, ge=256, description="`-n`, open files; absent: as it is")
    stack: LimitValue | None = Field(None, description="`-s`, KiB; absent: as it is")

    def options(self) -> tuple[tuple[str, str], ...]:
        """List the options of ulimit and their values."""
        given = (("-c", self.core), ("-l", self.memlock), ("-n", self.nofile), ("-s", self.stack))
        return tuple((option, str(value)) for option, value in given if value is not None)


class SoftwareProfile(Document):
    """Where hpctrain and the engine live on the compute nodes."""

    python: str | None = Field(None, description="Interpreter; default: the submitting one")
    container: ContainerProfile | None = Field(None, description="Absent: no container")
    modules: ModulesProfile | None = Field(None, description="Absent: no environment modules")
    setup: str | None = Field(
        None,
        min_length=1,
        description="Absolute path of a shell file that the job reads after the modules, such as "
        "one that activates an environment; its SHA-256 is in the script",
    )
    unset: tuple[VariableName, ...] = Field((), description="Variables to remove from the job")
    ulimits: UlimitsProfile = UlimitsProfile()
    scratch: JobText | None = Field(
        None,
        description="Local directory of each node for TMPDIR and the caches of compilers, such as "
        "`/tmp/$USER-$SLURM_JOB_ID`; removing it is up to the site's epilog",
    )
    scratch_capacity: ByteSize | None = Field(
        None,
        gt=0,
        description="Room for copies of data (`data.stage`) on the disk behind `scratch`; absent: "
        "it is no disk, or too small, and specs that ask for copies are refused",
    )
    prologue: tuple[Annotated[tuple[JobText, ...], Field(min_length=1)], ...] = Field(
        (),
        description="Commands that each task runs before the trainer, each a list of words, such "
        "as `[source, /sw/rails.sh]`; the task puts in `$NAME`, and one that fails ends it",
    )
    transformer_engine: bool = Field(
        True,
        description="TransformerEngine is installed there: `engine.implementation: auto` uses it",
    )

    @model_validator(mode="after")
    def _capacity_is_of_something(self) -> Self:
        if self.scratch_capacity is not None and self.scratch is None:
            raise ValueError("`scratch_capacity` needs `scratch`, the directory that it is about")
        return self


class FabricVariable(Document):
    """One environment variable of the fabric and why the site sets it."""

    name: VariableName = Field(description="Name of the variable")
    value: JobText | None = Field(
        None,
        description="Text, so put numbers in quotes; the job puts in `$NAME`, `$$` is a dollar",
    )
    per_local_rank: tuple[JobText, ...] = Field(
        (), description="Instead of `value`: one for each task of a node, by SLURM_LOCALID"
    )
    prepend: bool = Field(
        False, description="Put the value before the one that the job has, with a `:` between"
    )
    reason: str = Field(min_length=3, description="Why the site sets it")
    engines: tuple[EngineName, ...] = Field(
        (), description="Only for runs of these engines; default: for all"
    )

    @model_validator(mode="after")
    def _one_value(self) -> Self:
        if (self.value is None) != bool(self.per_local_rank):
            raise ValueError(f"{self.name}: give exactly one of `value` and `per_local_rank`")
        for value in (self.value or "", *self.per_local_rank):
            if reason := secret_reason(self.name, value):
                raise ValueError(f"{reason}, which everybody sees: specs `inherit` it by name")
        if self.per_local_rank and self.prepend:
            raise ValueError(f"{self.name}: `prepend` and `per_local_rank` exclude each other")
        return self

    def concerns(self, engine: str) -> bool:
        """Whether the site sets it for runs of this engine."""
        return not self.engines or engine in self.engines
