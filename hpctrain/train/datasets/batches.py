"""Batches of samples, one class per format, and moving them to a device.

Does not belong here: reading samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch


@dataclass(frozen=True)
class Batch:
    """Tensors whose first axis counts samples; `samples` are their numbers within the run."""

    def to(self, device: torch.device) -> Self:
        """Copy to `device`; copies from pinned memory overlap with computation."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """Copy to pinned memory; torch's DataLoader calls this."""
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[Any], Any]) -> Self:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if torch.is_tensor(value)}
        return replace(self, **{name: change(value) for name, value in tensors.items()})


@dataclass(frozen=True)
class Microbatch(Batch):
    """Tokens [samples, sequence], with labels, loss mask and positions of the same shape.

    Labels are the following tokens. Positions restart with each text of packed sequences.
    """

    tokens: Any
    labels: Any
    loss_mask: Any
    positions: Any
    samples: range = range(0)


@dataclass(frozen=True)
class LabelledTexts(Batch):
    """Tokens [samples, sequence] with a mask that is 0 for padding, and classes [samples]."""

    tokens: Any
    attention_mask: Any
    labels: Any
    samples: range = range(0)


@dataclass(frozen=True)
class ImageBatch(Batch):
    """Normalized colors [samples, colors, side, side] in fp32, and classes [samples]."""

    pixels: Any
    labels: Any
    samples: range = range(0)
