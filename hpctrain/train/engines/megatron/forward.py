"""One pass over a global batch: the forward step, the loss, and its mean over all tokens.

Belongs here: what happens between a batch and a number. Does not belong here: the optimizer.
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
from hpctrain.train.engines.megatron.bert import MaskedWords
from hpctrain.train.engines.megatron.mesh import Mesh
from hpctrain.train.engines.megatron.model import Model

_OF_TOKENS = ("tokens", "labels", "loss_mask", "positions")


@dataclass(frozen=True)
class Pass:
    """Runs megatron-core's pipeline schedule over one global batch."""

    config: MegatronConfig
    mesh: Mesh
    model: Model

    @cached_property
    def step(self) -> Any:
        """What megatron-core's schedules call per microbatch (schedules.py, forward_step)."""
        if self.config.model_type == "bert":
            return MaskedWords(self.config, self.mesh.device, _Loss)
        return forward_step

    def run(self, samples: Samples, consumed_samples: int, *, forward_only: bool) -> list[Any]:
        """Forward and, unless `forward_only`, backward; the reports of this rank's microbatches."""
        several = len(self.model.wrapped) > 1
        return get_forward_backward_func()(
            forward_step_func=self.step,
            data_iterator=self._iterators(samples, consumed_samples),
            model=self.model.wrapped if several else self.model.wrapped[0],
            num_microbatches=self.config.microbatches,
            seq_length=self.config.seq_length,
            micro_batch_size=self.config.micro_batch_size,
            forward_only=forward_only,
        )

    def _iterators(self, samples: Samples, consumed_samples: int) -> Any:
        """What the schedules take: one iterator, or one per chunk with interleaving."""
        chunks = self.config.virtual_pipeline_model_parallel_size
        if chunks is None:
            return samples.microbatches(consumed_samples, self.mesh.reads)
        return [
            samples.microbatches(consumed_samples, self._reads(chunk == 0, chunk == chunks - 1))
            for chunk in range(chunks)
        ]

    def _reads(self, first_chunk: bool, last_chunk: bool) -> bool:
        """True for the chunks that embed tokens or compute the loss."""
        mesh = self.mesh
        return (mesh.first_stage and first_chunk) or (mesh.last_stage and last_chunk)

    def totals(self, reports: list[Any]) -> Any:
        """[sum of token losses, number of tokens] of the whole global batch, on all ranks.

        The last stage sums over data-parallel ranks, then hands the result down the pipeline.
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
    """One microbatch of a model that guesses the next token."""
    batch = next(iterator)
    if batch is None:
        return model(None, None, None, labels=None), _no_loss
    if parallel_state.get_context_parallel_world_size() > 1:
        whole = {name: getattr(batch, name) for name in _OF_TOKENS}
        batch = Microbatch(**get_batch_on_this_cp_rank(whole))
    output = model(
        batch.tokens, batch.positions, None, labels=batch.labels, loss_mask=batch.loss_mask
    )
    return output, _Loss(batch.loss_mask)


@dataclass(frozen=True)
class _Loss:
    """Sum of token losses and number of tokens; megatron-core divides one by the other."""

    mask: Any

    def __call__(self, token_losses: Any) -> tuple[Any, Any, Any]:
        mask = self.mask.view(-1)
        loss_sum = (token_losses.float().view(-1) * mask).sum()
        tokens = mask.sum()
        report = torch.stack([loss_sum.detach(), tokens])
        return loss_sum, tokens.to(torch.int), report


def _no_loss(output: Any) -> tuple[Any, Any, Any]:
    raise AssertionError("the loss is computed on the last stage, which has data")
