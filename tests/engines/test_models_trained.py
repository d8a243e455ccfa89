"""Tasks and LoRA in real runs: the same on any number of ranks, and what comes out of them."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_trials import PLAIN, PLAIN_LLAMA, ZERO, ZERO_TP2_PP2
from safetensors.torch import load_file
from trial_runs import (
    LIMIT_SECONDS,
    MODULE_GPT,
    MODULE_LLAMA,
    Trial,
    largest_difference,
    trained,
)
from variants import varied

from hpctrain.convert.__main__ import convert

# fp32 rounding of a mean over other partial sums
ROUNDING = 5e-6
SHORT: dict[str, Any] = dict(train_steps=4, lr_decay_steps=4, save_interval_steps=2)
TWO: dict[str, Any] = dict(data_parallel_size=2, micro_batch_size=1)
FSDP: dict[str, Any] = dict(TWO, engine="fsdp", shard_size=2)

ENCODER = dict(layers=2, hidden=64, ffn=128, heads=4, vocab=250, seq=32)
MASKED: dict[str, Any] = dict(
    MODULE_GPT, model=dict(ENCODER, family="bert"), task="masked_language_modeling"
)
LORA: dict[str, Any] = dict(MODULE_LLAMA, lora=dict(rank=2, dropout=0.0))


def exported(trial: Trial, step: int, target: Path) -> dict[str, Any]:
    """Weights of a checkpoint as a Hugging Face directory, made in a process of its own."""
    given = (trial.run.checkpoints / f"iter_{step:07}", target)
    process = multiprocessing.get_context("fork").Process(target=convert, args=given)
    process.start()
    process.join(LIMIT_SECONDS)
    assert process.exitcode == 0
    return load_file(target / "model.safetensors")


@pytest.mark.variant("test_weights_come_from_a_directory")
def test_masked_words_are_learned_alike_on_any_number_of_ranks(
    trial: Callable[..., Trial],
) -> None:
    alone, spread = trained(MASKED, **SHORT), trial(MASKED, **SHORT, **FSDP)
    assert spread.train() == [0, 0]
    loss, norm = largest_difference(spread, alone, 1)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING


@pytest.mark.variant("test_weights_come_from_a_directory")
def test_a_weight_with_fewer_rows_than_ranks_is_saved_and_resumed(
    trial: Callable[..., Trial],
) -> None:
    """BERT's embedding of two segments, over three ranks: one of them has nothing of it."""
    three = dict(engine="fsdp", data_parallel_size=3, shard_size=3, micro_batch_size=1)
    small = dict(model={**MASKED["model"], "layers": 1}, global_batch_size=6)
    settings = dict(MASKED, **SHORT, **three, **small)
    whole, again = trained(settings), trial(settings)
    again.adopt(whole, 2)
    assert again.train(resume=2) == [0] * 3
    assert again.exact == {step: row for step, row in whole.exact.items() if step > 2}


@pytest.mark.variant("test_weights_come_from_a_directory")
@pytest.mark.parametrize("engine", varied(["ddp", "fsdp"], "fsdp"))
def test_lora_is_learned_alike_resumed_exactly_and_merged(
    engine: str, trial: Callable[..., Trial], tmp_path: Path
) -> None:
    layout = FSDP if engine == "fsdp" else TWO
    alone, spread = trained(LORA, **SHORT), trained(LORA, **SHORT, **layout)
    loss, _ = largest_difference(spread, alone, 1)
    assert loss <= ROUNDING and spread.losses[4] < spread.losses[1] - 0.01
    again = trial(LORA, **SHORT, **layout)
    again.adopt(spread, 2)
    assert again.train(resume=2) == [0, 0]
    assert again.exact.items() <= spread.exact.items()
    compare_weights(exported(spread, 2, tmp_path / "2"), exported(spread, 4, tmp_path / "4"))
    reader = dcp.FileSystemReader(spread.run.checkpoints / "iter_0000004")
    stored = [one for one in reader.read_metadata().state_dict_metadata if one.startswith("model.")]
    assert stored and all(".lora_" in one for one in stored), "only what is learned"


def compare_weights(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Layers of the blocks differ by a matrix of rank 2 for each of the two states; others stay."""
    for name, weight in after.items():
        difference = weight - before[name]
        if "_proj" in name:
            sizes = torch.linalg.svdvals(difference.double())
            assert sizes[0] > 1e-4 and sizes[4] < 1e-5 * sizes[0], name
        else:
            assert not difference.any(), name


PARTS: dict[str, dict[str, Any]] = {
    "stage 0": dict(ZERO, zero_stage=0),
    "stage 1": dict(ZERO, zero_stage=1),
    "stage 3": dict(ZERO, zero_stage=3),
    "pipeline": dict(ZERO, pipeline_stages=(1, 1), data_parallel_size=1),
    "tp": dict(ZERO_TP2_PP2, pipeline_stages=()),
    "tp x pp": ZERO_TP2_PP2,
}


@pytest.mark.variant("test_weights_come_from_a_directory")
@pytest.mark.parametrize("kind", list(PARTS))
def test_weights_of_deepspeed_are_put_together(kind: str, tmp_path: Path) -> None:
    alone = trained(PLAIN_LLAMA if kind.startswith("tp") else PLAIN)
    spread = trained(PARTS[kind])
    wanted, found = (
        exported(one, 4, tmp_path / str(number)) for number, one in enumerate((alone, spread))
    )
    assert wanted.keys() == found.keys()
    assert all((found[name] - wanted[name]).abs().max() < 1e-4 for name in wanted)


@pytest.mark.variant("test_weights_come_from_a_directory")
def test_an_exported_directory_is_a_model_to_start_from(
    trial: Callable[..., Trial], tmp_path: Path
) -> None:
    """A run that starts from the weights of another one's checkpoint has its next loss at once."""
    first = trained(MASKED, **SHORT)
    exported(first, 4, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]
    pretrained = {**MASKED["model"], "pretrained": str(tmp_path / "hf")}
    second = trial(MASKED, **{**SHORT, "model": pretrained})
    assert second.train() == [0]
    assert second.losses[1] < first.losses[1] - 0.05
