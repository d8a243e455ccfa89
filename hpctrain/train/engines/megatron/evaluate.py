"""Loss on validation data, without a trace in the training state.

Every evaluation reads the same first samples of the validation data, so losses are comparable and
nothing has to be remembered. No random numbers are drawn (dropout is off). Belongs here: that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from hpctrain.train.data import Samples
from hpctrain.train.engine import Evaluation, evaluated
from hpctrain.train.engines.megatron.forward import Pass


def evaluate(runner: Pass, samples: Samples, batches: Iterable[int]) -> Evaluation:
    """Mean loss over these global batches; all ranks must call this."""
    totals = torch.zeros(2, device=runner.mesh.device)
    config = runner.config
    with _evaluating(runner), torch.no_grad():
        for number in batches:
            first = number * config.global_batch_size
            totals += runner.totals(runner.run(samples, first, forward_only=True))
    return evaluated(totals)


@contextmanager
def _evaluating(runner: Pass) -> Iterator[None]:
    """Dropout off, nothing timed; with overlap_param_gather gather all weights now instead of
    while computing."""
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
