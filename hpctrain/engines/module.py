"""What the engines share that train PyTorch modules: model, task, tuning, and kind of data.

Belongs here: those fields. Does not belong here: how the module is sharded (see `native` and
`deepspeed`), torch.
"""

from __future__ import annotations

from hpctrain.engines.training import TrainConfig, shared_config
from hpctrain.plan.abilities.readable import data_format
from hpctrain.plan.documents import Plan
from hpctrain.spec.data import Augmentation, Colors, DataFormat
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import RunSpec
from hpctrain.spec.tuning import LoraSpec, Task


class ModuleConfig(TrainConfig):
    """A model of Hugging Face's classes, made by its shape or read from `model.pretrained`."""

    model: ModelSpec
    task: Task
    lora: LoraSpec | None = None
    data_format: DataFormat = "tokens"
    data_validation: str | None = None
    # processes of each rank that read ahead; None: as many as are of use
    data_workers: int | None = None
    # what becomes of a picture's colors (0 to 1), the same number for all of them or one for each
    augmentation: Augmentation = "none"
    pixel_mean: Colors = (0.5,)
    pixel_std: Colors = (0.5,)
    # blocks keep their inputs only, and compute the rest again in the backward pass
    activation_checkpointing: bool = False

    @property
    def pretrained(self) -> str | None:
        """The directory of the weights to begin with; None: random ones."""
        return self.model.pretrained

    @property
    def needed_paths(self) -> tuple[str, ...]:
        """The directory of the weights, and the tokenizer where words are hidden while training."""
        masked = self.task == "masked_language_modeling"
        paths = (self.pretrained, self.tokenizer if masked else None)
        return tuple(path for path in paths if path is not None)

    @property
    def labels_per_sample(self) -> int:
        """What a sample has at most that a loss is computed for: its tokens, or one class."""
        return 1 if self.task == "classification" else self.seq_length


def module_config(spec: RunSpec, plan: Plan, peak_flops_per_gpu: float | None) -> ModuleConfig:
    """Fill what the engines of these modules share."""
    mean, std = spec.data.normalization
    return ModuleConfig(
        **dict(shared_config(spec, plan, peak_flops_per_gpu)),
        model=spec.model,
        task=spec.learned_task,
        lora=spec.lora,
        data_format=data_format(spec),
        data_validation=spec.data.validation,
        data_workers=spec.data.workers,
        augmentation=spec.data.augmentation,
        pixel_mean=mean,
        pixel_std=std,
        activation_checkpointing=plan.recompute == "full",
    )
