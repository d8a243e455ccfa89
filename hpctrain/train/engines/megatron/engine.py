"""Make one training step and one evaluation with megatron-core, for the training loop.

Belongs here: the order of work within a step, the optimizer, what happens between a batch and a
loss. Does not belong here: the model (see `model`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunStateMachine,
    _set_rerun_state_machine,
    destroy_rerun_state_machine,
)
from megatron.core.utils import get_batch_on_this_cp_rank

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.train.data import Data, Microbatch, Samples
from hpctrain.train.engine import Evaluation, Update, evaluated, evaluated_samples
from hpctrain.train.engines.megatron.mesh import MegatronMesh
from hpctrain.train.engines.megatron.model import MaskedTokensStep, ModelChunks
from hpctrain.train.engines.megatron.option_settings import (
    CUDA_GRAPH_WARMUP_STEPS,
    optimizer_format_settings,
)
from hpctrain.train.numerics import are_finite
from hpctrain.train.times import StepClock

# -- Build AdamW and its learning-rate schedule with megatron-core; the schedule counts steps ----


@dataclass(frozen=True)
class MegatronOptimizer:
    """megatron-core's optimizer and its scheduler."""

    inner: Any
    schedule: Any

    @property
    def learning_rate(self) -> float:
        """The rate that the next step will use."""
        return float(get_canonical_lr_for_logging(self.inner.param_groups) or 0.0)


def build_optimizer(config: MegatronConfig, model: ModelChunks) -> MegatronOptimizer:
    """Build both; no weight decay on biases and norms (optimizer/__init__.py, standard
    overrides)."""
    inner = get_megatron_optimizer(
        optimizer_settings(config), model.wrapped, use_gloo_process_groups=False
    )
    model.settings.grad_scale_func = inner.scale_loss
    schedule = OptimizerParamScheduler(
        inner,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.schedule_count(config.lr_warmup_steps),
        lr_decay_steps=config.schedule_count(config.lr_decay_steps),
        lr_decay_style="WSD" if config.lr_decay_style == "wsd" else config.lr_decay_style,
        wsd_decay_steps=config.wsd_decay_count,
        lr_wsd_decay_style=config.lr_wsd_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.train_steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
    return MegatronOptimizer(inner, schedule)


def optimizer_settings(config: MegatronConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.precision == "bf16",
        params_dtype=torch.bfloat16 if config.precision == "bf16" else torch.float32,
        use_distributed_optimizer=config.use_distributed_optimizer,
        overlap_param_gather=config.overlap_param_gather,
        **optimizer_format_settings(config),
    )


# -- Keep the result of megatron-core's check of this rank's gradients, instead of raising it ----


class GradientCheck(RerunStateMachine):
    """megatron-core's check of local gradients; `rejection` is its first error message.

    The check runs before gradients are summed over data-parallel ranks, so it identifies the rank.
    An exception there would leave the other ranks waiting in that sum. Without one the step is
    completed and all ranks end together (see `Control.propose`).
    """

    def __init__(self) -> None:
        super().__init__(mode=RerunMode.DISABLED)
        self.rejection: str | None = None

    def validate_result(self, *args: Any, **keywords: Any) -> None:
        try:
            super().validate_result(*args, **keywords)
        except RuntimeError as error:
            self.rejection = self.rejection or keywords.get("message", str(error))


def install_gradient_check() -> GradientCheck:
    """Replace megatron-core's state machine by a `GradientCheck`, and silence its log."""
    logging.getLogger("megatron.core.rerun_state_machine").setLevel(logging.ERROR)
    gradient_check = GradientCheck()
    destroy_rerun_state_machine()
    _set_rerun_state_machine(gradient_check)
    return gradient_check


# -- Capture CUDA graphs of the layers with TransformerEngine, after some steps without them -----
# megatron-core's own graphs (`local`) are captured by its schedules (schedules.py,
# create_cudagraphs). Those of TransformerEngine are captured by the training loop, as in Megatron-
# LM (training/training.py, train).


# cuda_graphs.py asserts this beside `expandable_segments`: NCCL's registration of buffers in a
# graph reads memory that such segments have moved.
_ENVIRONMENT = {"NCCL_GRAPH_REGISTER": "0"}


def prepare_environment(config: MegatronConfig) -> None:
    """Set what graphs need of NCCL, before it is initialised."""
    if config.cuda_graph_impl != "none":
        os.environ.update(_ENVIRONMENT)


class LayerGraphs:
    """Captures graphs with TransformerEngine before one step of the launch, on all ranks alike."""

    def __init__(self, config: MegatronConfig, model: ModelChunks, optimizer: Any) -> None:
        self._gathers_in_hooks = config.overlap_param_gather
        self._model = model
        self._steps = 0
        self._capturer: Any = None
        if config.cuda_graph_impl != "transformer_engine":
            return
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        # megatron-core's own count of micro-batches, which the capture reads
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank=0,
            rampup_batch_size=None,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            data_parallel_size=config.data_parallel_size,
            decrease_batch_size_if_needed=False,
        )
        self._capturer = TECudaGraphHelper(
            model.wrapped, model.settings, config.seq_length, config.micro_batch_size, [optimizer]
        )

    def before_step(self) -> None:
        """Capture once, when enough steps have been made; call before each training step."""
        if self._capturer is None:
            return
        if self._steps == CUDA_GRAPH_WARMUP_STEPS:
            # without the hooks that gather weights; graphs call these themselves later
            hooked = self._model.wrapped if self._gathers_in_hooks else []
            for chunk in hooked:
                chunk.disable_forward_pre_hook(param_sync=False)
            self._capturer.create_cudagraphs()
            for chunk in hooked:
                chunk.enable_forward_pre_hook()
            if self._gathers_in_hooks:
                self._capturer.cuda_graph_set_manual_hooks()
        self._steps += 1


# ------------------------------------------------------------------------------------------------
# The forward step and the loss of one microbatch.


_TOKEN_FIELDS = ("tokens", "labels", "loss_mask", "positions")


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


# -- Make one training step and one evaluation with megatron-core, for the training loop ---------


@dataclass(frozen=True)
class MegatronEngine:
    """All parts of megatron-core on one rank; implements `hpctrain.train.engine.Engine`."""

    config: MegatronConfig
    mesh: MegatronMesh
    model: ModelChunks
    optimizer: MegatronOptimizer
    data: Data
    gradient_check: GradientCheck
    clock: StepClock
    graphs: LayerGraphs

    @property
    def rejection(self) -> str | None:
        return self.gradient_check.rejection

    def update(self, samples: range, before_step: Callable[[], None]) -> Update:
        """Run forward, backward and optimizer; a skipped step does not advance the schedule."""
        self.graphs.before_step()
        for chunk in self.model.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        reports = self.run(self.data.training, samples, forward_only=False)
        before_step()
        learning_rate = self.optimizer.learning_rate
        updated, grad_norm, _ = self.optimizer.inner.step()
        if updated:
            ramps = self.config.rampup_batch_size is not None
            self.optimizer.schedule.step(increment=len(samples) if ramps else 1)
        return Update(self.totals(reports), grad_norm, learning_rate)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Compute the mean loss over these global batches.

        Every evaluation reads the same first samples of the validation data, so losses are
        comparable and no position has to be stored. No random numbers are drawn: dropout is off.
        """
        validation = self.data.validation
        if validation is None:
            return None
        totals = torch.zeros(2, device=self.mesh.device)
        with _evaluation_mode(self.config, self.model), torch.no_grad():
            for number in batches:
                samples = evaluated_samples(self.config, number)
                totals += self.totals(self.run(validation, samples, forward_only=True))
        return evaluated(totals)

    def weights_are_finite(self) -> bool:
        return are_finite([p for chunk in self.model.wrapped for p in chunk.parameters()])

    @cached_property
    def step(self) -> Any:
        """The function that megatron-core's schedules call per microbatch (schedules.py,
        forward_step)."""
        if self.config.model.reads_masked_text:
            return MaskedTokensStep(self.config, self.mesh.device, _MaskedLoss)
        return forward_step

    def run(self, part: Samples, samples: range, *, forward_only: bool) -> list[Any]:
        """Run megatron-core's pipeline schedule over the global batch of `samples`: forward
        and, unless `forward_only`, backward.

        Returns [loss sum, token count] of each of this rank's microbatches; empty on all stages
        but the last.
        """
        mesh, chunks = self.mesh, self.config.virtual_pipeline_model_parallel_size
        iterators: Any
        if chunks is None:
            iterators = part.microbatches(samples, mesh.reads)
        else:
            # the interleaved schedule takes one iterator per chunk; only chunks that embed tokens
            # or compute the loss read
            iterators = [
                part.microbatches(
                    samples,
                    (mesh.first_stage and chunk == 0) or (mesh.last_stage and chunk == chunks - 1),
                )
                for chunk in range(chunks)
            ]
        several = len(self.model.wrapped) > 1
        return get_forward_backward_func()(
            forward_step_func=self.step,
            data_iterator=iterators,
            model=self.model.wrapped if several else self.model.wrapped[0],
            num_microbatches=self.config.microbatches_of(len(samples)),
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


@contextmanager
def _evaluation_mode(config: MegatronConfig, model: ModelChunks) -> Iterator[None]:
    """Disable dropout and timers; with overlap_param_gather, gather all weights at once."""
    settings, chunks, overlapped = model.settings, model.wrapped, config.overlap_param_gather
    gather, settings.param_sync_func = settings.param_sync_func, None
    timers, settings.timers = settings.timers, None
    for chunk in chunks:
        chunk.eval()
        if overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
    try:
        yield
    finally:
        settings.param_sync_func, settings.timers = gather, timers
        for chunk in chunks:
            chunk.train()
            if overlapped:
                chunk.enable_forward_pre_hook()
