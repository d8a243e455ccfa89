"""FSDP and DDP: the losses of one process, whatever the ranks, and resumes that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deepspeed_trials import PLAIN
from trial_runs import (
    DDP2,
    FSDP2,
    MODULE_LLAMA,
    Trial,
    largest_difference,
    trained,
)
from variants import varied

# fp32 rounding of a mean over other partial sums, after six steps
ROUNDING = 5e-6
FSDP = dict(PLAIN, engine="fsdp")
LLAMA_FSDP = dict(MODULE_LLAMA, engine="fsdp")
TWO = dict(data_parallel_size=2)


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


@pytest.mark.parametrize("kind", varied(KINDS, "ddp"))
def test_losses_are_those_of_one_process(kind: str, trial: Callable[..., Trial]) -> None:
    base, changes = KINDS[kind]
    spread = trial(base, **{**changes, "micro_batch_size": 1})
    assert spread.train() == [0] * spread.world_size
    loss, norm = largest_difference(spread, alone(base), 1)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING
    assert spread.losses[6] < spread.losses[1] - 0.1, "it learns"


RESUMED: dict[str, dict[str, Any]] = {
    "ddp": dict(DDP2, ddp=dict(bucket="1B"), async_save=True),
    "fsdp": FSDP2,
    "hybrid": dict(FSDP2, data_parallel_size=4, async_save=True),
}


@pytest.mark.parametrize("kind", varied(RESUMED, "fsdp"))
def test_a_resume_is_exact(kind: str, trial: Callable[..., Trial]) -> None:
    whole, resumed = trained(RESUMED[kind]), trial(RESUMED[kind])
    resumed.adopt(whole, 4)
    assert resumed.train(resume=4) == [0] * resumed.world_size
    assert resumed.exact == {step: row for step, row in whole.exact.items() if step > 4}


MOVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "to 4 ranks": (FSDP, dict(data_parallel_size=4, shard_size=2)),
    "to ddp": (PLAIN, TWO),
}


@pytest.mark.parametrize("move", varied(MOVES, "to ddp"))
def test_a_checkpoint_moves_to_other_ranks_and_engines(
    move: str, trial: Callable[..., Trial]
) -> None:
    base, changes = MOVES[move]
    source = alone(base)
    moved = trial(base, **changes, micro_batch_size=1)
    moved.adopt(source, 4)
    assert moved.train(resume=4) == [0] * moved.world_size
    loss, norm = largest_difference(moved, source, 5)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING
    assert "re-seeded" in "".join(path.read_text() for path in moved.run.logs.rglob("*.log"))


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("hook", varied(["bf16", "powersgd", "hierarchical"], "hierarchical"))
def test_fewer_bytes_between_nodes(hook: str, trial: Callable[..., Trial]) -> None:
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
def test_one_node_needs_no_half_precision(trial: Callable[..., Trial]) -> None:
    spread = trial(PLAIN, **TWO, node_size=2, ddp=dict(hook="hierarchical"))
    assert spread.train() == [0, 0]
    assert largest_difference(spread, alone(PLAIN), 1)[0] <= ROUNDING
