"""Options of TransformerEngine on its stub: through build, training, save and resume, on gloo.

The stub rounds operands to 8 bits for every recipe, and has neither blocks nor weights of 8 bits.
Shown here is therefore that an option reaches the layers, that the trainer gets along with it, and
that its state is saved. Kernels and formats are shown by `make gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from variants import varied

pytest.importorskip("fresh_process", reason="needs the stub of TransformerEngine")

import option_runs
from fresh_process import FreshProcess
from test_engine_training import EngineTrial
from trial_runs import GPT, LLAMA, largest_difference, make_trial

BF16 = dict(precision="bf16")
FP8 = dict(precision="bf16", fp8="hybrid")
DP2 = dict(data_parallel_size=2, overlap_grad_reduce=True, overlap_param_gather=True)
TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
MOE = dict(
    LLAMA, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=48, moe_first_dense_layers=1
)
EP2 = dict(data_parallel_size=2, expert_model_parallel_size=2)

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
}


@pytest.fixture
def option_trial(tmp_path: Path, engine_process: FreshProcess) -> Callable[..., EngineTrial]:
    """Make run directories for ranks that have the stub."""
    count = 0

    def make(base: dict[str, Any], **changes: Any) -> EngineTrial:
        nonlocal count
        count += 1
        wanted = {"engine": "megatron", "transformer_impl": "transformer_engine", **changes}
        one = make_trial(tmp_path / f"run-{count}", base, **wanted)
        return EngineTrial(one.run, one.config, engine_process)

    return make


@pytest.mark.parametrize("name", varied(OPTIONS, "fp8, delayed, dp2", "experts' activation again"))
def test_an_option_is_trained_and_resumed(
    name: str, option_trial: Callable[..., EngineTrial]
) -> None:
    base, options, exact = OPTIONS[name]
    whole = option_trial(base, save_interval_steps=3, **options)
    assert set(whole.train()) == {0}
    layout = {key: options[key] for key in options.keys() & {*DP2, *TP2, *EP2}}
    plain = option_trial(base, **BF16, **layout)
    assert set(plain.train()) == {0}
    if exact:
        assert whole.exact == plain.exact
    else:
        assert whole.exact != plain.exact, "nothing was rounded"
        assert largest_difference(whole, plain, 1)[0] < 0.2
    resumed = option_trial(base, **options)
    resumed.adopt(whole, 3)
    assert set(resumed.train(resume=3)) == {0}
    assert resumed.exact == {step: whole.exact[step] for step in (4, 5, 6)}


def test_fused_permutation_moves_the_same_tokens(
    option_trial: Callable[..., EngineTrial],
) -> None:
    fused = option_trial(MOE, moe_permute_fusion=True, **EP2)
    plain = option_trial(MOE, **EP2)
    assert set(fused.train()) == set(plain.train()) == {0}
    assert largest_difference(fused, plain, 1)[0] <= 2e-5


def test_the_formats_of_the_layers_are_those_of_the_options(
    option_trial: Callable[..., EngineTrial],
) -> None:
    """What `fp8_autocast` was given by megatron-core, for each recipe."""
    for options, recipe in (
        (dict(FP8, fp8_recipe="delayed"), "DelayedScaling"),
        (dict(FP8, fp8_recipe="tensorwise"), "Float8CurrentScaling"),
        (dict(FP8, fp8_recipe="blockwise"), "Float8BlockScaling"),
        (dict(FP8, fp8="e4m3", fp8_recipe="mxfp8"), "MXFP8BlockScaling"),
        (dict(BF16, fp4="e2m1"), "NVFP4BlockScaling"),
    ):
        made = option_trial(GPT, **options)
        found = made.process.call(option_runs.recipe_of, directory=str(made.run.directory))
        assert found[0] == recipe, options
        if recipe == "DelayedScaling":
            assert found[1:] == [1024, "max"]
