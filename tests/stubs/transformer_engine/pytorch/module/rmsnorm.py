"""RMSNorm."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.module.layernorm import Norm


class RMSNorm(Norm):
    """Division by the root of the mean square over the last axis."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(
            hidden_size, eps, sequence_parallel, zero_centered_gamma, params_dtype, device
        )

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(inp, self.shape, self.weight + self.added, self.eps)
