"""Tensors of 8 and 4 bits: types to test against. The stub makes none."""

from __future__ import annotations

import torch


class QuantizedTensor(torch.Tensor):
    """A weight or activation in few bits."""
