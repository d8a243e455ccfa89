"""Run training steps on the fake GPU, and the examples that show what is seen there.

Belongs here: what is run, in a process that has `fake_cuda` installed. Does not belong here: the
device (see `fake_cuda`), what may be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cuda
import torch
from host_reads import engine_of

from hpctrain.engines.train_json import parse_train_config


def seen_in_a_step(document: str) -> dict[str, Any]:
    """Build the engine of a document, train two steps (DDP builds its buckets anew in the second),
    and look at a third.

    Returns the counters of `fake_cuda.Seen`, and under `devices` those of the parameters, gradients
    and states of the optimizer.
    """
    config = parse_train_config(document)
    torch.set_num_threads(1)
    with fake_cuda.fake_gpu() as gpu, engine_of(config) as engine:
        for number in range(2):
            engine.update(number * config.global_batch_size, lambda: None)
        gpu.seen = fake_cuda.Seen()
        update = engine.update(2 * config.global_batch_size, lambda: None)
        seen: dict[str, Any] = {name: dict(found) for name, found in vars(gpu.seen).items()}
        seen["devices"] = {"totals": [str(update.totals.device)], **_devices(engine)}
        return seen


def _devices(engine: Any) -> dict[str, list[str]]:
    """Return the devices of what training keeps between steps; scalars are left out."""
    optimizer = getattr(engine.optimizer, "inner", engine.optimizer)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(part, "optimizer", part) for part in parts]
    weights = [weight for one in inner for group in one.param_groups for weight in group["params"]]
    states = [
        value
        for one in inner
        for state in one.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.dim()
    ]
    assert weights
    assert states
    return {
        "weights": sorted({str(one.device) for one in weights}),
        "states": sorted({str(one.device) for one in states}),
    }


def seen_in_examples() -> list[list[str]]:
    """Run small operations one by one; returns the counters that each has raised."""
    answers = []
    with fake_cuda.fake_gpu() as gpu:
        table = torch.ones(4, 4, device="cuda", requires_grad=True)
        here = torch.zeros(2, dtype=torch.long, device="cuda")
        host = torch.zeros(2, dtype=torch.long)
        examples: list[Callable[[], Any]] = [
            lambda: (table[here] @ table).sum().backward(),
            lambda: table.detach() + 1.0,
            lambda: table[host],
            lambda: table.detach().index_put((host,), table.detach()[0]),
            lambda: table.sum().item(),
            lambda: bool((table > 0).all()),
            lambda: here.tolist(),
            lambda: table.detach().cpu(),
            lambda: host.to("cuda"),
            lambda: torch.zeros(3),
        ]
        for example in examples:
            gpu.seen = fake_cuda.Seen()
            example()
            answers.append([name for name, found in vars(gpu.seen).items() if found])
        assert table.grad is not None
        assert table.grad.device == fake_cuda.DEVICE
        assert isinstance(table.detach().cpu().tolist()[0][0], float)
    return answers


def mixing_raises() -> str:
    """Add a tensor of the host to one of the GPU; returns the name of the exception."""
    with fake_cuda.fake_gpu():
        try:
            torch.ones(4, device="cuda") + torch.ones(4)
        except Exception as error:
            return type(error).__name__
    return "none"
