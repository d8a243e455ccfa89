"""The configuration shared by the engines of PyTorch modules: model, task, tuning, data format.

Belongs here: those fields. Does not belong here: how the module is sharded (see `native` and
`deepspeed`), torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from hpctrain.engines.training import TrainConfig, shared_config
from hpctrain.plan.abilities.trainable import data_format
from hpctrain.spec.data import Augmentation, Colors, DataFormat
from hpctrain.spec.model import LoraSpec, ModelSpec, Task

if TYPE_CHECKING:
    from hpctrain.plan.job import TrainingJob


class ModuleConfig(TrainConfig):
    """A model of Hugging Face's classes, with random weights or those of `model.pretrained`."""

    model: ModelSpec
    task: Task
    lora: LoraSpec | None = None
    data_format: DataFormat = "tokens"
    data_validation: str | None = None
    # processes of each rank that read ahead; None: chosen from its CPUs
    data_workers: int | None = None
    # normalization of colors (0 to 1): one number for all of them, or one for each
    augmentation: Augmentation = "none"
    pixel_mean: Colors = (0.5,)
    pixel_std: Colors = (0.5,)
    # blocks keep their inputs only, and recompute the rest in the backward pass
    activation_checkpointing: bool = False
    # what initial weights depend on beside the seed: their names and places, or (documents that
    # older versions wrote) the order in which torch's generator draws them
    initial_weights: Literal["place", "generator"] = "generator"

    @property
    def pretrained(self) -> str | None:
        """Directory of the initial weights; None: random ones."""
        return self.model.pretrained

    @property
    def needed_paths(self) -> tuple[str, ...]:
        """The directories of weights and code, and the tokenizer of tasks with own tokens."""
        own = self.task in ("masked_language_modeling", "span_corruption")
        counted = self.model.counted
        code = counted.remote_code.directory if counted and counted.remote_code else None
        paths = (self.pretrained, self.tokenizer if own else None, code)
        return tuple(path for path in paths if path is not None)

    @property
    def labels_per_sample(self) -> int:
        """Most labels of one sample: its tokens, or one class."""
        if self.task == "span_corruption":
            return self.model.target_seq
        return 1 if self.task == "classification" else self.seq_length

    @property
    def text_length(self) -> int:
        """Tokens of a text from which a sample is made."""
        return self.model.spans.text if self.task == "span_corruption" else self.seq_length


def module_config(job: TrainingJob) -> ModuleConfig:
    """Fill the fields that these engines share."""
    spec, (mean, std) = job.spec, job.spec.data.normalization
    return ModuleConfig(
        **dict(shared_config(job)),
        model=spec.model,
        task=spec.learned_task,
        lora=spec.lora,
        data_format=data_format(spec),
        data_validation=spec.data.validation,
        data_workers=spec.data.workers,
        augmentation=spec.data.augmentation,
        pixel_mean=mean,
        pixel_std=std,
        activation_checkpointing=job.plan.recompute == "full",
        initial_weights="place",
    )
