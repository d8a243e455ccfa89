"""Batch statistics over all ranks: PyTorch's SyncBatchNorm, and the same for tensors on a CPU.

Without them a ResNet on four GPUs is another model than on one: each GPU would normalize by its own
quarter of the batch. Belongs here: norms whose numbers come from several ranks. Does not belong
here: how gradients are summed (see `hooks`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def synchronized(module: Any, device: torch.device) -> Any:
    """`module` with every batch norm replaced; names and values of its weights stay."""
    if device.type == "cuda":
        return torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
    for name, child in module.named_children():
        if isinstance(child, torch.nn.BatchNorm2d):
            child.__class__ = SummedBatchNorm  # the same parameters, buffers and settings
        else:
            setattr(module, name, synchronized(child, device))
    return module


class _Sum(torch.autograd.Function):
    """The sum over ranks of what each rank has; what is asked of the sum is asked of every part."""

    @staticmethod
    def forward(ctx: Any, part: Any) -> Any:
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *asked: Any) -> Any:
        whole = asked[0].contiguous().clone()
        dist.all_reduce(whole)
        return whole


class SummedBatchNorm(torch.nn.BatchNorm2d):
    """torch/nn/modules/batchnorm.py: SyncBatchNorm takes tensors on a GPU only; this one any.

    Mean and variance in turn: a variance from sums of squares would cancel in fp32.
    """

    def forward(self, input: Any) -> Any:
        if not self.training:
            return super().forward(input)
        count = input.numel() // input.size(1) * dist.get_world_size()
        mean = _Sum.apply(input.sum((0, 2, 3))) / count
        centered = input - mean[:, None, None]
        variance = _Sum.apply(centered.square().sum((0, 2, 3))) / count
        self._remember(mean.detach(), variance.detach() * count / max(count - 1, 1))
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return centered * scale[:, None, None] + self.bias[:, None, None]

    def _remember(self, mean: Any, variance: Any) -> None:
        """What evaluation normalizes by; the variance is the unbiased one, as PyTorch keeps it."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)
