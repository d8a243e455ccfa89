"""The matrix product that the router of experts calls directly."""

from __future__ import annotations

from typing import Any

import torch


def general_gemm(
    A: torch.Tensor,
    B: torch.Tensor,
    workspace: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    layout: str = "TN",
    bias: torch.Tensor | None = None,
    **unused: Any,
) -> list[torch.Tensor]:
    """Return B A^T (TN), B A (NN) or B^T A (NT), as cuBLAS's column-major layouts read here."""
    dtype = out_dtype or A.dtype
    left, right = A.to(dtype), B.to(dtype)
    out = {
        "TN": lambda: right.matmul(left.t()),
        "NN": lambda: right.matmul(left),
        "NT": lambda: right.t().matmul(left),
    }[layout]()
    return [out if bias is None else out + bias.to(dtype)]
