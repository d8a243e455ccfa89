"""The order of axes: megatron-core builds the groups that the plan says, and trains the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, get_args

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from trial_runs import GPT, Trial, largest_difference, trained

from hpctrain.engines.megatron import MegatronConfig
from hpctrain.plan.documents import Layout
from hpctrain.plan.layout_words import ORDERS, Order
from hpctrain.plan.mesh.candidate import candidate_of
from hpctrain.plan.mesh.placement import strides
from hpctrain.plan.mesh.rules import ORDER, broken_rules
from hpctrain.spec.run import ParallelSpec, RunSpec
from hpctrain.train.engines.megatron.mesh import parallel_sizes

PIPELINES_NEAR: Order = "tp-cp-ep-pp-dp"
DATA_NEAR: Order = "tp-cp-ep-dp-pp"
# The norm is a sum over ranks in their order; clipping would carry its last bits into the weights.
UNCLIPPED = 1e9
SPEC = RunSpec.model_validate(
    dict(
        name="orders",
        model=dict(layers=2, hidden=16, heads=2, vocab=64, seq=16),
        batch={"global": 64, "micro": 1},
        budget={"steps": 1},
        optimizer={"lr": 1e-3},
        checkpoint={"every_steps": 1},
        resources={"gpus": 4},
    )
)
NORM_TOLERANCE = 1e-6
FOUR = dict(
    pipeline_model_parallel_size=2,
    pipeline_layer_split=((2,), (2,)),
    data_parallel_size=2,
)
INTERLEAVED = dict(
    FOUR,
    virtual_pipeline_model_parallel_size=2,
    pipeline_layer_split=((1, 1), (1, 1)),
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)


def layout(order: Order, **sizes: int) -> Layout:
    return Layout(vpp=1, sequence_parallel=False, order=order, **sizes)


def groups(stride: int, size: int, world: int) -> list[list[int]]:
    """What the plan means by `size` ranks, `stride` apart."""
    block = stride * size
    return [
        [start + offset + stride * member for member in range(size)]
        for start in range(0, world, block)
        for offset in range(stride)
    ]


@contextmanager
def megatron(config: MegatronConfig, rank: int, world: int) -> Iterator[None]:
    """megatron-core's groups as `rank` of `world` sees them, without processes."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(
            **parallel_sizes(config), create_gloo_process_groups=False
        )
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_the_spec_knows_all_orders() -> None:
    assert get_args(Order) == ORDERS
    asked = get_args(ParallelSpec.model_fields["order"].annotation)
    assert asked == ("auto", *ORDERS)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", [(2, 1, 3, 4), (1, 2, 4, 2), (4, 2, 2, 3)])
def test_groups_are_those_of_the_plan(order: Order, sizes: tuple[int, ...]) -> None:
    """Against megatron's own generator, so cp with pp is looked at in both orders."""
    tp, cp, dp, pp = sizes
    mesh = layout(order, tp=tp, cp=cp, dp=dp, pp=pp)
    real = parallel_state.RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    for axis, stride in strides(mesh).items():
        planned = groups(stride, getattr(mesh, axis), mesh.world_size)
        assert sorted(real.get_ranks(axis)) == sorted(planned), axis


@pytest.mark.parametrize("order", ORDERS)
def test_the_trainer_takes_the_order(order: Order) -> None:
    config = MegatronConfig(**{**GPT, **FOUR, "parallel_order": order})
    mesh = layout(order, tp=1, cp=1, dp=2, pp=2)
    for rank in range(4):
        with megatron(config, rank, 4):
            stage = rank // strides(mesh)["pp"] % 2
            assert parallel_state.get_pipeline_model_parallel_rank() == stage
            assert parallel_state.get_data_parallel_rank() == rank // strides(mesh)["dp"] % 2


def test_refusals_are_those_of_megatron() -> None:
    seen = set()
    for tp, cp, pp, ep, order in product((1, 2), (1, 2), (1, 2), (1, 2, 4), ORDERS):
        world = tp * cp * pp * 4
        changes = dict(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            parallel_order=order,
        )
        config = MegatronConfig(**{**GPT, **changes})
        values = candidate_of(SPEC, ParallelSpec(tp=tp, cp=cp, pp=pp, ep=ep, order=order), world)
        refused = False
        try:
            with megatron(config, 0, world):
                pass
        except AssertionError:
            refused = True
        assert bool(broken_rules(SPEC, values, [ORDER])) == refused, (tp, cp, pp, ep, order)
        seen.add(refused)
    assert seen == {True, False}


@pytest.mark.variant("test_resume_at_other_layouts")
@pytest.mark.parametrize("name", ["plain", "interleaved, overlap"])
def test_the_order_changes_no_loss(name: str, trial: Callable[..., Trial]) -> None:
    """Two replicas add the same two gradients, whichever ranks they are on."""
    settings: dict[str, Any] = {"plain": FOUR, "interleaved, overlap": INTERLEAVED}[name]
    common = dict(settings, dropout=0.1, clip_grad=UNCLIPPED)
    near = trained(**common, parallel_order=DATA_NEAR)
    far = trial(**common, parallel_order=PIPELINES_NEAR)
    assert far.train() == [0] * 4
    assert near.losses == far.losses
    assert len(near.losses) == 6
    assert largest_difference(near, far, 1)[1] <= NORM_TOLERANCE


@pytest.mark.variant("test_resume_at_other_layouts")
def test_a_checkpoint_goes_from_one_order_to_the_other(trial: Callable[..., Trial]) -> None:
    """Plans change: a run that was saved in one order goes on in the other."""
    common = dict(FOUR, dropout=0.1, clip_grad=UNCLIPPED)
    whole = trained(**common, parallel_order=DATA_NEAR)
    other = trial(**common, parallel_order=PIPELINES_NEAR)
    other.adopt(whole, 4)
    assert other.train(resume=4) == [0] * 4
    assert other.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert len(other.losses) == 2
