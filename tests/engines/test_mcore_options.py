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
from trial_runs import GPT, LLAMA, Trial, largest_difference
from variants import varied

from hpctrain.store.run_records import TrainerExit
from hpctrain.train import software

TOLERANCE = 1e-5

TP2 = dict(tensor_model_parallel_size=2, sequence_parallel=True)
DP2 = dict(data_parallel_size=2, overlap_grad_reduce=True, overlap_param_gather=True)
DP4 = {**DP2, "data_parallel_size": 4}
EP2 = dict(expert_model_parallel_size=2)
MOE = dict(
    LLAMA,
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=48,
    moe_shared_expert_intermediate_size=32,
    moe_first_dense_layers=1,
)


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


BEFORE_STEP = ("hpctrain.train.engines.megatron.cuda_graphs:LayerGraphs", "before_step")
ASSEMBLY = "hpctrain.train.engines.megatron.assembly"


@pytest.mark.parametrize(
    ("place", "times"),
    [(BEFORE_STEP, 2), ((ASSEMBLY, "open_userbuffers"), 1), ((ASSEMBLY, "prepare_environment"), 1)],
)
def test_the_trainer_asks_for_graphs_and_userbuffers(
    place: tuple[str, str], times: int, trial: Callable[..., Trial]
) -> None:
    """Whether a run has them is decided there; on a CPU none has."""
    short = trial(train_steps=2)
    calls = short.run.directory / "calls"
    assert short.train(prepare=counting(calls, *place)) == [0]
    assert len(calls.read_text()) == times


@pytest.mark.parametrize("layers", [1, 3])
def test_recomputing_some_layers_changes_no_bit(layers: int, trial: Callable[..., Trial]) -> None:
    """The first layers of a chunk are run twice, the others once."""
    plain = trial(dropout=0.1, train_steps=3)
    some = trial(
        dropout=0.1, train_steps=3, recompute_granularity="full", recompute_num_layers=layers
    )
    assert plain.train() == [0]
    calls = some.run.directory / "calls"
    assert some.train(prepare=counting(calls, *CHECKPOINT)) == [0]
    assert plain.exact == some.exact and len(plain.exact) == 3
    microbatches = GPT["global_batch_size"] // GPT["micro_batch_size"]
    assert len(calls.read_text()) == layers * microbatches * 3


# the functions that recompute a part, where megatron-core calls them
PART = {"mlp": CHECKPOINT, "moe": CHECKPOINT}


@pytest.mark.parametrize("modules", [("mlp",), ("core_attn", "mlp"), ("moe",)])
def test_recomputing_parts_of_each_layer_changes_no_bit(
    modules: tuple[str, ...], trial: Callable[..., Trial]
) -> None:
    base = MOE if "moe" in modules else LLAMA
    parts = dict(recompute_granularity="selective", recompute_modules=modules)
    plain = trial(base, dropout=0.1, train_steps=3)
    some = trial(base, dropout=0.1, train_steps=3, **parts)
    calls = some.run.directory / "calls"
    assert plain.train() == [0]
    assert some.train(prepare=counting(calls, *PART[modules[-1]])) == [0]
    assert plain.exact == some.exact
    assert calls.read_text(), "nothing was recomputed"


def test_gradients_summed_in_bf16_follow_those_in_fp32(trial: Callable[..., Trial]) -> None:
    """Other numbers, because each sum is rounded, and as good ones; saved and resumed exactly."""
    settings = dict(precision="bf16", save_interval_steps=2, **DP2)
    full, half = trial(**settings), trial(grad_reduce_in_fp32=False, **settings)
    assert full.train() == half.train() == [0, 0]
    assert full.exact != half.exact, "nothing is summed in bf16"
    loss, norm = largest_difference(full, half, 1)
    assert loss < 0.05 and norm < 0.05
    resumed = trial(grad_reduce_in_fp32=False, **settings)
    resumed.adopt(half, 4)
    assert resumed.train(resume=4) == [0, 0]
    assert resumed.exact == {step: half.exact[step] for step in (5, 6)}


@pytest.mark.parametrize("layout", [{}, TP2], ids=["one", "tp2"])
def test_the_fused_loss_is_the_loss(layout: dict[str, Any], trial: Callable[..., Trial]) -> None:
    plain = trial(precision="bf16", train_steps=4, **layout)
    fused = trial(precision="bf16", train_steps=4, cross_entropy_loss_fusion=True, **layout)
    calls = fused.run.directory / "calls"
    assert set(plain.train()) == set(fused.train(prepare=counting(calls, *FUSED_LOSS))) == {0}
    assert calls.read_text(), "the loss was not fused"
    loss, norm = largest_difference(plain, fused, 1)
    assert loss <= TOLERANCE and norm <= TOLERANCE


ETP_LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2 etp2": {**TP2, "expert_tensor_parallel_size": 2},
    "tp2 ep2 etp1": {**TP2, **EP2, "expert_tensor_parallel_size": 1},
    "dp4 ep2 etp2": {**DP4, **EP2, "expert_tensor_parallel_size": 2},
    "tp2 dp2 ep2 etp2": {**TP2, **DP2, **EP2, "expert_tensor_parallel_size": 2},
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    from trial_runs import make_trial

    made = make_trial(tmp_path_factory.mktemp("etp") / "one", MOE)
    assert made.train() == [0]
    return made


@pytest.mark.parametrize("name", varied(ETP_LAYOUTS, "tp2 dp2 ep2 etp2"))
def test_experts_split_over_ranks_equal_one_process(
    name: str, one_process: Trial, trial: Callable[..., Trial]
) -> None:
    """From the first step on: initial weights do not depend on the layout."""
    layout = trial(MOE, save_interval_steps=2, **ETP_LAYOUTS[name])
    assert set(layout.train()) == {0}
    loss, norm = largest_difference(layout, one_process, 1)
    assert loss <= TOLERANCE and norm <= TOLERANCE
    resumed = trial(MOE, **ETP_LAYOUTS[name])
    resumed.adopt(layout, 4)
    assert set(resumed.train(resume=4)) == {0}
    assert resumed.exact == {step: layout.exact[step] for step in (5, 6)}


def unchecked() -> None:
    """A `prepare`: without the trainer's own refusal of a layout."""
    from hpctrain.train.engines.megatron import preflight

    preflight.engine_problems = lambda config, run: iter(())


def test_whole_experts_on_ranks_of_tp_alone_would_learn_other_things(
    one_process: Trial, trial: Callable[..., Trial]
) -> None:
    """Why `preflight` refuses it; the newest megatron-core sums their gradients as it should."""
    layout = trial(MOE, expert_tensor_parallel_size=1, **TP2)
    assert set(layout.train()) == {TrainerExit.CONFIG_ERROR}
    assert set(layout.train(prepare=unchecked)) == {0}
    loss, _ = largest_difference(layout, one_process, 1)
    wrong = software.megatron_core() != NEWEST
    assert (loss > 1e-3) == wrong and (wrong or loss <= TOLERANCE)


def test_the_shared_expert_may_run_while_tokens_travel(
    one_process: Trial, trial: Callable[..., Trial]
) -> None:
    overlapped = trial(MOE, moe_shared_expert_overlap=True)
    calls = overlapped.run.directory / "calls"
    assert overlapped.train(prepare=counting(calls, *OVERLAPPED)) == [0]
    assert calls.read_text(), "nothing was overlapped"
    loss, norm = largest_difference(overlapped, one_process, 1)
    assert loss <= TOLERANCE and norm <= TOLERANCE
