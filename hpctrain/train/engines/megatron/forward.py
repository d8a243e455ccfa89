"""Run one pass over a global batch: the forward step, the loss, and its totals over all tokens.

Belongs here: what happens between a batch and a loss. Does not belong here: the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.data import Microbatch, Samples
from hpctrain.train.engines.megatron.bert import MaskedTokensStep
from hpctrain.train.engines.megatron.mesh import MegatronMesh
from hpctrain.train.engines.megatron.model import ModelChunks

_TOKEN_FIELDS = ("tokens", "labels", "loss_mask", "positions")


@dataclass(frozen=True)
class GlobalBatchPass:
    """Runs megatron-core's pipeline schedule over one global batch."""

    config: MegatronConfig
    mesh: MegatronMesh
    model: ModelChunks

    @cached_property
    def step(self) -> Any:
        """The function that megatron-core's schedules call per microbatch (schedules.py,
        forward_step)."""
        if self.config.model_type == "bert":
            return MaskedTokensStep(self.config, self.mesh.device, _MaskedLoss)
        return forward_step

    def run(self, samples: Samples, consumed_samples: int, *, forward_only: bool) -> list[Any]:
        """Run forward and, unless `forward_only`, backward.

        Returns [loss sum, token count] of each of this rank's microbatches; empty on all stages
        but the last.
        """
        mesh, chunks = self.mesh, self.config.virtual_pipeline_model_parallel_size
        iterators: Any
        if chunks is None:
            iterators = samples.microbatches(consumed_samples, mesh.reads)
        else:
            # the interleaved schedule takes one iterator per chunk; only chunks that embed tokens
            # or compute the loss read
            iterators = [
                samples.microbatches(
                    consumed_samples,
                    (mesh.first_stage and chunk == 0) or (mesh.last_stage and chunk == chunks - 1),
                )
                for chunk in range(chunks)
            ]
        several = len(self.model.wrapped) > 1
        return get_forward_backward_func()(
            forward_step_func=self.step,
            data_iterator=iterators,
            model=self.model.wrapped if several else self.model.wrapped[0],
            num_microbatches=self.config.microbatches,
            seq_length=self.config.seq_length,
            micro_batch_size=self.config.micro_batch_size,
            forward_only=forward_only,
        )

    def totals(self, reports: list[Any]) -> Any:
        """Compute [sum of token losses, number of tokens] of the global batch, on all ranks.

        The last stage sums over data-parallel ranks, then broadcasts to the other stages.
        """
        nothing = torch.zeros(2, device=self.mesh.device)
        totals = torch.stack(reports).sum(0) if reports else nothing
        if self.mesh.last_stage and self.mesh.reduce_group.size() > 1:
            dist.all_reduce(totals, group=self.mesh.reduce_group)
        if self.config.pipeline_model_parallel_size > 1:
            dist.broadcast(
                totals,
                parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return totals


def forward_step(
    iterator: Iterator[Microbatch | None], model: Any
) -> tuple[Any, Callable[[Any], tuple[Any, Any, Any]]]:
    """Run one microbatch of a causal language model; returns its output and the loss function."""
    batch = next(iterator)
    if batch is None:

        def no_loss(output: Any) -> tuple[Any, Any, Any]:
            raise AssertionError("the loss is computed on the last stage, which has data")

        return model(None, None, None, labels=None), no_loss
    if parallel_state.get_context_parallel_world_size() > 1:
        whole = {name: getattr(batch, name) for name in _TOKEN_FIELDS}
        batch = Microbatch(**get_batch_on_this_cp_rank(whole))
    output = model(
        batch.tokens, batch.positions, None, labels=batch.labels, loss_mask=batch.loss_mask
    )
    return output, _MaskedLoss(batch.loss_mask)


@dataclass(frozen=True)
class _MaskedLoss:
    """Sums token losses under a mask; megatron-core divides the sum by the number of tokens."""

    mask: Any

    def __call__(self, token_losses: Any) -> tuple[Any, Any, Any]:
        mask = self.mask.view(-1)
        loss_sum = (token_losses.float().view(-1) * mask).sum()
        tokens = mask.sum()
        report = torch.stack([loss_sum.detach(), tokens])
        return loss_sum, tokens.to(torch.int), report
