"""Software of a cluster profile: interpreter, modules, variables of the fabric.

Belongs here: what runs on the compute nodes before the trainer, and around it. Does not belong
here: options of sbatch (`slurm`).
"""

from __future__ import annotations

from pydantic import Field

from hpctrain.spec.document import Document
from hpctrain.spec.engines.registry import EngineName
from hpctrain.spec.job_text import JobText
from hpctrain.spec.profile.container import ContainerProfile
from hpctrain.spec.run import VariableName


class ModulesProfile(Document):
    """Environment modules (Lmod or Tcl)."""

    init: str | None = Field(None, description="File to source first if shells lack `module`")
    purge: bool = Field(False, description="Run `module purge` first")
    load: tuple[str, ...] = Field((), description="Modules to load, in this order")


class SoftwareProfile(Document):
    """Where hpctrain and the engine live on the compute nodes."""

    python: str | None = Field(None, description="Interpreter; default: the submitting one")
    container: ContainerProfile | None = Field(None, description="Absent: no container")
    modules: ModulesProfile | None = Field(None, description="Absent: no environment modules")
    transformer_engine: bool = Field(
        True,
        description="TransformerEngine is installed there: `engine.implementation: auto` uses it",
    )


class FabricVariable(Document):
    """One environment variable of the fabric and why the site sets it."""

    name: VariableName = Field(description="Name of the variable")
    value: JobText = Field(
        description="Text, so put numbers in quotes; `$NAME` is put in by the job, `$$` is a dollar"
    )
    reason: str = Field(min_length=3, description="Why the site sets it")
    engines: tuple[EngineName, ...] = Field(
        (), description="Only for runs of these engines; default: for all"
    )

    def concerns(self, engine: EngineName) -> bool:
        """Whether the site sets it for runs of this engine."""
        return not self.engines or engine in self.engines
