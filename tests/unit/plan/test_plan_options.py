"""Settings of production in whole plans: refused where a GPU lacks them, counted, and explained."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of
from specimens import LLAMA7B, cluster, run_spec
from variants import varied

from hpctrain.base.errors import DoesNotFitError
from hpctrain.plan.abilities.sharding import sharding_problems
from hpctrain.plan.cost.from_spec import case_of, machine_for
from hpctrain.plan.cost.memory import peak_bytes
from hpctrain.plan.cost.prediction import candidate_peak, step_parts
from hpctrain.plan.documents import Plan
from hpctrain.plan.mesh.candidate import columns_of
from hpctrain.plan.mesh.stages import stage_expert_parameters
from hpctrain.plan.model.number_formats import (
    gradient_bytes,
    low_weight_bytes,
    sent_weight_bytes,
)
from hpctrain.plan.model.parameters import expert_parameters, expert_tp
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import Knowledge, PlanRequest
from hpctrain.plan.search.layouts import search
from hpctrain.plan.search.space import freedom_of
from hpctrain.spec.profile import ClusterProfile

SMALL = {**LLAMA7B, "layers": 8, "hidden": 2048, "heads": 16, "ffn": 5632, "seq": 2048}
LARGE = {**LLAMA7B, "hidden": 16384, "heads": 128, "ffn": 53248, "seq": 8192, "layers": 4}
MIXTURE = {**SMALL, "moe": dict(experts=8, top_k=2, ffn=2048, shared_ffn=2048)}
GPUS = {"a100": ("a100", "80GiB"), "h100": ("h100", "80GiB"), "b200": ("b200", "179GiB")}
GPU_FORMATS = {
    "a100": "A100-80GB SXM has no fp8 products (it has bf16, fp16, fp32): set `precision: bf16`",
    "h100": "H100-80GB SXM has no fp4 products (it has fp8, bf16, fp16, fp32): set "
    "`precision: fp8`",
}


@cache
def site(gpu: str = "h100") -> tuple[ClusterProfile, Knowledge]:
    kind, memory = GPUS[gpu]
    made = cluster(nodes=8, gpu={"type": kind, "per_node": 8, "memory": memory})
    return made, knowledge_of(made)


def own(**settings: Any) -> dict[str, Any]:
    return {"megatron": settings}


def planned(gpu: str = "h100", **spec: Any) -> Plan:
    given = dict(model=SMALL, gpus=8, batch=32, parallel={"tp": 2}, recompute="none") | spec
    return make_plan(run_spec(**given), *site(gpu))


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"name": "megatron", "implementation": "transformer_engine"}, 0),
        ({"name": "megatron", "implementation": "local"}, 2 + 2 * 4),
        ({"name": "fsdp"}, 2 + 4),
        ({"name": "ddp"}, 3 * 4 * 3 / 4),
        ({"name": "deepspeed"}, 2 + 2 * 4),
    ],
)
def test_gradients_of_microbatches_are_added_as_each_engine_does(
    engine: dict[str, str], expected: float
) -> None:
    """Four microbatches of two samples on each of eight GPUs."""
    given = dict(model=SMALL, gpus=8, batch=64, micro=2, parallel={}, engine=engine)
    request = PlanRequest(run_spec(**given), *site())
    found = search(request, freedom_of(request))
    mesh = case_of(request, columns_of(found.candidate(0))).mesh
    assert list(np.asarray(mesh.accumulation)) == [4]
    assert np.asarray(mesh.added_bytes) == pytest.approx(expected)


class TestWhatTheGpuHas:
    @pytest.mark.parametrize(("gpu", "precision"), [("a100", "fp8"), ("h100", "fp4")])
    def test_a_gpu_without_the_format_is_refused_with_what_it_has(
        self, gpu: str, precision: str
    ) -> None:
        with pytest.raises(DoesNotFitError) as caught:
            planned(gpu, precision=precision)
        assert str(caught.value) == GPU_FORMATS[gpu]
        assert caught.value.hint is None

    def test_block_scaling_in_hardware_is_blackwells(self) -> None:
        with pytest.raises(DoesNotFitError) as caught:
            planned("h100", precision="fp8", engine=own(fp8_recipe="mxfp8"))
        assert str(caught.value) == (
            "mxfp8 scaling needs another generation of GPUs than H100-80GB SXM (hopper): set "
            "`engine.megatron.fp8_recipe` to delayed or tensorwise or blockwise"
        )

    @pytest.mark.parametrize(
        ("gpu", "given", "chosen"),
        [
            ("h100", "auto", "tensorwise"),
            ("h100", "blockwise", "blockwise"),
            ("b200", "auto", "mxfp8"),
            ("b200", "delayed", "delayed"),
        ],
    )
    def test_the_scaling_is_chosen_for_the_gpu(self, gpu: str, given: str, chosen: str) -> None:
        plan = planned(gpu, precision="fp8", engine=own(fp8_recipe=given))
        assert (plan.precision, plan.fp8_recipe) == ("fp8", chosen)

    def test_eight_and_four_bits_are_faster_than_sixteen_on_blackwell(self) -> None:
        # not for small layers, which take longer to launch than to compute
        plans = [
            planned("b200", model=LARGE, precision=precision, parallel={"tp": 8})
            for precision in ("bf16", "fp8", "fp4")
        ]
        assert plans[2].fp8_recipe is None
        compute = [plan.prediction.parts.compute_seconds for plan in plans if plan.prediction]
        assert compute[0] > max(compute[1:])

    def test_a_profile_without_transformer_engine_has_none(self) -> None:
        profile, knowledge = site()
        software = profile.software.model_copy(update={"transformer_engine": False})
        without = profile.model_copy(update={"software": software})
        spec = run_spec(model=SMALL, gpus=8, batch=32, precision="fp8")
        with pytest.raises(DoesNotFitError, match="needs TransformerEngine, which profile testbed"):
            make_plan(spec, without, knowledge)

    def test_without_a_known_gpu_the_plan_says_that_nothing_was_checked(self) -> None:
        spec = run_spec(model=SMALL, gpus=8, batch=32, precision="fp8", parallel={"tp": 2})
        warnings = make_plan(spec, cluster()).warnings
        assert "Whether a100 has fp8 products is not checked: the GPU is not known." in warnings

    def test_auto_takes_layouts_whose_sizes_the_format_takes(self) -> None:
        # 5632 / 8 = 704 is a multiple of 32, 5600 / 8 = 700 of 4 only
        model = {**SMALL, "ffn": 5600}
        plan = planned("h100", model=model, parallel="auto", precision="fp8", batch=8)
        assert plan.layout.tp in (1, 2, 5, 10) and 5600 // plan.layout.tp % 16 == 0
        with pytest.raises(DoesNotFitError, match="ffn 5600 is 700 on each of 8 ranks"):
            planned("h100", model=model, parallel={"tp": 8}, precision="fp8")


class TestBytes:
    def test_gradients_of_bf16_are_half(self) -> None:
        wide, narrow = planned(), planned(engine=own(grad_reduce_in_fp32=False))
        assert narrow.memory[0].gradients_bytes * 2 == wide.memory[0].gradients_bytes
        assert gradient_bytes(run_spec(engine=own(grad_reduce_in_fp32=False))) == 2
        assert narrow.prediction and wide.prediction
        both = [plan.prediction.parts.data_messages_seconds for plan in (narrow, wide)
                if plan.prediction]  # fmt: skip
        assert both[0] < both[1]

    @pytest.mark.parametrize(
        ("recipe", "generation", "expected"),
        [
            ("delayed", "hopper", 2.0),
            ("tensorwise", "hopper", 2.0),
            ("tensorwise", "blackwell", 1.0),
            ("blockwise", "hopper", 2 * (1 + 4 / 128**2)),
            ("mxfp8", "blackwell", 2 * (1 + 1 / 32)),
        ],
    )
    def test_forms_of_a_weight(self, recipe: str, generation: str, expected: float) -> None:
        spec = run_spec(precision="fp8", engine=own(fp8_recipe=recipe))
        assert low_weight_bytes(spec, generation) == expected
        assert low_weight_bytes(run_spec(), generation) == 0

    def test_four_bits_take_half_and_a_scale_for_each_16(self) -> None:
        assert low_weight_bytes(run_spec(precision="fp4"), "blackwell") == 2 * (0.5 + 1 / 16)

    @pytest.mark.parametrize(
        ("spec", "expected"),
        [
            (dict(), 2),
            (dict(precision="fp32"), 4),
            (dict(precision="fp8"), 2),
            (dict(precision="fp8", engine=own(fp8_param_gather=True, fp8_recipe="delayed")), 1),
            # MXFP8 goes through the buffer of the gradients, in bf16
            (dict(precision="fp8", engine=own(fp8_param_gather=True, fp8_recipe="mxfp8")), 2),
        ],
    )
    def test_what_is_gathered_after_an_update(self, spec: dict[str, Any], expected: int) -> None:
        assert sent_weight_bytes(run_spec(**spec)) == expected

    def test_weights_of_layers_alone_have_forms_in_eight_bits(self) -> None:
        plain, besides = planned(), planned(precision="fp8")
        instead = planned(precision="fp8", engine=own(fp8_param_gather=True))
        tables = 2 * 32000 // 2 * 2048  # embedding and output matrix, on two ranks
        norm = 2048
        layers = plain.stages[0].parameters_per_gpu - tables - norm
        weights = [plan.memory[0].weights_bytes for plan in (plain, besides, instead)]
        assert weights[1] - weights[0] == 2 * layers
        assert weights[2] == weights[0]

    @pytest.mark.parametrize(
        ("settings", "precision", "each"),
        [
            ({}, "bf16", 4 + 4 + 4),
            # main weights: 16 bits of 32, for the weight has the others
            (dict(), "bf16 aware", 2 + 4 + 4),
            (dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8"), "bf16 aware", 2 + 2 + 1),
            (dict(main_params_dtype="fp16"), "bf16 aware", 2 + 4 + 4),
            # megatron-core has the main weights with these recipes
            (dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"), "fp8 aware", 4 + 2 + 2),
            (dict(fp8_recipe="delayed"), "fp8 aware", 2 + 4 + 4),
            (dict(exp_avg_dtype="fp16"), "fp32 aware", 0 + 2 + 4),
        ],
    )
    def test_the_optimizer_keeps_what_its_types_take(
        self, settings: dict[str, Any], precision: str, each: int
    ) -> None:
        kind, _, aware = precision.partition(" ")
        engine = own(use_precision_aware_optimizer=bool(aware), **settings)
        plain, plan = planned(precision=kind), planned(precision=kind, engine=engine)
        usual = 8 if kind == "fp32" else 12
        found, whole = plan.memory[0].optimizer_bytes, plain.memory[0].optimizer_bytes
        assert found * usual == whole * each
        assert plan.prediction and plain.prediction
        less = plain.prediction.parts.optimizer_seconds - plan.prediction.parts.optimizer_seconds
        assert (less > 0) == (each < usual)

    def test_a_precision_aware_optimizer_makes_no_copy_of_gradients(self) -> None:
        aware = own(grad_reduce_in_fp32=False, use_precision_aware_optimizer=True)
        for engine, expected in ((own(grad_reduce_in_fp32=False), 4.0), (aware, 0.0)):
            request = PlanRequest(run_spec(model=SMALL, gpus=8, engine=engine), *site())
            found = search(request, freedom_of(request))
            case = case_of(request, columns_of(found.candidate(0)))
            assert float(np.max(case.mesh.gradient_copy)) == expected

    def test_each_instance_of_the_optimizer_has_the_whole_state(self) -> None:
        one, two, four = (
            planned(engine=own(num_distributed_optimizer_instances=count), model=model)
            for count, model in ((1, SMALL), (2, SMALL), (4, SMALL))
        )
        state = [plan.memory[0].optimizer_bytes for plan in (one, two, four)]
        assert (state[1], state[2]) == (2 * state[0], 4 * state[0])
        assert "2 instances of the optimizer have the whole state each" in " ".join(two.reasons)
        experts = dict(model=MIXTURE, parallel={"tp": 1, "ep": 2})
        both = [
            planned(engine=own(num_distributed_optimizer_instances=count), **experts)
            for count in (1, 2)
        ]
        assert both[1].memory[0].optimizer_bytes == 2 * both[0].memory[0].optimizer_bytes

    def test_unfused_attention_keeps_its_scores(self) -> None:
        fused, unfused = planned(), planned(engine=own(attention_backend="unfused"))
        assert unfused.memory[0].activations_bytes > 2 * fused.memory[0].activations_bytes

    def test_near_ranks_exchange_heads_so_that_rings_are_shorter(self) -> None:
        given = dict(parallel={"tp": 1, "cp": 16}, gpus=16, micro=1, batch=16)
        flat = planned(**given)
        levels = planned(engine=own(hierarchical_context_parallel_sizes=(8, 2)), **given)
        sent = [one.prediction.parts.context_messages_seconds for one in (flat, levels)
                if one.prediction]  # fmt: skip
        assert sent[1] < sent[0]
        assert levels.memory == flat.memory

    def test_muon_keeps_one_moment_of_matrices_and_multiplies_them(self) -> None:
        plain, muon = (
            planned(parallel={}, engine={"name": "ddp"}, optimizer={"lr": 1e-3, "kind": kind})
            for kind in ("adamw", "muon")
        )
        matrices = 8 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
        before, after = (plan.memory[0].optimizer_bytes for plan in (plain, muon))
        assert before - after == pytest.approx(4 * matrices, abs=8)
        assert plain.prediction and muon.prediction
        parts = [plan.prediction.parts for plan in (plain, muon) if plan.prediction]
        flops = 8 * 5 * 2 * (4 * 3 * 2048**3 + 3 * (2 * 2048**2 * 5632 + 2048**3))
        more = parts[1].optimizer_seconds - parts[0].optimizer_seconds
        assert more > flops / 989e12 - 0.001 > 0

    @pytest.mark.parametrize(
        ("spec", "field"),
        [
            (dict(model=MIXTURE), "model.moe"),
            (dict(lora={"rank": 8}), "lora"),
            (dict(engine={"name": "megatron-lm", "checkout": "/m"}), "optimizer.zero"),
        ],
    )
    def test_muon_is_for_matrices_that_each_rank_has_whole(
        self, spec: dict[str, Any], field: str
    ) -> None:
        zero = 1 if field == "optimizer.zero" else None
        optimizer = {"lr": 1e-3, "kind": "muon", "zero": zero}
        given = dict(model=SMALL, engine={"name": "ddp"}, optimizer=optimizer) | spec
        assert field in [one.field for one in sharding_problems(run_spec(**given))]

    def test_a_fused_loss_moves_fewer_bytes_and_holds_as_many(self) -> None:
        plain, fused = planned(), planned(engine=own(cross_entropy_loss_fusion=True))
        assert fused.memory[0].logits_bytes == plain.memory[0].logits_bytes
        assert fused.step_seconds and plain.step_seconds and fused.step_seconds < plain.step_seconds


class TestExperts:
    @pytest.mark.parametrize(
        ("tp", "ep", "etp", "expected"),
        [(4, 2, None, 1), (4, 1, None, 4), (4, 2, 2, 2), (1, 2, 2, 2), (4, 1, 1, 1)],
    )
    def test_what_splits_an_expert(self, tp: int, ep: int, etp: int | None, expected: int) -> None:
        assert expert_tp(tp, ep, etp) == expected
        model = run_spec(model=MIXTURE).model
        one = 3 * 2048 * 2048
        assert expert_parameters(model, tp, ep, etp) == 8 // ep * one // expected

    def test_a_plan_counts_and_names_it(self) -> None:
        whole, split = (
            planned(model=MIXTURE, parallel={"tp": 2, "ep": 2, **more}) for more in ({}, {"etp": 2})
        )
        saved = 8 * 4 * 3 * 2048 * 2048 // 2  # 8 layers, 4 experts each, the other half of them
        given = whole.stages[0].parameters_per_gpu - split.stages[0].parameters_per_gpu
        assert given == saved
        routed = [stage_expert_parameters(run_spec(model=MIXTURE).model, plan.layout, (8,), 0)
                  for plan in (whole, split)]  # fmt: skip
        assert routed == [2 * saved, saved]
        assert split.layout.etp == 2 and "etp 2" in str(split.layout)
        assert split.prediction and whole.prediction
        sent = [plan.prediction.parts.expert_messages_seconds for plan in (split, whole)
                if plan.prediction]  # fmt: skip
        assert sent[0] > sent[1]
        (placed,) = (place for place in split.placements if place.axis == "ep")
        assert placed.stride == 2

    @pytest.mark.parametrize(
        ("layout", "message"),
        [
            ({"ep": 2, "etp": 3}, "moe.ffn 2048 is not divisible by etp 3: use 1"),
            ({"ep": 8, "etp": 2}, "etp x ep 16 does not divide tp x cp x dp 8: nearest ep 2 or 4"),
        ],
    )
    def test_layouts_that_it_excludes(self, layout: dict[str, int], message: str) -> None:
        with pytest.raises(DoesNotFitError) as caught:
            planned(model=MIXTURE, parallel=layout)
        assert message in str(caught.value)


OPTIONS: dict[str, dict[str, Any]] = {
    "fp8": dict(precision="fp8"),
    "fp8 weights": dict(precision="fp8", engine=own(fp8_param_gather=True)),
    "bf16 gradients": dict(engine=own(grad_reduce_in_fp32=False)),
    "fused loss": dict(engine=own(cross_entropy_loss_fusion=True)),
    "some layers again": dict(recompute="full", recompute_layers=2),
    "activations on the host": dict(recompute="auto", activation_offload_layers=4),
    "userbuffers": dict(engine=own(tp_comm_overlap=True)),
    "instances": dict(engine=own(num_distributed_optimizer_instances=2)),
    "small state": dict(engine=own(use_precision_aware_optimizer=True, exp_avg_dtype="bf16")),
    "levels of cp": dict(engine=own(hierarchical_context_parallel_sizes=(2, 2))),
    "deferred gradient": dict(engine=own(defer_embedding_wgrad_compute=True)),
    "flex": dict(model=MIXTURE, engine=own(moe_token_dispatcher_type="flex")),
    "permutation": dict(model=MIXTURE, engine=own(moe_permute_fusion=True)),
    "shared expert": dict(model=MIXTURE, engine=own(moe_shared_expert_overlap=True)),
    "graphs": dict(recompute="auto", engine=own(cuda_graph_impl="transformer_engine")),
}


@pytest.mark.parametrize(
    "name",
    varied(
        OPTIONS,
        "some layers again",
        "activations on the host",
        "permutation",
        "graphs",
        "instances",
    ),
)
def test_the_search_prices_each_option_as_one_candidate_at_a_time(name: str) -> None:
    spec = run_spec(**{"model": SMALL, "gpus": 8, "batch": 16, "micro": "auto", **OPTIONS[name]})
    request = PlanRequest(spec, *site())
    found = search(request, freedom_of(request))
    assert len(found.columns) > 10
    rows = range(0, len(found.columns), max(1, len(found.columns) // 40))
    for row in rows:
        candidate = found.candidate(row)
        alone = columns_of(candidate)
        assert float(peak_bytes(case_of(request, alone)).item()) == pytest.approx(
            found.peak_bytes[row], rel=1e-9
        )
        assert candidate_peak(request, candidate) == pytest.approx(found.peak_bytes[row], rel=0.01)
        if found.fits[row]:
            (parts,) = step_parts(request, alone)
            assert parts.total_seconds == pytest.approx(found.step_seconds[row], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("userbuffers", lambda columns: (columns.tp > 1) & (columns.sequence_parallel > 0)),
        ("deferred gradient", lambda columns: columns.pp > 1),
        ("activations on the host", lambda columns: (columns.pp == 1) & (columns.recompute == 0)),
        ("flex", lambda columns: (columns.ep > 1) | (columns.tp > 1)),
        ("graphs", lambda columns: columns.recompute < 2),
        ("instances", lambda columns: columns.dp * columns.cp % 2 == 0),
        ("levels of cp", lambda columns: columns.cp == 4),
        ("some layers again", lambda columns: columns.recompute == 2),
    ],
)
def test_auto_tries_only_layouts_that_can_have_the_option(name: str, holds: Any) -> None:
    spec = run_spec(**{"model": SMALL, "gpus": 8, "batch": 16, **OPTIONS[name]})
    request = PlanRequest(spec, *site())
    plain = run_spec(model=OPTIONS[name].get("model", SMALL), gpus=8, batch=16)
    free = PlanRequest(plain, *site())
    assert holds(search(request, freedom_of(request)).columns).all()
    assert not holds(search(free, freedom_of(free)).columns).all()


# option -> words of a reason or warning of its plan
SENTENCES = [
    ("fp8", {}, "fp8 (tensorwise scaling): products of layers run at the calibrated rate of that "
     "precision; their weights take 2 bytes besides 2. Inputs of linear layers wait for the "
     "backward pass in 1 bytes, all else in 16 bits."),
    ("fp8 weights", {}, "their weights take 2 bytes instead of 2."),
    ("bf16 gradients", {}, "Gradients are held and summed in bf16, 2 bytes each; while the "
     "optimizer runs, its shard of them exists in fp32 too."),
    ("small state", {}, "The optimizer keeps 8 bytes for each of its weights: both moments, and "
     "what a weight of 16 bits lacks of its main copy."),
    ("fused loss", {}, "The fused cross entropy moves 14 bytes for each logit and pass, the "
     "unfused one 24; its memory is the same."),
    ("some layers again", {}, "recompute full covers the first 2 of 8 layers in a model chunk."),
    ("activations on the host", {}, "4 of 8 layers keep their activations in the host's memory:"),
    ("userbuffers", {}, "% of tensor parallel messages, as in the runs behind calibration "
     "`megatron-core`."),
    ("userbuffers", {}, "Not priced: memory of userbuffers."),
    ("deferred gradient", {"tp": 2, "pp": 2}, "The last stage keeps inputs and output gradients of "
     "the output layer for 16 of 16 microbatches"),
    ("flex", {"tp": 1, "ep": 4}, "Assumed: deepep sends one copy of a token to each node"),
    ("flex", {"tp": 1, "ep": 4}, "Not priced: buffers of deepep."),
    ("permutation", {"tp": 1, "ep": 4}, "Not priced: the time of moe_permute_fusion"),
    ("shared expert", {"tp": 1, "ep": 4}, "Assumed: messages to experts hide behind the shared "
     "expert for as long as it takes."),
    ("graphs", {}, "% of their launches, as in the calibration; experts are outside of them."),
    ("graphs", {}, "Not priced: memory of CUDA graphs."),
]  # fmt: skip


@pytest.mark.parametrize(("name", "layout", "words"), SENTENCES)
def test_each_option_explains_its_price_or_that_it_has_none(
    name: str, layout: dict[str, int], words: str
) -> None:
    plan = planned(**{"recompute": "none", "parallel": layout or {"tp": 2}, **OPTIONS[name]})
    text = "\n".join((*plan.reasons, *plan.warnings))
    assert words in text
    plain = planned(model=OPTIONS[name].get("model", SMALL), parallel=layout or {"tp": 2})
    assert words not in "\n".join((*plain.reasons, *plain.warnings))


def test_a_link_to_the_host_is_that_of_the_gpu() -> None:
    """Three quarters of PCIe 4, or of the NVLink-C2C of a Grace."""
    for kind, memory, rate in (("h100", "80GiB", 25e9), ("gb200", "186GiB", 25 / 32 * 225e9)):
        profile = cluster(gpu={"type": kind, "per_node": 8, "memory": memory})
        request = PlanRequest(run_spec(model=SMALL, gpus=8), profile, knowledge_of(profile))
        machine = machine_for(request)
        assert machine is not None and machine.host_bandwidth == rate


def test_more_than_the_hosts_memory_is_a_warning() -> None:
    profile, knowledge = site()
    nodes = profile.nodes.model_copy(update={"memory": 2**33})
    spec = run_spec(
        model=SMALL, gpus=8, batch=32, micro=4, parallel={"tp": 1}, activation_offload_layers=7
    )
    plan = make_plan(spec, profile.model_copy(update={"nodes": nodes}), knowledge)
    assert any("Offloaded activations need" in warning for warning in plan.warnings)
    assert not any("Offloaded" in one for one in make_plan(spec, profile, knowledge).warnings)
