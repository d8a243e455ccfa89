"""megatron-core on a stub of TransformerEngine: train, save, resume, convert, on gloo.

What a GPU adds to these runs are kernels. Layers, names of weights, `_extra_state`, the optimizer
and everything that hpctrain builds on them are those of a production run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_runs
import pytest
from fresh_process import FreshProcess
from safetensors.torch import load_file
from trial_runs import GPT, LLAMA, Trial, largest_difference, make_trial
from variants import varied

from hpctrain.convert import __main__ as conversion
from hpctrain.records.run_records import TrainerExit

# Largest differences of losses of about 5 in fp32 after six steps: other orders of addition.
# Measured 2e-6 with the layouts below.
LOSSES = 2e-5

WITH: dict[str, Any] = dict(engine="megatron", transformer_impl="transformer_engine")
WITHOUT: dict[str, Any] = dict(engine="megatron", transformer_impl="local")
EXPERTS = dict(
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48, moe_first_dense_layers=1
)
LATENT = dict(
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
)
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
PP2 = dict(pipeline_model_parallel_size=2, pipeline_layer_split=((2,), (2,)))
VPP2 = dict(
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    pipeline_layer_split=((1, 1), (1, 1)),
)
DP2 = dict(data_parallel_size=2, overlap_grad_reduce=True, overlap_param_gather=True)
EP2 = dict(data_parallel_size=2, expert_model_parallel_size=2)

MODELS: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "experts": {**LLAMA, **EXPERTS},
    "latent attention": {**LLAMA, **LATENT},
    "prediction layer": {**LLAMA, "mtp_num_layers": 1},
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt, tp2 with sequence parallelism": ("gpt", TP2),
    "llama, pp2": ("llama", PP2),
    "gpt, pp2 vpp2": ("gpt", VPP2),
    "llama, cp2": ("llama", dict(context_parallel_size=2)),
    "gpt, dp2 with overlaps": ("gpt", DP2),
    "experts, ep2": ("experts", EP2),
    "experts, ep2 tp2": ("experts", {**EP2, **TP2}),
    "latent attention, tp2": ("latent attention", TP2),
    "prediction layer, pp2": ("prediction layer", PP2),
}
# One layout of each axis; the others are variants.
ALWAYS = (
    "gpt, pp2 vpp2",
    "llama, cp2",
    "gpt, dp2 with overlaps",
    "experts, ep2 tp2",
)


@dataclass(frozen=True)
class EngineTrial(Trial):
    """A run whose ranks start in the process that has the stub."""

    process: FreshProcess

    def train(self, *, resume: int | None = None, **other: Any) -> list[int]:
        assert not other, "`prepare` cannot travel to another process"
        codes, logs = self.process.call(
            engine_runs.train, directory=str(self.run.directory), resume=resume
        )
        print(logs)
        return list(codes)


@pytest.fixture
def engine_trial(tmp_path: Path, engine_process: FreshProcess) -> Callable[..., EngineTrial]:
    """Make run directories for ranks that have TransformerEngine."""
    made: list[Trial] = []

    def make(base: dict[str, Any], **changes: Any) -> EngineTrial:
        one = make_trial(tmp_path / f"with-{len(made)}", base, **{**WITH, **changes})
        made.append(one)
        return EngineTrial(one.run, one.config, engine_process)

    return make


@pytest.fixture(scope="module")
def local_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trial]:
    """Each model trained once by megatron-core's own layers, on one process."""
    made: dict[str, Trial] = {}

    def trained(model: str) -> Trial:
        if model not in made:
            directory = tmp_path_factory.mktemp("local") / "run"
            made[model] = make_trial(directory, MODELS[model], **WITHOUT)
            assert made[model].train() == [0]
        return made[model]

    return trained


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory, engine_process: FreshProcess
) -> Callable[[str], Trial]:
    """Each model trained once on the stub, on one process."""
    made: dict[str, Trial] = {}

    def trained(model: str) -> Trial:
        if model not in made:
            directory = tmp_path_factory.mktemp("alone") / "run"
            one = make_trial(directory, MODELS[model], **WITH)
            made[model] = EngineTrial(one.run, one.config, engine_process)
            assert made[model].train() == [0]
        return made[model]

    return trained


def test_the_layers_are_those_of_production(engine_trial: Any) -> None:
    """Without this the tests below could compare megatron-core's own layers with themselves."""
    trial = engine_trial(MODELS["experts"])
    built = trial.process.call(engine_runs.layers_of, directory=str(trial.run.directory))
    assert {
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
        "TEDotProductAttention",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
        "RMSNorm",
    } <= set(built["classes"])
    assert not {"RowParallelLinear", "DotProductAttention", "SequentialMLP"} & set(built["classes"])
    assert "decoder.layers.0.self_attention.linear_qkv._extra_state" in built["extra"]
    assert "decoder.layers.0.mlp.linear_fc1.weight" in built["parallel"]
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" not in built["parallel"]
    optimizer = trial.process.call(engine_runs.optimizer_class)
    assert optimizer.startswith("transformer_engine")


def test_the_stub_multiplies_and_differentiates_as_torch(engine_process: FreshProcess) -> None:
    pairs = engine_process.call(engine_runs.probe_product, sizes=[24, 32, 16])
    assert all(difference <= 1e-5 * largest for difference, largest in pairs), pairs


@pytest.mark.parametrize(
    "model", varied([name for name in MODELS if name != "latent attention"], "gpt", "experts")
)
def test_both_implementations_learn_the_same(
    model: str, local_runs: Callable[[str], Trial], alone: Callable[[str], Trial]
) -> None:
    """Latent attention is left out: megatron-core's own layers cannot compute it."""
    with_engine, without = alone(model), local_runs(model)
    assert largest_difference(with_engine, without, 1)[0] <= LOSSES
    assert without.losses[1] - without.losses[6] > 0.1, "it learns"


@pytest.mark.parametrize("layout", varied(LAYOUTS, *ALWAYS))
def test_layouts_learn_what_one_process_learns(
    layout: str, engine_trial: Any, alone: Callable[[str], Trial]
) -> None:
    model, changes = LAYOUTS[layout]
    spread = engine_trial(MODELS[model], **changes)
    assert spread.train() == [0] * spread.world_size
    assert largest_difference(spread, alone(model), 1)[0] <= LOSSES


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param("gpt", dict(precision="bf16", dropout=0.1), marks=pytest.mark.variant),
        ("experts", dict(EP2, precision="bf16", optimizer_sharding="dp_reshardable")),
        pytest.param("latent attention", dict(TP2), marks=pytest.mark.variant),
    ],
    ids=["gpt, bf16 with dropout", "experts, ep2", "latent attention, tp2"],
)
def test_a_resume_is_exact(model: str, changes: dict[str, Any], engine_trial: Any) -> None:
    whole = engine_trial(MODELS[model], save_interval_steps=3, **changes)
    assert whole.train() == [0] * whole.world_size
    resumed = engine_trial(MODELS[model], **changes)
    resumed.adopt(whole, 3)
    assert resumed.train(resume=3) == [0] * whole.world_size
    assert resumed.exact == {step: whole.exact[step] for step in (4, 5, 6)}


def test_a_run_resumes_where_the_engine_is_missing(engine_trial: Any, tmp_path: Path) -> None:
    """Both name the same weights alike in checkpoints, and the optimizer's state fits."""
    first = engine_trial(GPT, save_interval_steps=3)
    second = make_trial(tmp_path / "local", GPT, **WITHOUT)
    assert first.train() == [0]
    second.adopt(first, 3)
    assert second.train(resume=3) == [0]
    assert largest_difference(second, first, 4)[0] <= LOSSES


@pytest.mark.parametrize(("model", "begins_with"), [("gpt", "local"), ("experts", "stub")])
def test_layers_that_do_not_fit_are_refused(
    model: str, begins_with: str, engine_trial: Any, tmp_path: Path
) -> None:
    """A checkpoint of megatron-core's layers has no `_extra_state`, and its Adam other settings;
    norms before experts have other names."""
    trials = [
        engine_trial(MODELS[model], save_interval_steps=3),
        make_trial(tmp_path / "local", MODELS[model], **WITHOUT, save_interval_steps=3),
    ]
    first, second = trials if begins_with == "stub" else reversed(trials)
    assert first.train() == [0]
    second.adopt(first, 3)
    assert second.train(resume=3) == [TrainerExit.CONFIG_ERROR]
    (record,) = second.exits()
    kinds = ["TransformerEngine", "megatron-core's own layers"]
    before, after = kinds if begins_with == "stub" else reversed(kinds)
    assert f"was saved with {before}, and is now resumed with {after}" in str(record.message)


def test_weights_become_hugging_face_and_back(engine_trial: Any, tmp_path: Path) -> None:
    """A checkpoint of TransformerEngine's layers, converted where there is none: and trained on."""
    source = engine_trial(LLAMA, **TP2, save_interval_steps=6)
    assert source.train() == [0, 0]
    engine_runs.apart(conversion.convert, source.run.checkpoints / "iter_0000006", tmp_path / "hf")
    engine_runs.apart(conversion.convert, tmp_path / "hf", tmp_path / "core")
    engine_runs.apart(conversion.convert, tmp_path / "core", tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    tuned = engine_trial(LLAMA, pretrained=str(tmp_path / "core"), lr=1e-9, min_lr=0.0)
    assert tuned.train() == [0]
    assert tuned.losses[1] < source.losses[1] - 0.5, "it goes on from trained weights"


def test_conversion_works_where_the_engine_is(
    engine_trial: Any, tmp_path: Path, engine_process: FreshProcess
) -> None:
    source = engine_trial(GPT, save_interval_steps=6)
    assert source.train() == [0]
    checkpoint = source.run.checkpoints / "iter_0000006"
    engine_process.call(engine_runs.convert, source=str(checkpoint), target=str(tmp_path / "with"))
    engine_runs.apart(conversion.convert, checkpoint, tmp_path / "without")
    first, second = (
        load_file(tmp_path / name / "model.safetensors") for name in ("with", "without")
    )
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


# -- Options of TransformerEngine on its stub: through build, training, save and resume ----------
# The stub rounds operands to 8 bits for every recipe, and has neither blocks nor weights of 8 bits.
# Shown here is therefore that an option reaches the layers, that the trainer gets along with it,
# and that its state is saved. Kernels and formats are shown by `make gpu`.


BF16 = dict(precision="bf16")
FP8 = dict(precision="bf16", fp8="hybrid")
MOE = {**LLAMA, **EXPERTS}
SMALL_STATE = dict(use_precision_aware_optimizer=True, optimizer_sharding="dp_reshardable")

# base, options, and whether numbers are those of the run without the options, bit for bit
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "fp8, delayed, dp2": (GPT, {**FP8, "fp8_recipe": "delayed", **DP2}, False),
    "fp8, tensorwise, tp2": (LLAMA, {**FP8, "fp8_recipe": "tensorwise", **TP2}, False),
    "fp8, mxfp8": (LLAMA, {**FP8, "fp8": "e4m3", "fp8_recipe": "mxfp8"}, False),
    "fp8, experts": (MOE, {**FP8, "fp8_recipe": "tensorwise", **EP2}, False),
    "fp8, some layers again": (
        GPT,
        {
            **FP8,
            "fp8_recipe": "tensorwise",
            "recompute_granularity": "full",
            "recompute_num_layers": 2,
        },
        False,
    ),
    "norms again": (
        LLAMA,
        dict(BF16, recompute_granularity="selective", recompute_modules=("layernorm",)),
        True,
    ),
    "experts' activation again": (
        MOE,
        dict(BF16, recompute_granularity="selective", recompute_modules=("moe_act",)),
        True,
    ),
    # of main weights 16 bits of 32, which a bf16 weight has not
    "state in 16 bits, dp2": (
        GPT,
        {
            **BF16,
            **DP2,
            **SMALL_STATE,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
            "grad_reduce_in_fp32": False,
        },
        False,
    ),
    "main weights in fp16": (GPT, {**BF16, **SMALL_STATE, "main_params_dtype": "fp16"}, False),
    "state in 16 bits, fp8": (
        GPT,
        {**FP8, "fp8_recipe": "tensorwise", **SMALL_STATE, "exp_avg_dtype": "bf16"},
        False,
    ),
}


@pytest.mark.parametrize("name", varied(OPTIONS, "fp8, delayed, dp2"))
def test_an_option_is_trained_and_resumed(name: str, engine_trial: Any) -> None:
    base, options, exact = OPTIONS[name]
    whole = engine_trial(base, save_interval_steps=3, **options)
    assert set(whole.train()) == {0}
    layout = {key: options[key] for key in options.keys() & {*DP2, *TP2, *EP2}}
    plain = engine_trial(base, **BF16, **layout)
    assert set(plain.train()) == {0}
    if exact:
        assert whole.exact == plain.exact
    else:
        assert whole.exact != plain.exact, "nothing was rounded"
        assert largest_difference(whole, plain, 1)[0] < 0.2
    resumed = engine_trial(base, **options)
    resumed.adopt(whole, 3)
    assert set(resumed.train(resume=3)) == {0}
    assert resumed.exact == {step: whole.exact[step] for step in (4, 5, 6)}


def test_fused_permutation_moves_the_same_tokens(
    engine_trial: Any,
) -> None:
    fused = engine_trial(MOE, moe_permute_fusion=True, **EP2)
    plain = engine_trial(MOE, **EP2)
    assert set(fused.train()) == set(plain.train()) == {0}
    assert largest_difference(fused, plain, 1)[0] <= 2e-5


def test_the_formats_of_the_layers_are_those_of_the_options(
    engine_trial: Any,
) -> None:
    """What `fp8_autocast` was given by megatron-core, for each recipe."""
    for options, recipe in (
        (dict(FP8, fp8_recipe="delayed"), "DelayedScaling"),
        (dict(FP8, fp8_recipe="tensorwise"), "Float8CurrentScaling"),
        (dict(FP8, fp8_recipe="blockwise"), "Float8BlockScaling"),
        (dict(FP8, fp8="e4m3", fp8_recipe="mxfp8"), "MXFP8BlockScaling"),
        (dict(BF16, fp4="e2m1"), "NVFP4BlockScaling"),
    ):
        made = engine_trial(GPT, **options)
        found = made.process.call(engine_runs.recipe_of, directory=str(made.run.directory))
        assert found[0] == recipe, options
        if recipe == "DelayedScaling":
            assert found[1:] == [1024, "max"]
