"""LayerNorm, and what both norms share."""

from __future__ import annotations

from typing import Any

import torch


class Norm(torch.nn.Module):
    """Norms have an empty `_extra_state`, as operations of 2.9 without quantised tensors."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        sequence_parallel: bool | None,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype | None,
        device: Any,
    ) -> None:
        super().__init__()
        self.eps, self.shape, self.added = eps, (hidden_size,), float(zero_centered_gamma)
        self.weight = self._vector(1.0 - self.added, params_dtype, device, sequence_parallel)

    def _vector(
        self, value: float, dtype: torch.dtype | None, device: Any, flag: bool | None
    ) -> torch.nn.Parameter:
        data = torch.empty(self.shape, dtype=dtype or torch.get_default_dtype(), device=device)
        parameter = torch.nn.Parameter(data.fill_(value))
        if flag is not None:
            parameter.sequence_parallel = flag
        return parameter

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Ignore it: a norm has none."""


class LayerNorm(Norm):
    """Layer normalisation over the last axis."""

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
        self.bias = self._vector(0.0, params_dtype, device, sequence_parallel)

    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(
            inp, self.shape, self.weight + self.added, self.bias, self.eps
        )
