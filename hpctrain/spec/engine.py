"""What trains the model: the engine's name and what only engines ask for.

Belongs here: the fields of `engine`. Does not belong here: what an engine can do (see
`hpctrain.plan.abilities.sharding`, `hpctrain.plan.abilities.trainable`) or how it is told (see
`hpctrain.engines`).
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from hpctrain.spec.contradiction import Contradiction
from hpctrain.spec.deepspeed import DeepSpeedSpec
from hpctrain.spec.document import Document
from hpctrain.spec.megatron_lm import MEGATRON_LM_ENTRY, ArgumentName, ArgumentValue, first_wrong
from hpctrain.units import ByteSize, Duration

EngineName = Literal["megatron", "megatron-lm", "fsdp", "deepspeed", "ddp"]


class DdpSpec(Document):
    """How DistributedDataParallel sums gradients."""

    bucket: ByteSize = Field(
        ByteSize(25 * 2**20), gt=0, description="Gradients that are summed together"
    )
    hook: Literal["none", "bf16", "fp16", "powersgd", "hierarchical"] = Field(
        "none",
        description="Fewer bytes over a slow link: sums in half precision, of low rank (PowerSGD), "
        "or in full within nodes and in bf16 between them (hierarchical)",
    )
    powersgd_rank: int = Field(4, ge=1, description="Rank of PowerSGD's approximation")
    sync_batchnorm: bool = Field(True, description="Batch statistics over all GPUs (ResNet)")


class EngineSpec(Document):
    """What trains the model."""

    name: EngineName = Field(
        "megatron", description="megatron: megatron-core; megatron-lm: somebody's own checkout"
    )
    implementation: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="Layer implementation; auto: TransformerEngine where it is installed"
    )
    ddp: DdpSpec = DdpSpec()
    deepspeed: DeepSpeedSpec = DeepSpeedSpec()
    checkout: str | None = Field(
        None, min_length=1, description="megatron-lm: directory of the Megatron-LM to train with"
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

    @model_validator(mode="after")
    def _deepspeed_is_asked(self) -> Self:
        if self.name != "deepspeed" and self.deepspeed != DeepSpeedSpec():
            message = f"these are settings of DeepSpeed, and {self.name} would not read them"
            hint = "remove them, or set `engine.name: deepspeed`"
            raise Contradiction(("engine", "deepspeed"), message, hint)
        return self

    @model_validator(mode="after")
    def _ddp_is_asked(self) -> Self:
        if self.name != "ddp" and self.ddp != DdpSpec():
            message = f"these are settings of DDP, and {self.name} would not read them"
            raise Contradiction(
                ("engine", "ddp"), message, "remove them, or set `engine.name: ddp`"
            )
        if self.ddp.powersgd_rank != DdpSpec().powersgd_rank and self.ddp.hook != "powersgd":
            message = "this is for PowerSGD, which is not the hook"
            path = ("engine", "ddp", "powersgd_rank")
            raise Contradiction(path, message, "remove it, or set `engine.ddp.hook: powersgd`")
        return self

    @model_validator(mode="after")
    def _megatron_lm_is_asked(self) -> Self:
        if self.name == "megatron-lm":
            self._check_checkout()
            return self
        given = {"checkout": self.checkout, "arguments": self.arguments}
        given["entry"] = self.entry if self.entry != MEGATRON_LM_ENTRY else None
        for field, value in given.items():
            if value:
                message = f"this is for an external Megatron-LM, and {self.name} would not read it"
                hint = "remove it, or set `engine.name: megatron-lm`"
                raise Contradiction(("engine", field), message, hint)
        return self

    def _check_checkout(self) -> None:
        if self.checkout is None:
            message = "engine megatron-lm needs `checkout`, the directory of the Megatron-LM"
            raise Contradiction(("engine", "name"), message, "add `checkout: /path/to/Megatron-LM`")
        wrong = first_wrong(self.arguments)
        if wrong is not None:
            name, message, hint = wrong
            raise Contradiction(("engine", "arguments", name), message, hint)
