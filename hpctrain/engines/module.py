"""What the engines share that train PyTorch modules: model, task, tuning, and kind of data.

Belongs here: those fields. Does not belong here: how the module is sharded (see `native` and
`deepspeed`), torch.
"""

from __future__ import annotations

from typing import Literal

from hpctrain.engines.training import TrainConfig, shared_fields
from hpctrain.plan.documents import Plan
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec
from hpctrain.spec.tuning import LoraSpec, Task


class ModuleConfig(TrainConfig):
    """A model of Hugging Face's classes, made by its shape or read from `model.pretrained`."""

    model: ModelSpec
    task: Task
    lora: LoraSpec | None = None
    data_format: Literal["tokens", "packed", "examples", "images", "arrays"] = "tokens"
    # blocks keep their inputs only, and compute the rest again in the backward pass
    activation_checkpointing: bool = False

    @property
    def labels_per_sample(self) -> int:
        """What a sample has at most that a loss is computed for: its tokens, or one class."""
        return 1 if self.task == "classification" else self.seq_length


def module_fields(spec: RunSpec, plan: Plan, peak_flops_per_gpu: float | None) -> dict[str, object]:
    """The fields of `ModuleConfig` but `engine`."""
    return dict(
        **shared_fields(spec, plan, peak_flops_per_gpu),
        model=spec.model,
        task=spec.learned_task,
        lora=spec.lora,
        data_format=spec.data.format,
        activation_checkpointing=plan.recompute == "full",
    )
