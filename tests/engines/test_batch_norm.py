"""Batch statistics over ranks: two halves of a batch are normalized as one process does the whole.

In fp64, so that what is left is no rounding: forward, gradients and the running statistics.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from trial_runs import LIMIT_SECONDS

from bench import prefork
from hpctrain.train.engines.native.assembly import SummedBatchNorm, synchronize_batch_norms

TOLERANCE = 1e-12


def network() -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
        torch.nn.Sequential(torch.nn.Conv2d(4, 3, 3), torch.nn.BatchNorm2d(3)),
    )  # fmt: skip
    return layers.double()


def pictures() -> torch.Tensor:
    return torch.randn(8, 1, 6, 6, dtype=torch.float64, generator=torch.manual_seed(5)) * 3 + 1


def passed(layers: torch.nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss that is a sum over samples, and buffers."""
    (layers(batch) ** 3).sum().backward()
    gradients = {name: weight.grad for name, weight in layers.named_parameters()}
    return {**gradients, **dict(layers.named_buffers())}


def test_two_halves_are_one_batch(tmp_path: Path) -> None:
    def work() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        layers = synchronize_batch_norms(network(), torch.device("cpu"))
        found = passed(layers, pictures()[4 * rank : 4 * rank + 4])
        for name in dict(layers.named_parameters()):
            dist.all_reduce(found[name])
        torch.save(found, tmp_path / f"found-{rank}.pt")
        dist.destroy_process_group()

    assert prefork.fork(work, 2, tmp_path / "logs").wait(LIMIT_SECONDS) == [0, 0]
    whole = passed(network(), pictures())
    for rank in range(2):
        found = torch.load(tmp_path / f"found-{rank}.pt")
        assert found.keys() == whole.keys()
        for name, expected in whole.items():
            assert torch.allclose(found[name], expected, rtol=TOLERANCE, atol=TOLERANCE), name


def test_evaluation_asks_no_other_rank() -> None:
    layers = synchronize_batch_norms(network(), torch.device("cpu")).eval()
    assert sum(isinstance(one, SummedBatchNorm) for one in layers.modules()) == 2
    assert torch.equal(layers(pictures()), network().eval()(pictures()))
