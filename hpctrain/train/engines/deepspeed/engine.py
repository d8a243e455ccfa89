"""Make one training step and one evaluation with DeepSpeed's ZeRO, with or without its pipeline.

The loss is the mean over all labels of the global batch, however it is distributed over ranks and
microbatches. Belongs here: the order of work within a step, differences between DeepSpeed's
optimizers. Does not belong here: how the module is placed, the schedule (see
`hpctrain.train.schedule`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass
from deepspeed.runtime.utils import is_model_parallel_parameter

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.train.data import Samples
from hpctrain.train.engine import Evaluation, Update, evaluated_samples
from hpctrain.train.engines.deepspeed.mesh import DeepSpeedMesh
from hpctrain.train.engines.models.engine import ModuleEngine
from hpctrain.train.engines.models.tasks import (
    Loss,
    LossTotals,
    TokenLosses,
    nominal_labels,
)
from hpctrain.train.numerics import are_finite
from hpctrain.train.times import Part

# -- Handle the differences between DeepSpeed's optimizers: loss scales, norms ------------------
# ZeRO stages 1 to 3 have an optimizer of DeepSpeed's around AdamW, stage 0 has AdamW itself.


def reset_settings(config: DeepSpeedConfig, engine: Any, decays: list[float]) -> None:
    """Set the run's own settings again after a checkpoint was loaded with those it was saved with.

    Corrects two faults of runtime/zero/stage3.py when it loads the universal format
    (load_hp_checkpoint_state_from_checkpoint_dir_stage3). All groups get the settings of the first
    one, so that biases and norms would decay. All get one tensor for the number of steps, which
    AdamW would increment once for each group. Neither shows in the first loss.
    """
    for group, decay in zip(engine.optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay
        group["betas"] = (config.adam_beta1, config.adam_beta2)
        group["eps"] = config.adam_eps
    if config.zero_stage > 0:
        engine.optimizer.clip_grad = config.clip_grad
    for state in engine.optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


@torch.no_grad()
def divide_gradients(engine: Any, divisor: float) -> None:
    """Divide the gradients of the next step, before their norm is computed and clipped."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_groups_gradients_flat"):
        # runtime/bf16_optimizer.py, bf16 at stage 1: has no scale
        for gradients in optimizer.fp32_groups_gradients_flat:
            gradients.div_(divisor)
    elif hasattr(optimizer, "override_loss_scale"):
        # runtime/zero: gradients are divided by the loss scale on their way to AdamW
        optimizer.override_loss_scale(divisor)
    else:
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)


def reset_loss_scale(engine: Any) -> None:
    """Set the loss scale of the next backward passes to 1, after `divide_gradients` changed it."""
    optimizer = engine.optimizer
    if getattr(optimizer, "custom_loss_scaler", False):
        optimizer.override_loss_scale(1.0)


def norm_before_step(engine: Any, tensors: Any) -> Any:
    """Compute the norm of the summed gradients at stage 0, where every rank has them.

    The optimizer's step would release them. `tensors`: the group that splits weights, so that each
    rank has a part of some gradients; None for no group.
    """
    trained = [p for p in engine.module.parameters() if p.grad is not None]
    if tensors is None:
        return torch.nn.utils.get_total_norm([p.grad for p in trained])
    parts = [p.grad for p in trained if is_model_parallel_parameter(p)]
    others = [p.grad for p in trained if not is_model_parallel_parameter(p)]
    squares = torch.nn.utils.get_total_norm(parts).square()
    dist.all_reduce(squares, group=tensors)
    return (squares + torch.nn.utils.get_total_norm(others).square()).sqrt()


def norm_after_step(engine: Any) -> float:
    """Return the norm of all ranks' gradients before clipping, at stages 1 to 3.

    DeepSpeed returns -1 for one that is not finite (runtime/utils.py, is_invalid_grad_norm); nan
    here.
    """
    norm = float(engine.get_global_grad_norm())
    return norm if norm >= 0 else math.nan


# -- The parts and methods that both of DeepSpeed's engines share, with or without a pipeline ----


@dataclass(kw_only=True)
class DeepSpeedEngineBase(ModuleEngine):
    """All parts on one rank. `inner` is an engine of DeepSpeed's."""

    config: DeepSpeedConfig
    mesh: DeepSpeedMesh
    inner: Any

    def set_batch(self, samples: range) -> None:
        """Set how many microbatches the next step has.

        DeepSpeed takes a step whenever its count of microbatches is a multiple of them
        (runtime/engine.py, is_gradient_accumulation_boundary), so that the count begins anew.
        """
        if self.inner.train_batch_size() != len(samples):
            self.inner.set_train_batch_size(len(samples))
            self.inner.micro_steps = 0

    def weights_are_finite(self) -> bool:
        """Check the parts of the weights that this rank stores, except those on NVMe."""
        stored = [getattr(p, "ds_tensor", p).detach() for p in self.inner.module.parameters()]
        return are_finite([part for part in stored if part.numel()])


# -- Make one training step and one evaluation with DeepSpeed's ZeRO, for the training loop ------
# The loss is the mean over all labels of the global batch, however it is distributed over ranks
# and microbatches.


@dataclass(kw_only=True)
class ZeroEngine(DeepSpeedEngineBase):
    """Implements `hpctrain.train.engine.Engine`; `inner` is a DeepSpeedEngine."""

    loss: Loss

    def update(self, samples: range, before_step: Callable[[], None]) -> Update:
        """Run forward, backward and optimizer.

        DeepSpeed takes the mean over ranks, and here no mean over microbatches. Its `step` after
        all but the last microbatch only counts them.
        """
        rate = self.set_next_rate(self.inner.optimizer)
        reset_loss_scale(self.inner)
        self.set_batch(samples)
        nominal, count = (
            nominal_labels(self.config, samples),
            self.config.microbatches_of(len(samples)),
        )
        scale, last = self.mesh.replicas / nominal, count - 1
        losses = LossTotals(count, self.mesh.device, self.mesh.data)
        for number, batch in enumerate(self.data.training.microbatches(samples)):
            with self.clock.computing():
                loss_sum, labels = self.loss(self.inner, self._in_precision(batch))
            losses.add(loss_sum, labels)
            with self.clock.timing("backward"):
                self.inner.backward(loss_sum * scale, scale_wrt_gas=False)
                if number < last:
                    self.inner.step()
        before_step()
        totals = losses.wait()
        divisor = max(1.0, float(totals[1])) / nominal
        if divisor != 1.0:
            divide_gradients(self.inner, divisor)
        norm = (
            norm_before_step(self.inner, self.mesh.tensors) if self.config.zero_stage == 0 else None
        )
        self.inner.step()
        if norm is None:
            norm = norm_after_step(self.inner)
        self.finished_steps += 1
        return Update(totals, norm, rate)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Give batch norms the statistics of rank 0, because each rank has its own and one model is
        evaluated. No training step reads them."""
        for module in self.inner.module.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                for buffer in module.buffers(recurse=False):
                    dist.broadcast(buffer, src=0)

        def loss(batch: Any) -> tuple[Any, ...]:
            return self.loss(self.inner, self._in_precision(batch))

        return self.mean_over(batches, self.inner, loss, self.mesh.data)

    def _in_precision(self, batch: Any) -> Any:
        """Cast images to the precision of the weights, which DeepSpeed keeps in bf16; tokens are
        integers in any case."""
        if self.config.precision == "fp32" or not hasattr(batch, "pixels"):
            return batch
        return replace(batch, pixels=batch.pixels.bfloat16())


# -- Make one training step and one evaluation with DeepSpeed's pipeline, for the training loop --
# DeepSpeed's `PipelineEngine` runs forward, backward, sums and the optimizer of a whole global
# batch in one call.


def mean_loss_of(token_losses: TokenLosses) -> Callable[[Any, Any], Any]:
    """Return the loss of a microbatch: a function of logits and (labels, their weights).

    DeepSpeed takes the mean over microbatches and replicas, which is the mean over all tokens if
    each microbatch has the same number. `preflight` refuses a pipeline for anything else.
    """

    def mean_loss(logits: Any, labels: Any) -> Any:
        loss_sum, count = token_losses(logits, *labels)
        return loss_sum / count.clamp(min=1)

    return mean_loss


class PipelineEngine(DeepSpeedEngineBase):
    """Implements `hpctrain.train.engine.Engine`; `inner` is DeepSpeed's engine of the same name."""

    def update(self, samples: range, before_step: Callable[[], None]) -> Update:
        rate = self.set_next_rate(self.inner.optimizer)
        self.set_batch(samples)
        with self._calling_before_optimizer(before_step), self._timed_passes():
            mean = self.inner.train_batch(self._batches(self.data.training, samples))
        self.finished_steps += 1
        tokens = nominal_labels(self.config, samples)
        totals = torch.stack([mean.float() * tokens, mean.new_tensor(tokens).float()])
        return Update(totals, norm_after_step(self.inner), rate)

    @contextlib.contextmanager
    def _calling_before_optimizer(self, before_step: Callable[[], None]) -> Iterator[None]:
        """Call `before_step` between the last backward pass and the optimizer
        (runtime/pipe/engine.py, _exec_optimizer_step)."""
        step = type(self.inner)._take_model_step

        def step_after_agreement(*arguments: Any) -> None:
            before_step()
            step(self.inner, *arguments)

        self.inner._take_model_step = step_after_agreement
        try:
            yield
        finally:
            del self.inner._take_model_step

    @contextlib.contextmanager
    def _timed_passes(self) -> Iterator[None]:
        """Time the passes; sending, receiving and waiting for other stages are instructions of
        their own (runtime/pipe/engine.py, _exec_schedule)."""
        instructions = type(self.inner)._INSTRUCTION_MAP
        parts: dict[Any, Part] = {ForwardPass: "compute", BackwardPass: "backward"}

        def timed(work: Callable[..., None], part: Part) -> Callable[..., None]:
            def run(*arguments: Any, **keywords: Any) -> None:
                with self.clock.timing(part):
                    work(*arguments, **keywords)

            return run

        passes = {kind: timed(instructions[kind], part) for kind, part in parts.items()}
        self.inner._INSTRUCTION_MAP = {**instructions, **passes}
        try:
            yield
        finally:
            del self.inner._INSTRUCTION_MAP

    def _batches(self, part: Samples, samples: range) -> Iterator[Any]:
        """Yield (input of the first stage, input of the last one) of each microbatch."""
        for batch in part.microbatches(samples):
            yield batch.tokens, (batch.labels, batch.loss_mask)

    def evaluate(self, batches: Iterable[int]) -> Evaluation | None:
        """Evaluate without dropout, hence without drawing random numbers."""
        validation, config = self.data.validation, self.config
        if validation is None:
            return None
        means = [
            self.inner.eval_batch(
                self._batches(validation, evaluated_samples(config, number)),
                num_micro_batches=config.microbatches,
            )
            for number in batches
        ]
        return Evaluation(float(torch.stack([mean.double().reshape(()) for mean in means]).mean()))
