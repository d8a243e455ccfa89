"""The rank that hangs is named from the stacks of a real trainer, whatever the others wait in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from trial_runs import LIMIT_SECONDS, Trial

from hpctrain.judge.odd_stacks import odd_ranks, places
from hpctrain.records.epochs import claim_epoch
from hpctrain.supervise.evidence.stack_inquiry import read_dumps, sizes, wait_for_dumps

DP2 = dict(data_parallel_size=2)
PP2 = dict(pipeline_model_parallel_size=2, pipeline_layer_split=((2,), (2,)))
TP2 = dict(tensor_model_parallel_size=2)
LONG = dict(train_steps=400, lr_decay_steps=400)


def _hangs(rank: int, where: str) -> Callable[[], None]:
    """From the third step on `rank` sleeps in a forward pass, or while it reads its data."""

    def prepare() -> None:
        from megatron.core.models.gpt import GPTModel

        from hpctrain.train.loop import Loop

        original_step, original_forward = Loop.one_step, GPTModel.forward
        hangs = False

        def one_step(self: Loop) -> object:
            nonlocal hangs
            hangs = os.environ["RANK"] == str(rank) and self.position.step >= 2
            if hangs and where == "loop":
                time.sleep(1000)
            return original_step(self)

        def forward(self: Any, *arguments: Any, **more: Any) -> object:
            if hangs:
                time.sleep(1000)
            return original_forward(self, *arguments, **more)

        Loop.one_step = one_step  # type: ignore[method-assign,assignment]
        GPTModel.forward = forward  # type: ignore[method-assign,assignment]

    return prepare


@pytest.mark.parametrize(
    ("layout", "rank", "where"),
    [
        (DP2, 1, "loop"),
        pytest.param(TP2, 0, "forward", marks=pytest.mark.variant),
        (PP2, 0, "forward"),
        pytest.param({**PP2, **DP2}, 3, "forward", marks=pytest.mark.variant),
        pytest.param({**PP2, **DP2}, 0, "loop", marks=pytest.mark.variant),
    ],
)
def test_one_rank_hangs(
    trial: Callable[..., Trial], layout: dict[str, Any], rank: int, where: str
) -> None:
    stuck = trial(**layout, **LONG)
    run = stuck.run
    assert claim_epoch(run.epochs, "this launch") == 1
    ranks = stuck.start(prepare=_hangs(rank, where), epoch=1)
    try:
        stuck.wait_for_step(2, ranks)
        end = time.monotonic() + LIMIT_SECONDS
        while True:  # until all have come to where they stay
            time.sleep(1.0)
            before = sizes(run, 1)
            assert len(before) == stuck.world_size
            ranks.signal(signal.SIGQUIT)
            wait_for_dumps(run, 1, before, 15.0)
            given = read_dumps(run, 1, before)
            found = odd_ranks(given.texts, given.nodes, stuck.world_size, given.packages)
            if [odd.rank for odd in found] == [rank] or time.monotonic() > end:
                break
    finally:
        ranks.signal(signal.SIGKILL)
        ranks.wait(LIMIT_SECONDS)
    assert [odd.rank for odd in found] == [rank], places(given.texts, given.packages)
    assert found[0].where.startswith(("one_step (", "forward (")), found[0].where
