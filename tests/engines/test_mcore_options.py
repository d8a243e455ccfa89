"""Options of production that a CPU can train: they are trained, saved and resumed for real.

Where mathematics gives the same numbers, every bit or the tolerance of the layouts is compared; a
smaller precision is compared with a bound. Options of a GPU: see `test_mcore_gpu_options.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from newest_core import NEWEST
from trial_runs import DP2, GPT, LLAMA, MOE, Trial, largest_difference, trained
from variants import varied

from hpctrain.records.run_records import TrainerExit
from hpctrain.train import software

TOLERANCE = 1e-5

TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
DP4 = {**DP2, "data_parallel_size": 4}
EP2 = dict(expert_model_parallel_size=2)


CHECKPOINT = ("megatron.core.tensor_parallel", "checkpoint")
FUSED_LOSS = (
    "megatron.core.models.common.language_module.language_module",
    "fused_vocab_parallel_cross_entropy",
)
OVERLAPPED = (
    "megatron.core.transformer.moe.shared_experts:SharedExpertMLP",
    "linear_fc1_forward_and_act",
)


def counting(calls: Path, place: str, name: str) -> Callable[[], None]:
    """A `prepare`: each call of megatron-core's function adds a byte to a file."""

    def prepare() -> None:
        module, _, owner = place.partition(":")
        holder = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        real = getattr(holder, name)

        def called(*arguments: Any, **keywords: Any) -> Any:
            with calls.open("a") as stream:
                stream.write("x")
            return real(*arguments, **keywords)

        setattr(holder, name, called)

    return prepare


BEFORE_STEP = ("hpctrain.train.engines.megatron.engine:LayerGraphs", "before_step")
ASSEMBLY = "hpctrain.train.engines.megatron.assembly"


TIMES = {BEFORE_STEP: 2, (ASSEMBLY, "open_userbuffers"): 1, (ASSEMBLY, "prepare_environment"): 1}


def test_the_trainer_asks_for_graphs_and_userbuffers(trial: Callable[..., Trial]) -> None:
    """Whether a run has them is decided there; on a CPU none has."""
    short = trial(train_steps=2)
    calls = {place: short.run.directory / place[1] for place in TIMES}

    def prepare() -> None:
        for place, path in calls.items():
            counting(path, *place)()

    assert short.train(prepare=prepare) == [0]
    assert {place: len(path.read_text()) for place, path in calls.items()} == TIMES


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize("layers", [pytest.param(1, marks=pytest.mark.variant), 3])
def test_recomputing_some_layers_changes_no_bit(layers: int, trial: Callable[..., Trial]) -> None:
    """The first layers of a chunk are run twice, the others once."""
    plain = trained(dropout=0.1)
    some = trial(dropout=0.1, recompute_granularity="full", recompute_num_layers=layers)
    calls = some.run.directory / "calls"
    assert some.train(prepare=counting(calls, *CHECKPOINT)) == [0]
    assert plain.exact == some.exact and len(plain.exact) == 6
    microbatches = GPT["global_batch_size"] // some.config.micro_batch_size
    assert len(calls.read_text()) == layers * microbatches * 6


# the functions that recompute a part, where megatron-core calls them
PART = {"mlp": CHECKPOINT, "moe": CHECKPOINT}


@pytest.mark.variant("test_layout_equals_one_process")
@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(("mlp",), marks=pytest.mark.variant),
        ("core_attn", "mlp"),
        pytest.param(("moe",), marks=pytest.mark.variant),
    ],
)
def test_recomputing_parts_of_each_layer_changes_no_bit(
    modules: tuple[str, ...], trial: Callable[..., Trial]
) -> None:
    base = MOE if "moe" in modules else LLAMA
    parts = dict(recompute_granularity="selective", recompute_modules=modules)
    plain, some = trained(base, dropout=0.1), trial(base, dropout=0.1, **parts)
    calls = some.run.directory / "calls"
    assert some.train(prepare=counting(calls, *PART[modules[-1]])) == [0]
    assert plain.exact == some.exact
    assert calls.read_text(), "nothing was recomputed"


SUMMED_IN_BF16 = dict(DP2, precision="bf16", dropout=0.1, grad_reduce_in_fp32=False)


@pytest.mark.variant("test_the_trainer_asks_for_graphs_and_userbuffers")
def test_gradients_summed_in_bf16_follow_those_in_fp32() -> None:
    """Other numbers, because each sum is rounded, and as good ones."""
    full, half = trained(precision="bf16", dropout=0.1, **DP2), trained(**SUMMED_IN_BF16)
    assert full.exact != half.exact, "nothing is summed in bf16"
    loss, norm = largest_difference(full, half, 1)
    assert loss < 0.05 and norm < 0.05


@pytest.mark.variant("test_resume_is_exact")
def test_gradients_summed_in_bf16_resume_exactly(trial: Callable[..., Trial]) -> None:
    half, resumed = trained(**SUMMED_IN_BF16), trial(**SUMMED_IN_BF16)
    resumed.adopt(half, 4)
    assert resumed.train(resume=4) == [0, 0]
    assert resumed.exact == {step: half.exact[step] for step in (5, 6)}


@pytest.mark.variant("test_the_trainer_asks_for_graphs_and_userbuffers")
@pytest.mark.parametrize("layout", [{}, pytest.param(TP2)], ids=["one", "tp2"])
def test_the_fused_loss_is_the_loss(layout: dict[str, Any], trial: Callable[..., Trial]) -> None:
    plain = trained(precision="bf16", **layout)
    fused = trial(precision="bf16", cross_entropy_loss_fusion=True, **layout)
    calls = fused.run.directory / "calls"
    assert set(fused.train(prepare=counting(calls, *FUSED_LOSS))) == {0}
    assert calls.read_text(), "the loss was not fused"
    loss, norm = largest_difference(plain, fused, 1)
    assert loss <= TOLERANCE and norm <= TOLERANCE


ETP_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 etp2": {**TP2, "expert_tensor_parallel_size": 2},
    "tp2 ep2 etp1": {**TP2, **EP2, "expert_tensor_parallel_size": 1},
    "dp4 ep2 etp2": {**DP4, **EP2, "expert_tensor_parallel_size": 2, "global_batch_size": 8},
    "tp2 dp2 ep2 etp2": {**TP2, **DP2, **EP2, "expert_tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def one_process() -> Trial:
    return trained(MOE)


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
@pytest.mark.parametrize("name", varied(ETP_LAYOUTS, "tp2 etp2"))
def test_experts_split_over_ranks_equal_one_process(name: str) -> None:
    """From the first step on: initial weights do not depend on the layout."""
    layout = trained(MOE, **ETP_LAYOUTS[name])
    one_process = trained(MOE, global_batch_size=layout.config.global_batch_size)
    loss, norm = largest_difference(layout, one_process, 1)
    assert loss <= TOLERANCE and norm <= TOLERANCE


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
@pytest.mark.parametrize("name", ETP_LAYOUTS)
def test_experts_split_over_ranks_resume_exactly(name: str, trial: Callable[..., Trial]) -> None:
    layout, resumed = trained(MOE, **ETP_LAYOUTS[name]), trial(MOE, **ETP_LAYOUTS[name])
    resumed.adopt(layout, 4)
    assert set(resumed.train(resume=4)) == {0}
    assert resumed.exact == {step: layout.exact[step] for step in (5, 6)}


def unchecked() -> None:
    """A `prepare`: without the trainer's own refusal of a layout."""
    from hpctrain.train.engines.megatron import preflight

    preflight.engine_problems = lambda config, run: iter(())


def test_whole_experts_on_ranks_of_tp_alone_are_refused(trial: Callable[..., Trial]) -> None:
    layout = trial(MOE, expert_tensor_parallel_size=1, **TP2)
    assert set(layout.train()) == {TrainerExit.CONFIG_ERROR}


@pytest.mark.variant("test_whole_experts_on_ranks_of_tp_alone_are_refused")
def test_whole_experts_on_ranks_of_tp_alone_would_learn_other_things(
    one_process: Trial, trial: Callable[..., Trial]
) -> None:
    """Why `preflight` refuses it; the newest megatron-core sums their gradients as it should."""
    layout = trial(MOE, expert_tensor_parallel_size=1, **TP2)
    assert set(layout.train(prepare=unchecked)) == {0}
    loss, _ = largest_difference(layout, one_process, 1)
    wrong = software.megatron_core() != NEWEST
    assert (loss > 1e-3) == wrong and (wrong or loss <= TOLERANCE)


@pytest.mark.variant("test_a_fresh_start_is_that_of_one_process")
def test_the_shared_expert_may_run_while_tokens_travel(
    one_process: Trial, trial: Callable[..., Trial]
) -> None:
    overlapped = trial(MOE, moe_shared_expert_overlap=True)
    calls = overlapped.run.directory / "calls"
    assert overlapped.train(prepare=counting(calls, *OVERLAPPED)) == [0]
    assert calls.read_text(), "nothing was overlapped"
    loss, norm = largest_difference(overlapped, one_process, 1)
    assert loss <= TOLERANCE and norm <= TOLERANCE
