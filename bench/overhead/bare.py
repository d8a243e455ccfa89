"""The least that trains, by engine: what a loop that somebody writes for it has to contain.

Batches, forward and backward passes, clipping, the optimizer, and this rank's loss as a number. No
schedule of the rate, no sums over ranks for reports, no agreements, clocks, metrics or checks.
Model, optimizer and samples are those of the trainer, which has built them with the engine's own
calls. Belongs here: those loops. Does not belong here: measuring.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from hpctrain.train.loop import Loop


def bare_step(loop: Loop) -> Callable[[], None]:
    """One optimizer step of the loop's engine, without the loop."""
    engine: Any = loop.engine
    kind = loop.job.config.engine
    step = {"megatron": _megatron, "fsdp": _fsdp, "ddp": _ddp, "deepspeed": _deepspeed}[kind]
    samples = engine.data.training.samples  # without the clock
    return lambda: step(loop, engine, samples)


def _megatron(loop: Loop, engine: Any, samples: Any) -> None:
    """What every loop of megatron-core does, and the loss on the last stage."""
    optimizer, settings = engine.optimizer, engine.model.settings
    timers, settings.timers = settings.timers, None
    for chunk in engine.model.wrapped:
        chunk.zero_grad_buffer()
    optimizer.inner.zero_grad()
    reports = engine.run(samples, _following(loop), forward_only=False)
    updated, _, _ = optimizer.inner.step()
    if updated:
        optimizer.schedule.step(increment=1)
    if reports:
        loss_sum, tokens = sum(reports).tolist()
        assert loss_sum / tokens > 0
    settings.timers = timers


def _fsdp(loop: Loop, engine: Any, samples: Any) -> None:
    engine.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for last, batch in _batches(loop, samples):
        engine.module.set_requires_gradient_sync(last)
        loss = _mean_loss(engine.module, batch) / loop.job.config.microbatches
        loss.backward()
        total += loss.detach()
    clip_grad_norm_(engine.module.parameters(), loop.job.config.clip_grad)
    engine.optimizer.step()
    assert float(total) > 0


def _ddp(loop: Loop, engine: Any, samples: Any) -> None:
    engine.optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for last, batch in _batches(loop, samples):
        with contextlib.nullcontext() if last else engine.module.no_sync():
            with _autocast(loop, batch):
                loss = _mean_loss(engine.module, batch) / loop.job.config.microbatches
            loss.backward()
        total += loss.detach()
    clip_grad_norm_(engine.module.parameters(), loop.job.config.clip_grad)
    engine.optimizer.step()
    assert float(total) > 0


def _autocast(loop: Loop, batch: Any) -> Any:
    """DDP keeps weights in fp32 and lets operations choose."""
    half = loop.job.config.precision == "bf16"
    return torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=half)


def _deepspeed(loop: Loop, engine: Any, samples: Any) -> None:
    """DeepSpeed divides by the number of microbatches, knows which is the last, and clips."""
    total = 0.0
    for _, batch in _batches(loop, samples):
        loss = _mean_loss(engine.inner, batch)
        engine.inner.backward(loss)
        engine.inner.step()
        total += loss.detach()
    assert float(total) > 0


def _batches(loop: Loop, samples: Any) -> Iterator[tuple[bool, Any]]:
    """This rank's microbatches, and whether it is the last one."""
    last = loop.job.config.microbatches - 1
    for number, batch in enumerate(samples.microbatches(_following(loop))):
        yield number == last, batch


def _following(loop: Loop) -> range:
    """The samples of the step that follows."""
    first = loop.position.consumed_samples
    return range(first, first + loop.job.config.global_batch_size)


def _mean_loss(module: Any, batch: Any) -> Any:
    logits = module(input_ids=batch.tokens, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, -2), batch.labels.flatten())
