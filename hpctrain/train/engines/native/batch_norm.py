"""Compute batch statistics over all ranks: PyTorch's SyncBatchNorm, and the same on a CPU.

Otherwise a ResNet on four GPUs would be another model than on one: each GPU would normalize by its
own quarter of the batch. Belongs here: norms over several ranks. Does not belong here: how
gradients are summed (see `communication_hooks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def synchronize_batch_norms(module: Any, device: torch.device) -> Any:
    """Return `module` with every batch norm replaced; names and values of weights do not change."""
    if device.type == "cuda":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for name, child in module.named_children():
        if isinstance(child, torch.nn.BatchNorm2d):
            child.__class__ = SummedBatchNorm  # the same parameters, buffers and settings
        else:
            setattr(module, name, synchronize_batch_norms(child, device))
    return module


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over all ranks; the gradient of each part is that of the sum."""

    @staticmethod
    def forward(ctx: Any, part: Any) -> Any:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        whole = gradients[0].contiguous().clone()
        dist.all_reduce(whole)
        return whole


class SummedBatchNorm(torch.nn.BatchNorm2d):
    """A batch norm over all ranks on any device; SyncBatchNorm takes tensors on a GPU only
    (torch/nn/modules/batchnorm.py).

    Mean and variance in turn: a variance from sums of squares would cancel in fp32.
    """

    def forward(self, input: Any) -> Any:
        if not self.training:
            return super().forward(input)
        count = input.numel() // input.size(1) * dist.get_world_size()
        mean = _SumOverRanks.apply(input.sum((0, 2, 3))) / count
        centered = input - mean[:, None, None]
        variance = _SumOverRanks.apply(centered.square().sum((0, 2, 3))) / count
        # running statistics, which evaluation uses; PyTorch keeps the unbiased variance
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        unbiased = variance.detach() * count / max(count - 1, 1)
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centered * scale[:, None, None] + self.bias[:, None, None]
