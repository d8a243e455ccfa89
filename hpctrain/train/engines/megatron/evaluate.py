"""Compute the loss on validation data without changing the training state.

Every evaluation reads the same first samples of the validation data, so losses are comparable and
no position has to be stored. No random numbers are drawn, because dropout is off.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from hpctrain.train.data import Samples
from hpctrain.train.engine import Evaluation, evaluated
from hpctrain.train.engines.megatron.forward import GlobalBatchPass


def evaluate(runner: GlobalBatchPass, samples: Samples, batches: Iterable[int]) -> Evaluation:
    """Compute the mean loss over these global batches; all ranks must call this."""
    totals = torch.zeros(2, device=runner.mesh.device)
    config = runner.config
    with _evaluation_mode(runner), torch.no_grad():
        for number in batches:
            first = number * config.global_batch_size
            totals += runner.totals(runner.run(samples, first, forward_only=True))
    return evaluated(totals)


@contextmanager
def _evaluation_mode(runner: GlobalBatchPass) -> Iterator[None]:
    """Disable dropout and timers; with overlap_param_gather, gather all weights at once."""
    settings, chunks = runner.model.settings, runner.model.wrapped
    overlapped = runner.config.overlap_param_gather
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
