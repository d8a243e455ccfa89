"""The check before training on real engines with gloo, where one rank is slow for real."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from late_products import late_products
from trial_runs import (
    EVALUATING,
    GPT,
    MODULE_GPT,
    PLAIN_LLAMA,
    TP2_PP2,
    ZERO,
    MakeTrial,
    Trial,
    trained,
    wrap,
)

from hpctrain.records.speed_checks import SpeedCheck, read_speed_checks
from hpctrain.train import speed_check

SLOW_RANK = 2
LLAMA_MODEL = PLAIN_LLAMA["model"]
# Ranks share the cores of a busy machine, on which one may get a tenth of another's time. Products
# that begin late are a thousand times slower than those of a rank with a core of its own.
CHECK: dict[str, Any] = dict(slow_gpu=0.05, slow_link=0.001, fabric="ethernet")


def checking(*axes: str, expected: float | None = None, **changes: Any) -> dict[str, Any]:
    found = [
        dict(axis=axis, message_bytes=2**21, expected_bytes_per_second=expected) for axis in axes
    ]
    return {"speed_check": {**CHECK, "axes": found, **changes}}


def on_two_nodes(check: str = "0", slow: int | None = SLOW_RANK) -> Callable[[], None]:
    """A `prepare`: two ranks on each node; the products of one rank are slow.

    Its messages are not: so slow ones would use up the time of the second round.
    """

    def prepare() -> None:
        rank = int(os.environ["RANK"])
        os.environ.update(SLURMD_NODENAME=f"n{rank // 2}", HPCTRAIN_SPEED_CHECK=check)

        @wrap(speed_check, "measure_products")
        def measured(real: Any, *given: Any) -> float:
            with late_products() if rank == slow else nullcontext():
                return real(*given)

    return prepare


def only_check(trial: Trial) -> SpeedCheck:
    (check,) = read_speed_checks(trial.run)
    return check


@pytest.mark.variant("test_the_launch_ends_where_the_node_can_be_replaced")
def test_a_slow_rank_is_reported_and_training_goes_on_as_without(trial: MakeTrial) -> None:
    settings = dict(TP2_PP2, dropout=0.1, async_save=True, **EVALUATING)
    checked = trial(**checking("tp", "pp"), **settings)
    assert checked.train(prepare=on_two_nodes()) == [0] * 4
    check = only_check(checked)
    assert check.nodes == ("n0", "n0", "n1", "n1") and check.accelerator == "cpu"
    named = [part for part in check.slow if part.certain]
    assert {(part.part, part.rank) for part in named} == {("gpu", SLOW_RANK)}, check
    assert named[0].nodes == ("n1",) and "rank 2 on n1: matrix products" in named[0].message
    assert "gpu" in check.twice and not check.leaves
    shapes = [(axis.axis, axis.operation, axis.ranks_per_group, axis.groups) for axis in check.axes]
    assert shapes == [
        ("tp", "all_reduce", 2, (0, 0, 2, 2)),
        ("pp", "send_recv", 2, (0, 1, 0, 1)),
    ]
    assert all(rate and rate > 0 for axis in check.axes for rate in axis.bus_bytes_per_second)
    plain = trained(**settings)
    assert checked.exact == plain.exact, "the check draws no random numbers"
    assert read_speed_checks(plain.run) == []


def test_the_launch_ends_where_the_node_can_be_replaced(trial: MakeTrial) -> None:
    ddp = trial(MODULE_GPT, data_parallel_size=4, **checking("dp"))
    assert ddp.train(prepare=on_two_nodes("1")) == [1] * 4
    check = only_check(ddp)
    assert check.leaves and [part.nodes for part in check.slow] == [("n1",)]
    ends = ddp.exits()
    assert [(end.outcome, end.cause) for end in ends] == [("crash", "node_failure")] * 4
    assert all("rank 2 on n1: matrix products" in (end.message or "") for end in ends)
    assert ddp.rows == []


@pytest.mark.variant("test_the_launch_ends_where_the_node_can_be_replaced")
def test_a_launch_that_is_not_to_check_does_not(trial: MakeTrial) -> None:
    ddp = trial(MODULE_GPT, data_parallel_size=2, **checking("dp"))
    assert ddp.train(prepare=on_two_nodes("off")) == [0] * 2
    assert read_speed_checks(ddp.run) == []


def no_time_is_left() -> None:
    """A `prepare`: the limit of time is over when the check begins."""
    on_two_nodes(slow=None)()
    speed_check._LIMIT_SECONDS = speed_check._LEAST_SECONDS / 2


@pytest.mark.variant("test_the_launch_ends_where_the_node_can_be_replaced")
def test_nothing_is_begun_when_the_time_is_over(trial: MakeTrial) -> None:
    ddp = trial(MODULE_GPT, data_parallel_size=2, **checking("dp"))
    assert ddp.train(prepare=no_time_is_left) == [0] * 2
    check = only_check(ddp)
    assert check.product_flops_per_second == (None, None) and check.axes == ()
    assert check.skipped == ("matrix products: the limit of 5 s", "axis dp: the limit of 5 s")
    assert check.slow == () and len(ddp.rows) == 6


# Far above what a message takes on a busy machine.
LINK_SECONDS = 1.0


def one_link_is_slow() -> None:
    """A `prepare`: every message and every sum of one rank begins late, as behind a bad cable. This
    machine has one network interface for all ranks, and none that could be slowed for one."""
    on_two_nodes(slow=None)()
    if os.environ["RANK"] != str(SLOW_RANK):
        return
    real: Any = speed_check.dist

    def late(name: str) -> Any:
        def operation(*given: Any, **keywords: Any) -> Any:
            time.sleep(LINK_SECONDS)
            return getattr(real, name)(*given, **keywords)

        return operation

    class LateLink:
        all_reduce = staticmethod(late("all_reduce"))
        batch_isend_irecv = staticmethod(late("batch_isend_irecv"))

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    speed_check.dist = LateLink()  # type: ignore[assignment]


@pytest.mark.variant("test_the_launch_ends_where_the_node_can_be_replaced")
def test_a_slow_link_is_found_pair_by_pair(trial: MakeTrial) -> None:
    """The plan assumes more than the one group reaches, and its pairs show whose link it is."""
    given = checking("dp", expected=1e15, slow_link=0.05, slow_gpu=0.0001)
    ddp = trial(MODULE_GPT, data_parallel_size=4, **given)
    assert ddp.train(prepare=one_link_is_slow) == [0] * 4
    check = only_check(ddp)
    (axis,) = check.axes
    assert len(axis.best_pair_bytes_per_second) == 4 and check.rounds == 2
    named = [(part.part, part.rank, part.nodes) for part in check.slow if part.certain]
    assert named == [("link", SLOW_RANK, ("n1",))], check


@pytest.mark.variant("test_the_launch_ends_where_the_node_can_be_replaced")
@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        (MODULE_GPT, dict(engine="fsdp", shard_size=2, data_parallel_size=2), ["dp 2"]),
        (ZERO, dict(model=LLAMA_MODEL, tensor_parallel=2), ["tp 2", "dp 2"]),
        (ZERO, dict(pipeline_stages=(1, 1)), ["pp 2", "not dp"]),
        (GPT, dict(context_parallel_size=1, data_parallel_size=2), ["dp 2"]),
    ],
)
def test_the_axes_of_each_engine(
    trial: MakeTrial, base: dict[str, Any], changes: dict[str, Any], expected: list[str]
) -> None:
    made = trial(base, **changes, **checking("tp", "dp", "pp", slow_gpu=0.0001, slow_link=1e-9))
    assert made.train(prepare=on_two_nodes(slow=None)) == [0] * made.world_size
    check = only_check(made)
    found = [f"{axis.axis} {axis.ranks_per_group}" for axis in check.axes]
    missing = [
        f"not {axis}" for axis in ("dp",) if any(f"axis {axis}:" in s for s in check.skipped)
    ]
    assert found + missing == expected, check.skipped
