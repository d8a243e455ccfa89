"""Every layout of megatron-core computes what one process computes, from the same weights.

Loss and gradient norm are compared: a wrong gradient with a right loss is the likelier fault of the
two. Options of production that a CPU can train are compared, too: every bit or the tolerance of the
layouts where mathematics gives the same numbers, a bound where a smaller precision does not.
Options of a GPU: see `test_gpu_settings`. Exact resumes: see `test_trainer_resume`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from trial_runs import (
    DP2,
    EP2,
    GPT,
    LLAMA,
    MOE,
    PP2,
    TOLERANCE,
    TP2,
    TWO,
    VPP2,
    MakeTrial,
    Trial,
    assert_near,
    largest_difference,
    make_trial,
    trained,
    wrap,
)
from variants import varied

from hpctrain.engines import megatron as documents
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.plan.documents import Layout
from hpctrain.plan.layout_words import ORDERS, Order
from hpctrain.plan.mesh.candidate import candidate_of
from hpctrain.plan.mesh.placement import strides
from hpctrain.plan.mesh.rules import ORDER, broken_rules
from hpctrain.records.run_records import TrainerExit
from hpctrain.spec.run import ParallelSpec, RunSpec
from hpctrain.train import software
from hpctrain.train.engines.megatron import model, snapshot
from hpctrain.train.engines.megatron.core_versions.supported import SUPPORTED
from hpctrain.train.engines.megatron.mesh import parallel_sizes
from hpctrain.train.engines.megatron.snapshot import MegatronSnapshot

SP = dict(sequence_parallel=True)
PIPELINES_NEAR: Order = "tp-cp-ep-pp-dp"
DATA_NEAR: Order = "tp-cp-ep-dp-pp"
BERT: dict[str, Any] = dict(GPT, model_type="bert")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {**TP2, **PP2},
    "tp2 sp": {**TP2, **SP},
    "tp4": dict(tensor_model_parallel_size=4),
    "dp2 overlap": DP2,
    "pp2 vpp2": VPP2,
    "pp2 vpp2 dp2 overlap": {**VPP2, **DP2},
    "tp2 sp pp2": {**TP2, **SP, **PP2},
    "tp2 pp2 dp2, pipelines near": {**TP2, **PP2, **TWO, "parallel_order": PIPELINES_NEAR},
    # the middle stage reads nothing
    "uneven pp3": dict(
        pipeline_model_parallel_size=3,
        pipeline_layer_split=((2,), (1,), (1,)),
        eval_interval_steps=4,
    ),
    "uneven vpp2": {**VPP2, "pipeline_layer_split": ((1, 0), (2, 1))},
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: (GPT, layout) for name, layout in LAYOUTS.items()},
    **{f"llama, {name}": (LLAMA, LAYOUTS[name]) for name in ("tp2 sp pp2", "dp2 overlap", "tp4")},
    "llama that predicts, pp2": (dict(LLAMA, mtp_num_layers=1), PP2),
    **{
        f"bert, {name}": (BERT, LAYOUTS[name])
        for name in ("tp2 sp pp2", "pp2 vpp2 dp2 overlap", "tp2 pp2")
    },
}


@pytest.mark.parametrize("name", varied(CASES, "pp2 vpp2 dp2 overlap"))
def test_layout_equals_one_process(name: str, trial: MakeTrial) -> None:
    """From the checkpoint that one process wrote after step 4, to step 6."""
    base, layout = CASES[name]
    reference = trained(base)
    assert_near(trial(base, **layout).goes_on(reference), reference, 5)


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize("layout", [PP2, {**TP2, **PP2}])
def test_bf16_follows_fp32(layout: dict[str, Any], gpt_reference: Trial, trial: MakeTrial) -> None:
    full, half = gpt_reference, trial(precision="bf16", **layout)
    assert set(half.train()) == {0}
    first, last = min(half.losses), max(half.losses)
    assert half.losses[last] < half.losses[first] - 0.1
    assert abs(half.losses[last] - full.losses[last]) < 0.2
    assert half.exact != full.exact


@pytest.mark.variant("test_resume_is_exact")
def test_words_of_bert_see_what_comes_after_them(trial: MakeTrial) -> None:
    def causal_mask() -> None:
        """A mask as a GPT has it: what a bidirectional model must not have."""

        @wrap("megatron.core.models.bert.bert_model:BertModel", "bert_extended_attention_mask")
        def causal(_real: Any, _self: Any, attention_mask: Any) -> Any:
            length = attention_mask.shape[1]
            return torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)

    blind = trial(BERT, train_steps=2)
    assert blind.train(prepare=causal_mask) == [0]
    assert blind.exact[1] != trained(BERT).exact[1]


# -- the order of axes: megatron-core builds the groups that the plan says, and trains the same ----

# The norm is a sum over ranks in their order; clipping would carry its last bits into the weights.
UNCLIPPED = 1e9
NORM_TOLERANCE = 1e-6
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
FOUR: dict[str, Any] = {**PP2, **TWO}


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


def keep_state_size(directory: Path) -> Callable[[], None]:
    """A `prepare`: each rank writes how many weights its optimizer updates, and all that it has."""

    def prepare() -> None:
        @wrap("hpctrain.train.engines.megatron.engine:MegatronEngine", "update")
        def update(real: Any, self: Any, *given: Any) -> Any:
            done = real(self, *given)
            groups = self.optimizer.inner.param_groups
            held = sum(one.numel() for group in groups for one in group["params"])
            weights = sum(one.numel() for one in self.model.wrapped[0].parameters())
            (directory / f"held-{dist.get_rank()}").write_text(f"{held} {weights}")
            return done

    return prepare


@pytest.mark.variant("test_layout_equals_one_process")
def test_instances_of_the_optimizer_learn_the_same_from_larger_shards(
    trial: MakeTrial, tmp_path: Path
) -> None:
    run = trial(**dict(DP2, data_parallel_size=4), num_distributed_optimizer_instances=2)
    assert run.train(prepare=keep_state_size(tmp_path)) == [0] * 4
    assert_near(run, trained(GPT), 1, norm=1e-4)
    found = [(tmp_path / f"held-{rank}").read_text().split() for rank in range(4)]
    held, weights = [int(one[0]) for one in found], int(found[0][1])
    assert sum(held[:2]) == sum(held[2:]) == weights


def test_levels_of_context_parallelism_are_groups_of_ranks() -> None:
    sizes = dict(context_parallel_size=4, hierarchical_context_parallel_sizes=(2, 2))
    config = MegatronConfig(**{**GPT, **TP2, **sizes})
    with megatron(config, 2, 8):
        levels = parallel_state.get_hierarchical_context_parallel_groups()
        found = [dist.get_process_group_ranks(group) for group in levels]
    assert found == [[0, 2], [2, 6]], "near ranks of tp 2 exchange heads, far ones are a ring"
    settings = model.transformer_settings(config)
    assert settings.cp_comm_type == "a2a+p2p"
    assert settings.hierarchical_context_parallel_sizes == [2, 2]


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
@pytest.mark.parametrize("settings", [FOUR, {**VPP2, **DP2}], ids=["plain", "interleaved, overlap"])
def test_the_order_changes_no_loss(settings: dict[str, Any], trial: MakeTrial) -> None:
    """Two replicas add the same two gradients, whichever ranks they are on."""
    common = dict(settings, dropout=0.1, clip_grad=UNCLIPPED)
    near = trained(**common, parallel_order=DATA_NEAR)
    far = trial(**common, parallel_order=PIPELINES_NEAR)
    assert far.train() == [0] * 4
    assert near.losses == far.losses
    assert len(near.losses) == 6
    assert largest_difference(near, far, 1)[1] <= NORM_TOLERANCE


@pytest.mark.variant("test_resume_at_other_layouts")
def test_a_checkpoint_goes_from_one_order_to_the_other(trial: MakeTrial) -> None:
    """Plans change: a run that was saved in one order goes on in the other."""
    common = dict(FOUR, dropout=0.1, clip_grad=UNCLIPPED)
    whole = trained(**common, parallel_order=DATA_NEAR)
    other = trial(**common, parallel_order=PIPELINES_NEAR).goes_on(whole)
    assert other.losses == {step: loss for step, loss in whole.losses.items() if step > 4}
    assert len(other.losses) == 2


# -- mixture of experts --------------------------------------------------------------------------

TP2_SP = {**TP2, **SP}
FOUR_EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2 ep2": {**TWO, **EP2},
    "pp2 dp2 ep2": {**PP2, **TWO, **EP2},
    "tp2 ep2": {**TP2_SP, **EP2},
    "pp2, uneven": {**PP2, "pipeline_layer_split": ((3,), (1,))},
}
ETP2 = dict(expert_tensor_parallel_size=2)
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    **FOUR_EXPERT_LAYOUTS,
    "tp2 etp2": {**TP2_SP, **ETP2},
    "tp2 ep2 etp1": {**TP2_SP, **EP2, "expert_tensor_parallel_size": 1},
    "dp4 ep2 etp2": {**DP2, "data_parallel_size": 4, **EP2, **ETP2, "global_batch_size": 8},
    "tp2 dp2 ep2 etp2": {**TP2_SP, **DP2, **EP2, **ETP2},
}


@pytest.mark.parametrize("name", varied(EXPERT_LAYOUTS, "dp2 ep2"))
def test_a_fresh_start_is_that_of_one_process(name: str) -> None:
    """From the first step on: initial weights do not depend on the layout."""
    layout = trained(MOE, **EXPERT_LAYOUTS[name])
    assert_near(layout, trained(MOE, global_batch_size=layout.config.global_batch_size), 1)


def weights_only() -> None:
    """In a rank, before it trains: resume with the model alone, and an optimizer that is new.

    With expert parallelism megatron-core's optimizer state has another form than without.
    """

    @wrap(MegatronSnapshot, "_sharded_parts")
    def sharded_parts(real: Any, self: Any, metadata: Any, *, is_loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = real(self, metadata, is_loading=is_loading)
        if is_loading:
            del state["optimizer"]
        return state

    @wrap(MegatronSnapshot, "_load_parts")
    def load_parts(_real: Any, self: Any, loaded: dict[str, Any]) -> None:
        for index, chunk in enumerate(self.model.bare):
            chunk.load_state_dict(loaded.get(f"model{index}", {}), strict=True)
        self.optimizer.inner.reload_model_params()
        self.optimizer.schedule.load_state_dict(loaded["schedule"])

    snapshot.check_expert_spread = lambda *_: None


@pytest.fixture(scope="module")
def moe_continued(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Steps 3 to 6 on one process, from the reference's weights."""
    made = make_trial(tmp_path_factory.mktemp("moe") / "continued", MOE)
    return made.goes_on(trained(MOE), 2, prepare=weights_only)


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
@pytest.mark.parametrize("name", FOUR_EXPERT_LAYOUTS)
def test_experts_layout_equals_one_process(
    name: str, moe_continued: Trial, trial: MakeTrial
) -> None:
    layout = trial(MOE, **FOUR_EXPERT_LAYOUTS[name])
    assert_near(layout.goes_on(moe_continued, 2, prepare=weights_only), moe_continued, 3)


def keep_first_weights(directory: Path) -> Callable[[], None]:
    """In a rank, before it trains: each part of the first weights goes to a file of the rank."""

    def prepare() -> None:
        @wrap(model, "draw_weights")
        def draw(real: Any, seed: int, chunks: list[Any]) -> None:
            real(seed, chunks)
            parts = {
                (part.key, tuple(part.global_offset)): part.data.detach().clone()
                for chunk in chunks
                for part in model.sharded_parts(chunk.sharded_state_dict())
            }
            torch.save(parts, directory / f"{os.environ['RANK']}.pt")

    return prepare


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
def test_experts_of_other_ranks_are_other_experts(trial: MakeTrial, tmp_path: Path) -> None:
    """A fresh start on two ranks and on one: the same four experts, which all differ."""
    found: list[dict[Any, torch.Tensor]] = []
    for name, layout in {"one": {}, "two": {**TWO, **EP2}}.items():
        directory = tmp_path / name
        directory.mkdir()
        made = trial(MOE, **layout, train_steps=1)
        assert set(made.train(prepare=keep_first_weights(directory))) == {0}
        ranks = [torch.load(directory / f"{rank}.pt") for rank in range(made.world_size)]
        found.append({place: part for parts in ranks for place, part in parts.items()})
        if name == "two":
            experts = [{place for place in parts if ".experts." in place[0]} for parts in ranks]
            assert len(experts[0]) == len(experts[1]) > 0 and not experts[0] & experts[1]
    one, two = found
    assert one.keys() == two.keys()
    for place, part in one.items():
        assert torch.equal(part, two[place]), place
    drawn: dict[str, list[torch.Tensor]] = {}
    for (key, _), part in one.items():
        if ".experts." in key:
            drawn.setdefault(key, []).append(part)
    # of the gated layer there are two halves of each expert
    assert {len(parts) for parts in drawn.values()} == {4, 8}
    for parts in drawn.values():
        for number, part in enumerate(parts):
            assert not any(torch.equal(part, other) for other in parts[:number])


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
def test_the_balance_loss_is_in_the_gradients_and_not_in_the_reported_loss(
    trial: MakeTrial,
) -> None:
    without = trial(MOE, train_steps=2)
    assert without.train(prepare=lambda: setattr(documents, "BALANCE_LOSS_WEIGHT", 0.0)) == [0]
    balanced, plain = trained(MOE).rows[0], without.rows[0]
    assert balanced.loss_hex == plain.loss_hex
    assert balanced.grad_norm != plain.grad_norm


def test_spreading_experts_in_the_middle_of_a_run_is_refused(trial: MakeTrial) -> None:
    spread = trial(MOE, **TWO, **EP2)
    spread.adopt(trained(MOE), 2)
    ranks = spread.start(resume=2)
    assert set(ranks.wait(60)) == {TrainerExit.CONFIG_ERROR}
    assert "expert_model_parallel_size was 1 and is now 2" in ranks.log(0)


WHOLE_ON_TP = dict(TP2_SP, expert_tensor_parallel_size=1)


def test_whole_experts_on_ranks_of_tp_alone_are_refused(trial: MakeTrial) -> None:
    assert set(trial(MOE, **WHOLE_ON_TP).train()) == {TrainerExit.CONFIG_ERROR}


@pytest.mark.variant("test_whole_experts_on_ranks_of_tp_alone_are_refused")
def test_whole_experts_on_ranks_of_tp_alone_would_learn_other_things(trial: MakeTrial) -> None:
    """Why `preflight` refuses it; the newest megatron-core sums their gradients as it should."""

    def unchecked() -> None:
        from hpctrain.train.engines.megatron import preflight

        preflight.engine_problems = lambda config, run: iter(())

    layout = trial(MOE, **WHOLE_ON_TP)
    assert set(layout.train(prepare=unchecked)) == {0}
    loss, _ = largest_difference(layout, trained(MOE), 1)
    wrong = software.megatron_core() != SUPPORTED[-1].number
    assert (loss > 1e-3) == wrong and (wrong or loss <= TOLERANCE)


# -- options that a CPU can train ------------------------------------------------------------------

CHECKPOINT = ("megatron.core.tensor_parallel", "checkpoint")
FUSED_LOSS = (
    "megatron.core.models.common.language_module.language_module",
    "fused_vocab_parallel_cross_entropy",
)
OVERLAPPED = (
    "megatron.core.transformer.moe.shared_experts:SharedExpertMLP",
    "linear_fc1_forward_and_act",
)
ASSEMBLY = "hpctrain.train.engines.megatron.assembly"
TIMES = {
    ("hpctrain.train.engines.megatron.engine:LayerGraphs", "before_step"): 2,
    (ASSEMBLY, "open_userbuffers"): 1,
    (ASSEMBLY, "prepare_environment"): 1,
}


def counting(calls: Path, place: str, name: str) -> Callable[[], None]:
    """A `prepare`: each call of megatron-core's function adds a byte to a file."""

    def prepare() -> None:
        @wrap(place, name)
        def called(real: Any, *arguments: Any, **keywords: Any) -> Any:
            with calls.open("a") as stream:
                stream.write("x")
            return real(*arguments, **keywords)

    return prepare


def test_the_trainer_asks_for_graphs_and_userbuffers(trial: MakeTrial) -> None:
    """Whether a run has them is decided there; on a CPU none has."""
    short = trial(train_steps=2)
    calls = {place: short.run.directory / place[1] for place in TIMES}

    def prepare() -> None:
        for place, path in calls.items():
            counting(path, *place)()

    assert short.train(prepare=prepare) == [0]
    assert {place: len(path.read_text()) for place, path in calls.items()} == TIMES


def parts(*modules: str) -> dict[str, Any]:
    return dict(recompute_granularity="selective", recompute_modules=modules)


FULL: dict[str, Any] = dict(recompute_granularity="full")
RECOMPUTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": (GPT, FULL),
    "selective": (GPT, dict(recompute_granularity="selective")),
    # the first layers of a chunk are run twice, the others once
    "one layer": (GPT, dict(FULL, recompute_num_layers=1)),
    "three layers": (GPT, dict(FULL, recompute_num_layers=3)),
    "mlp": (LLAMA, parts("mlp")),
    "core_attn, mlp": (LLAMA, parts("core_attn", "mlp")),
    "moe": (MOE, parts("moe")),
}


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recompute_changes_no_bit(name: str, trial: MakeTrial) -> None:
    base, settings = RECOMPUTED[name]
    plain, some = trained(base, dropout=0.1), trial(base, dropout=0.1, **settings)
    calls = some.run.directory / "calls"
    assert some.train(prepare=counting(calls, *CHECKPOINT)) == [0]
    assert plain.exact == some.exact and len(plain.exact) == 6
    assert calls.exists(), "nothing was recomputed"
    if layers := settings.get("recompute_num_layers"):
        microbatches = base["global_batch_size"] // some.config.micro_batch_size
        assert len(calls.read_text()) == layers * microbatches * 6


@pytest.mark.variant("test_layout_equals_one_process")
def test_recompute_under_sequence_parallelism_changes_no_bit(trial: MakeTrial) -> None:
    settings = dict(dropout=0.1, train_steps=3, **TP2_SP)
    plain, recomputed = trial(**settings), trial(recompute_granularity="full", **settings)
    assert plain.train() == recomputed.train() == [0, 0]
    assert plain.exact == recomputed.exact


@pytest.mark.variant("test_the_trainer_asks_for_graphs_and_userbuffers")
def test_gradients_summed_in_bf16_follow_those_in_fp32() -> None:
    """Other numbers, because each sum is rounded, and as good ones."""
    settings = dict(DP2, precision="bf16", dropout=0.1)
    full, half = trained(**settings), trained(**settings, grad_reduce_in_fp32=False)
    assert full.exact != half.exact, "nothing is summed in bf16"
    loss, norm = largest_difference(full, half, 1)
    assert loss < 0.05 and norm < 0.05


FUSED: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    "loss": (dict(GPT, precision="bf16"), dict(cross_entropy_loss_fusion=True), FUSED_LOSS),
    "loss, tp2": (
        dict(GPT, precision="bf16", **TP2_SP),
        dict(cross_entropy_loss_fusion=True),
        FUSED_LOSS,
    ),
    # the shared expert runs while tokens travel
    "shared expert": (MOE, dict(moe_shared_expert_overlap=True), OVERLAPPED),
}


@pytest.mark.variant("test_the_trainer_asks_for_graphs_and_userbuffers")
@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused_or_overlapped_computes_the_same(name: str, trial: MakeTrial) -> None:
    base, settings, function = FUSED[name]
    fused = trial(base, **settings)
    calls = fused.run.directory / "calls"
    assert set(fused.train(prepare=counting(calls, *function))) == {0}
    assert calls.exists(), "nothing was fused"
    assert_near(fused, trained(base), 1)
