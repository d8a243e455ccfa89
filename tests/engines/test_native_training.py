"""FSDP and DDP: the losses of one process, whatever the ranks, and resumes that change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trial_runs import (
    DDP2,
    FSDP2,
    LIMIT_SECONDS,
    MODULE_GPT,
    MODULE_LLAMA,
    PLAIN,
    PLAIN_LLAMA,
    TWO,
    MakeTrial,
    Trial,
    assert_near,
    assert_resumes_exactly,
    largest_difference,
    trained,
)
from variants import varied

from bench import prefork
from hpctrain.engines.train_json import parse_train_config
from hpctrain.plan.model.parameters import matrix_parameters, total_parameters
from hpctrain.train.engines.models.build import build_module
from hpctrain.train.engines.native.assembly import SummedBatchNorm, synchronize_batch_norms
from hpctrain.train.engines.native.engine import build_optimizer

# fp32 rounding of a mean over other partial sums, after six steps
ROUNDING = 5e-6
FSDP = dict(PLAIN, engine="fsdp")
LLAMA_FSDP = dict(MODULE_LLAMA, engine="fsdp")


def alone(base: dict[str, Any]) -> Trial:
    """One process with DDP's engine: plain PyTorch."""
    return trained(base, engine="ddp")


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": (PLAIN, dict(TWO, ddp=dict(bucket="1B"))),
    "gradients and optimizer": (LLAMA_FSDP, dict(TWO, shard_size=2, reshard_after_forward=False)),
    "recomputed, offloaded": (
        FSDP,
        dict(TWO, shard_size=2, cpu_offload=True, activation_checkpointing=True),
    ),
    "hybrid": (FSDP, dict(data_parallel_size=4, shard_size=2)),
}
MUON: dict[str, Any] = dict(PLAIN_LLAMA, optimizer="muon", muon_momentum=0.9, lr=1e-3, min_lr=1e-4)


def test_matrices_have_one_moment_and_the_planner_counts_them() -> None:
    for base in (MODULE_GPT, MODULE_LLAMA):
        config: Any = parse_train_config(json.dumps({**base, "optimizer": "muon"}))
        module = build_module(config, device=torch.device("cpu"))
        optimizer = build_optimizer(config, module)
        for weight in module.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        held: dict[str, int] = {}
        for state in optimizer.state.values():
            for name, value in state.items():
                held[name] = held.get(name, 0) + value.numel() * (value.ndim > 0)
        matrices, whole = matrix_parameters(config.model), total_parameters(config.model)
        assert held["momentum_buffer"] == matrices
        assert held["exp_avg"] == held["exp_avg_sq"] == whole - matrices


def test_muon_learns_the_same_on_two_ranks_and_resumes_exactly(trial: MakeTrial) -> None:
    whole = trial(MUON, save_interval_steps=4)
    assert whole.train() == [0]
    spread = trial(MUON, **TWO, micro_batch_size=1).goes_on(whole)
    # its products are in bf16
    assert_near(spread, whole, 5, 5e-5, 1e-3)
    assert_resumes_exactly(trial(MUON), whole)


@pytest.mark.parametrize("kind", varied(KINDS, "ddp"))
def test_losses_are_those_of_one_process(kind: str, trial: MakeTrial) -> None:
    base, changes = KINDS[kind]
    spread = trial(base, **{**changes, "micro_batch_size": 1})
    assert spread.train() == [0] * spread.world_size
    assert_near(spread, alone(base), 1, ROUNDING, 10 * ROUNDING)
    assert spread.losses[6] < spread.losses[1] - 0.1, "it learns"


RESUMED: dict[str, dict[str, Any]] = {
    "ddp": dict(DDP2, ddp=dict(bucket="1B"), async_save=True),
    "fsdp": FSDP2,
    "hybrid": dict(FSDP2, data_parallel_size=4, async_save=True),
}


@pytest.mark.parametrize("kind", varied(RESUMED, "fsdp"))
def test_a_resume_is_exact(kind: str, trial: MakeTrial) -> None:
    whole, resumed = trained(RESUMED[kind]), trial(RESUMED[kind])
    assert_resumes_exactly(resumed, whole)


MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "to 4 ranks": (FSDP, dict(data_parallel_size=4, shard_size=2)),
    "to ddp": (PLAIN, TWO),
}


@pytest.mark.parametrize("move", varied(MOVES, "to ddp"))
def test_a_checkpoint_moves_to_other_ranks_and_engines(move: str, trial: MakeTrial) -> None:
    base, changes = MOVES[move]
    source = alone(base)
    moved = trial(base, **changes, micro_batch_size=1)
    moved.goes_on(source)
    assert_near(moved, source, 5, ROUNDING, 10 * ROUNDING)
    assert "re-seeded" in moved.said


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("hook", ["bf16", "powersgd", "hierarchical"])
def test_fewer_bytes_between_nodes(hook: str, trial: MakeTrial) -> None:
    """Two nodes of two ranks. Not exact, or the hook was not there; near, or it does harm."""
    spread = trial(
        PLAIN,
        data_parallel_size=4,
        node_size=2,
        micro_batch_size=1,
        ddp=dict(hook=hook),
    )
    assert spread.train() == [0] * 4
    loss, _ = largest_difference(spread, alone(PLAIN), 1)
    exact_at_first = hook == "powersgd"  # low rank begins after more steps than these
    assert (loss <= ROUNDING) == exact_at_first and loss < 1e-3


@pytest.mark.variant("test_losses_are_those_of_one_process")
def test_one_node_needs_no_half_precision(trial: MakeTrial) -> None:
    spread = trial(PLAIN, **TWO, node_size=2, ddp=dict(hook="hierarchical"))
    assert spread.train() == [0, 0]
    assert largest_difference(spread, alone(PLAIN), 1)[0] <= ROUNDING


# -----------------------------------------------------------------------------------------------
# Batch statistics over ranks: two halves of a batch are normalized as one process does the whole.
# In fp64, so that what is left is no rounding: forward, gradients and the running statistics.

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
