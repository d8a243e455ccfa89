"""ZeRO: the losses of one process, whatever the stage and wherever things are kept."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed_trials import PLAIN, PLAIN_LLAMA, ROUNDING, ZERO, ZERO_TP2_PP2, words_of
from trial_runs import Trial, largest_difference, trained
from variants import varied

from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.plan.mesh.layout import layout_of
from hpctrain.plan.mesh.stages import build_stages
from hpctrain.records.manifest import checkpoint_name
from hpctrain.spec.run import ParallelSpec
from hpctrain.train.engines.models.build import build_module

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the deepspeed extra", allow_module_level=True)


@pytest.fixture(scope="module")
def gpt() -> Trial:
    """One process, plain PyTorch."""
    return trained(PLAIN)


MASKED: dict[str, Any] = dict(
    PLAIN,
    model=dict(family="bert", layers=2, hidden=64, ffn=128, heads=4, vocab=250, seq=32),
    task="masked_language_modeling",
)
HOST = dict(offload_optimizer="cpu", offload_parameters="cpu")
KINDS: dict[str, dict[str, Any]] = {
    "stage 0": dict(zero_stage=0),
    "stage 2, overlapped": dict(zero_stage=2, overlap_comm=True),
    "stage 2, optimizer on the host": dict(zero_stage=2, offload_optimizer="cpu"),
    "stage 3, all on the host": dict(zero_stage=3, **HOST),
    "stage 3, recomputed": dict(zero_stage=3, activation_checkpointing=True, overlap_comm=True),
}


@pytest.mark.parametrize("kind", varied(KINDS, "stage 3, all on the host"))
def test_losses_are_those_of_one_process(
    kind: str, trial: Callable[..., Trial], gpt: Trial
) -> None:
    spread = trial(ZERO, **KINDS[kind])
    assert spread.train() == [0, 0]
    loss, norm = largest_difference(spread, gpt, 1)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING
    assert spread.losses[6] < spread.losses[1] - 0.1, "it learns"
    assert "DeepSpeed" not in words_of(spread), "its log is kept out of the run's"


OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # an output layer of its own, and angles in buffers that are not divided
    "llama": (PLAIN_LLAMA, {}),
    # most weights are frozen, and belong to no group of the optimizer
    "lora": (PLAIN, dict(lora=dict(rank=4))),
}


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("kind", varied(OTHERS, "lora"))
def test_divided_weights_of_other_kinds(kind: str, trial: Callable[..., Trial]) -> None:
    base, changes = OTHERS[kind]
    spread = trial({**ZERO, **changes, "model": base["model"]}, zero_stage=3)
    assert spread.train() == [0, 0]
    loss, norm = largest_difference(spread, trained({**base, **changes}), 1)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING


PIPELINES: dict[str, dict[str, Any]] = {
    "two replicas, recomputed": dict(data_parallel_size=2, activation_checkpointing=True),
    "pipelines on neighbours": dict(data_parallel_size=2, parallel_order="tp-cp-ep-pp-dp"),
}


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("kind", PIPELINES)
def test_two_stages_are_one_model(kind: str, trial: Callable[..., Trial], gpt: Trial) -> None:
    spread = trial(ZERO, **PIPELINES[kind], pipeline_stages=(1, 1))
    assert spread.train() == [0] * spread.world_size
    loss, norm = largest_difference(spread, gpt, 1)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("precision", varied(["fp32", "bf16"], "fp32"))
def test_stages_of_llama(precision: str, trial: Callable[..., Trial]) -> None:
    """Uneven ones, one of which reads nothing; with rotary angles and a mask of each block's own.
    In bf16 near enough."""
    model = {**PLAIN_LLAMA["model"], "layers": 4}
    plain = trained(PLAIN_LLAMA, model=model, eval_interval_steps=6)
    stages = dict(ZERO, model=model, pipeline_stages=(1, 2, 1), data_parallel_size=1)
    bound = ROUNDING if precision == "fp32" else 2e-3
    spread = trial(stages, precision=precision, eval_interval_steps=6)
    assert spread.train() == [0, 0, 0]
    assert largest_difference(spread, plain, 1)[0] <= bound
    assert evaluated(spread) == pytest.approx(evaluated(plain), abs=bound)


SPLIT: dict[str, tuple[dict[str, Any], float]] = {
    "stage 2, recomputed": (
        dict(zero_stage=2, activation_checkpointing=True),
        ROUNDING,
    ),
    "pipeline": (dict(pipeline_stages=(1, 1)), ROUNDING),
    "bf16": (dict(precision="bf16"), 2e-3),
}


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("kind", varied(SPLIT, "stage 2, recomputed"))
def test_weights_split_over_ranks(kind: str, trial: Callable[..., Trial]) -> None:
    """In both kinds of pipelines and without: words that two ranks share unevenly and that are one
    weight at both ends, and biases. In bf16 near enough."""
    model = {**PLAIN_LLAMA["model"], "vocab": 251, "tied": True, "bias": True}
    base: dict[str, Any] = dict(model=model, vocab_size=251, eval_interval_steps=3)
    plain = trained(PLAIN, **base)
    changes, bound = SPLIT[kind]
    spread = trial(ZERO, **base, tensor_parallel=2, data_parallel_size=1, **changes)
    assert spread.train() == [0] * spread.world_size
    assert largest_difference(spread, plain, 1)[0] <= bound
    assert evaluated(spread) == pytest.approx(evaluated(plain), abs=bound)


@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 1, marks=pytest.mark.variant), (2, 2)])
def test_ranks_have_the_weights_that_were_planned(tp: int, pp: int) -> None:
    """As many as the manifest's files of each place say, not a rank's word for it."""
    made = trained(ZERO_TP2_PP2, pipeline_stages=(1,) * pp if pp > 1 else ())
    planned = build_stages(
        made.config.model, layout_of(ParallelSpec(tp=tp, pp=pp), tp * pp), (2 // pp,) * pp, 1
    )
    checkpoint = made.run.checkpoints / checkpoint_name(2)
    for stage in planned:
        for rank in range(tp):
            state = (
                checkpoint / f"zero_pp_rank_0_mp_rank_{stage.index * tp + rank:02d}_optim_states.pt"
            )
            told = torch.load(state, weights_only=False)["optimizer_state_dict"]
            held = sum(one.numel() for one in told["single_partition_of_fp32_groups"])
            assert held == stage.parameters_per_gpu


def evaluated(trial: Trial) -> dict[int, float]:
    return {row.step: row.eval_loss for row in trial.rows if row.eval_loss is not None}


def test_stages_have_the_weights_that_were_planned() -> None:
    """Of a tied model the words are on the first stage and on the last one."""
    from hpctrain.train.engines.deepspeed.pipeline_stages import cuts_of, layers_of

    layout, split = layout_of(ParallelSpec(pp=2), 2), (1, 1)
    for base in (ZERO, {**ZERO, "model": PLAIN_LLAMA["model"]}):
        config = parse_train_config(json.dumps({**base, "pipeline_stages": split}))
        assert isinstance(config, DeepSpeedConfig)
        module = build_module(config, device=torch.device("meta"))
        layers, before = layers_of(config, module)
        first, middle, end = cuts_of(split, before, len(layers))
        for stage, part in zip(
            build_stages(config.model, layout, split, vocab_multiple=1),
            (layers[first:middle], layers[middle:end]),
            strict=True,
        ):
            assert count(part) == stage.parameters_per_gpu


def count(layers: list[Any]) -> int:
    built = [one if isinstance(one, torch.nn.Module) else one.build() for one in layers]
    return sum(p.numel() for p in {p for layer in built for p in layer.parameters()})


@pytest.fixture(scope="module")
def bert() -> Trial:
    return trained(MASKED)


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("stage", [3, 0, 1])
def test_each_loss_counts_the_same_where_few_do(
    stage: int, trial: Callable[..., Trial], bert: Trial
) -> None:
    """Of masked words each rank has another number; the mean is over those of the whole batch."""
    spread = trial(dict(ZERO, model=MASKED["model"], task=MASKED["task"]), zero_stage=stage)
    assert spread.train() == [0, 0]
    loss, norm = largest_difference(spread, bert, 1)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING


@pytest.mark.variant("test_losses_are_those_of_one_process")
def test_each_loss_counts_the_same_in_bf16(trial: Callable[..., Trial], bert: Trial) -> None:
    """Stage 1 has an optimizer class of its own there (BF16_Optimizer), without a scale."""
    changes = dict(model=MASKED["model"], task=MASKED["task"], precision="bf16")
    spread = trial({**ZERO, **changes})
    assert spread.train() == [0, 0]
    loss, norm = largest_difference(spread, bert, 1)
    assert loss < 2e-3 and norm < 0.05


@pytest.mark.variant("test_losses_are_those_of_one_process")
def test_bf16_stays_near_fp32(trial: Callable[..., Trial], gpt: Trial) -> None:
    spread = trial(ZERO, zero_stage=2, precision="bf16")
    assert spread.train() == [0, 0]
    loss, _ = largest_difference(spread, gpt, 1)
    assert 0 < loss < 2e-3


@pytest.mark.variant("test_losses_are_those_of_one_process")
def test_evaluation_changes_nothing(trial: Callable[..., Trial], gpt: Trial) -> None:
    spread = trial(ZERO, zero_stage=3, eval_interval_steps=2)
    assert spread.train() == [0, 0]
    assert largest_difference(spread, gpt, 1)[0] <= ROUNDING
    assert [row.step for row in spread.rows if row.eval_loss is not None] == [2, 4, 6]


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize(
    "changes",
    [
        dict(zero_stage=2),
        dict(pipeline_stages=(1, 1), data_parallel_size=1),
    ],
)
def test_gradients_that_are_not_finite_end_the_run(
    changes: dict[str, Any], trial: Callable[..., Trial]
) -> None:
    """DeepSpeed leaves the step out without a word; the run must not go on."""
    broken = trial(ZERO, **changes, lr=1e30, min_lr=0.0, lr_warmup_steps=0)
    codes = broken.train()
    assert 0 not in codes
    assert {record.cause for record in broken.exits()} == {"diverged"}


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("engine", ["native", "megatron"])
def test_other_engines_import_neither_deepspeed_nor_trackers(engine: str) -> None:
    unused = {"deepspeed", "wandb", "torch.utils.tensorboard", "torch._inductor"}
    code = (
        f"import sys, hpctrain.train.engines.{engine}.assembly; print({unused} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert told.stdout.strip() == "set()"
