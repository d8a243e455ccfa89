"""What a model gets in one piece: a few samples of one format.

Belongs here: these records, and moving them. Does not belong here: where samples come from.
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
        """On `device`; copies from pinned memory go on beside the computation."""
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Self:
        """In memory that a GPU can copy from by itself; torch's DataLoader calls this."""
        return self._with(lambda tensor: tensor.pin_memory())

    def _with(self, change: Callable[[Any], Any]) -> Self:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        tensors = {name: value for name, value in values.items() if torch.is_tensor(value)}
        return replace(self, **{name: change(value) for name, value in tensors.items()})


@dataclass(frozen=True)
class Microbatch(Batch):
    """Tokens [samples, sequence], and for each the one that follows, whether it counts, and its
    position, which begins again with each text of packed ones."""

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
class Pictures(Batch):
    """Normalized colors [samples, colors, side, side] in fp32, and classes [samples]."""

    pixels: Any
    labels: Any
    samples: range = range(0)
