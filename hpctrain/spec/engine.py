"""The engine section of a run spec: the engine's name and the settings that engines read.

Belongs here: the fields of `engine`. Does not belong here: abilities and contradictions of an
engine (see `hpctrain.spec.engines`), its configuration (see `hpctrain.engines`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hpctrain.base.units import Duration
from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.engines.abilities import EngineAbilities
from hpctrain.spec.engines.deepspeed import DeepSpeedSpec
from hpctrain.spec.engines.megatron import MegatronSpec
from hpctrain.spec.engines.megatron_lm import MEGATRON_LM_ENTRY, ArgumentName, ArgumentValue
from hpctrain.spec.engines.native import DdpSpec
from hpctrain.spec.engines.registry import DEFAULT_ENGINE, ENGINES, EngineName, abilities_of
from hpctrain.spec.job_text import SubmitText


class EngineSpec(Document):
    """What trains the model."""

    name: EngineName = Field(
        DEFAULT_ENGINE, description="megatron: megatron-core; megatron-lm: somebody's own checkout"
    )
    implementation: Literal["auto", "local", "transformer_engine"] = Field(
        "auto",
        description="Layers; auto: TransformerEngine, unless the profile says that it is missing",
    )
    ddp: DdpSpec = DdpSpec()
    deepspeed: DeepSpeedSpec = DeepSpeedSpec()
    megatron: MegatronSpec = MegatronSpec()
    checkout: SubmitText | None = Field(
        None,
        min_length=1,
        description="megatron-lm: directory of the Megatron-LM to train with; `$NAME` is put in "
        "where you submit",
    )
    entry: str = Field(
        MEGATRON_LM_ENTRY, min_length=1, description="megatron-lm: its program, in the checkout"
    )
    arguments: dict[ArgumentName, ArgumentValue] = Field(
        {},
        description="megatron-lm: more arguments, `name: value`, or `true` for a switch",
    )
    deterministic: bool = Field(False, description="Bitwise reproducible kernels, slower on GPUs")
    collective_timeout: Duration = Field(
        Duration(600), gt=0, description="Give up a collective operation after this long"
    )
    startup_timeout: Duration = Field(
        Duration(1800), gt=0, description="The same before the first step: data, weights, NCCL"
    )

    @property
    def abilities(self) -> EngineAbilities:
        """The abilities of the engine of this name."""
        return abilities_of(self.name)

    @model_validator(mode="after")
    def _settings_are_read(self) -> Self:
        """Refuse settings of another engine, and those of its own that contradict each other."""
        for other in ENGINES.values():
            for field in (name for name in other.settings if name not in self.abilities.settings):
                value, default = getattr(self, field), type(self).model_fields[field].default
                if value != default:
                    what, it = "this is for", "it"
                    if isinstance(value, Document):
                        what, it = "these are settings of", "them"
                    message = f"{what} {other.title}, and {self.name} would not read {it}"
                    hint = f"remove {it}, or set `engine.name: {other.name}`"
                    raise Contradiction(("engine", field), message, hint)
        for wrong in self.abilities.wrong_settings(self):
            raise wrong
        return self
