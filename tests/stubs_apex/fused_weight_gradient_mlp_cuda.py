"""A stub of Apex's extension that adds the gradient of a weight in the matrix product.

megatron-core imports these two functions (tensor_parallel/layers.py). Belongs here: them. Does not
belong here: any other part of Apex.
"""

from __future__ import annotations

import torch


def wgrad_gemm_accum_fp32(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add grad_output^T total_input to fp32 gradients."""
    main_grad.add_(grad_output.t().matmul(total_input).to(main_grad.dtype))


def wgrad_gemm_accum_fp16(
    total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """Add grad_output^T total_input to gradients of 16 bits."""
    main_grad.add_(grad_output.t().matmul(total_input).to(main_grad.dtype))
