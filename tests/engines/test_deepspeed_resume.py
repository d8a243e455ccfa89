"""Checkpoints of DeepSpeed: exact with the same ranks, within rounding with others, or refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damaged_checkpoints import flip_a_byte, vouch
from deepspeed_trials import (
    PLAIN_LLAMA,
    ROUNDING,
    WITH_DROPOUT,
    ZERO,
    ZERO3,
    ZERO_PP2,
    ZERO_TP2_PP2,
    words_of,
)
from trial_runs import (
    Trial,
    config_of,
    largest_difference,
    make_trial,
    once,
    trained,
    two_micro_batches,
)
from variants import varied

from hpctrain.base.errors import InvalidInputError
from hpctrain.checkpoints.publish import TRACKER_NAME
from hpctrain.engines.deepspeed import DeepSpeedConfig
from hpctrain.engines.train_json import parse_train_config
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    checkpoint_name,
    file_problem,
    read_manifest,
    read_rank_digests,
    what_is_wrong,
)
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.engines.deepspeed.universal_checkpoint import refuse_unreadable_layout

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the deepspeed extra", allow_module_level=True)

SPLIT: dict[str, Any] = dict(model=PLAIN_LLAMA["model"], tensor_parallel=2)


def of_stage(stage: int) -> Trial:
    """A run of two ranks, with checkpoints."""
    return trained(ZERO, zero_stage=stage)


def moved_to(stage: int, ranks: int, now: int) -> Trial:
    """The rest of a run of two ranks, on so many ranks at another stage."""
    changes = two_micro_batches(ZERO, zero_stage=now, data_parallel_size=ranks)

    def train(directory: Path) -> None:
        moved = make_trial(directory, ZERO, **changes)
        moved.adopt(of_stage(stage), 4)
        assert moved.train(resume=4) == [0] * ranks

    place = once(f"stage {stage}, moved to {ranks} ranks at stage {now}", train)
    return Trial(RunLayout(place), config_of(ZERO, **changes))


RESUMED: dict[str, dict[str, Any]] = {
    "stage 1": dict(ZERO, **WITH_DROPOUT),
    "stage 3": ZERO3,
    "lora in bf16, optimizer on the host": dict(
        ZERO, zero_stage=3, precision="bf16", offload_optimizer="cpu", lora=dict(rank=4)
    ),
    "pipeline": ZERO_PP2,
    "pipeline, two replicas": dict(ZERO_PP2, data_parallel_size=2),
    "tp": dict(ZERO, **SPLIT, zero_stage=2, data_parallel_size=1, async_save=True),
    "tp x pp": ZERO_TP2_PP2,
    "tp x pp, bf16": dict(ZERO_TP2_PP2, precision="bf16"),
}


@pytest.mark.parametrize("kind", varied(RESUMED, "tp x pp"))
def test_a_resume_is_exact(kind: str, trial: Callable[..., Trial]) -> None:
    whole, resumed = trained(RESUMED[kind]), trial(RESUMED[kind])
    resumed.adopt(whole, 4)
    assert resumed.train(resume=4) == [0] * resumed.world_size
    assert resumed.exact == {step: row for step, row in whole.exact.items() if step > 4}


@pytest.mark.variant("test_a_resume_is_exact")
@pytest.mark.parametrize(
    ("stage", "ranks", "now"),
    [
        pytest.param(1, 1, 2),
        (3, 1, 3),
        pytest.param(3, 4, 3),
    ],
)
def test_other_ranks_go_on_within_rounding(stage: int, ranks: int, now: int) -> None:
    """By the universal format, which stages 1 and 2 share. With two groups of weights: stage 3
    loads them with one number of steps and one weight decay for both, which is put right."""
    source, moved = of_stage(stage), moved_to(stage, ranks, now)
    loss, norm = largest_difference(moved, source, 5)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING
    assert "re-seeded:_saved_with_2_ranks" in words_of(moved)
    assert (moved.run.checkpoints / checkpoint_name(4) / "universal").is_dir(), "made once"


@pytest.mark.variant("test_a_resume_is_exact")
def test_a_changed_conversion_is_made_again(trial: Callable[..., Trial]) -> None:
    """It has digests of its own, and what it was made of is still there."""
    moved = moved_to(3, 1, 3)
    changed = trial(ZERO, zero_stage=3, data_parallel_size=1)
    changed.adopt(moved, 4)
    target = changed.run.checkpoints / checkpoint_name(4) / "universal"
    weights = max(target.rglob("*.pt"), key=lambda path: path.stat().st_size)
    flip_a_byte(weights)
    assert changed.train(resume=4) == [0]
    assert changed.exact == moved.exact
    made = read_rank_digests(target)
    assert made and not any(file_problem(target, one, deep=True) for one in made)


@pytest.mark.variant("test_a_resume_is_exact")
def test_another_tp_goes_on_within_rounding(trial: Callable[..., Trial]) -> None:
    """A tied weight, biases, and words that two do not divide; ranks are as many as before."""
    model = {**PLAIN_LLAMA["model"], "vocab": 251, "tied": True, "bias": True}
    changes: dict[str, Any] = dict(model=model, vocab_size=251)
    source = trained(ZERO, **changes, tensor_parallel=2, data_parallel_size=1)
    moved = trial(ZERO, **changes)
    moved.adopt(source, 2)
    assert moved.train(resume=2) == [0, 0]
    loss, norm = largest_difference(moved, source, 3)
    assert loss <= ROUNDING and norm <= 10 * ROUNDING


@pytest.mark.variant("test_damage_is_called_by_its_name")
def test_a_checkpoint_is_whole_and_has_nothing_beside_it() -> None:
    root = of_stage(1).run.checkpoints
    assert sorted(path.name for path in root.iterdir()) == [
        *(checkpoint_name(step) for step in (2, 4, 6)),
        TRACKER_NAME,
    ]
    directory = root / checkpoint_name(6)
    manifest = read_manifest(directory)
    assert what_is_wrong(directory, manifest, deep=True) is None
    assert manifest is not None and manifest.layout == "dp 2 · ZeRO 1"
    assert {file.name for file in manifest.files} == {
        "about.json",
        "mp_rank_00_model_states.pt",
        "random_rank_000000.pt",
        "random_rank_000001.pt",
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    }


REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "another family of stages": (
        1,
        dict(zero_stage=3),
        "was saved at ZeRO stage 1, and stage 3 cannot read it",
    ),
    "another precision": (1, dict(precision="bf16", zero_stage=2), "was saved in fp32"),
    "another order of samples": (1, dict(seed=7), "seed was 1234 and is now 7"),
}


@pytest.mark.variant("test_damage_is_called_by_its_name")
@pytest.mark.parametrize("kind", varied(REFUSED, "another family of stages"))
def test_what_cannot_go_on_is_said(kind: str, trial: Callable[..., Trial]) -> None:
    stage, changes, words = REFUSED[kind]
    other = trial(ZERO, **changes)
    other.adopt(of_stage(stage), 2)
    assert other.train(resume=2) == [TrainerExit.CONFIG_ERROR] * 2
    assert words in words_of(other)


def test_without_zero_weights_stay_split_as_they_were(tmp_path: Path) -> None:
    """Its optimizer's state has no universal form, and DeepSpeed would not say what is wrong."""
    config = parse_train_config(json.dumps({**ZERO, **SPLIT, "zero_stage": 0}))
    assert isinstance(config, DeepSpeedConfig)
    about = dict(zero_stage=0, world_size=4, tensor_parallel=2, precision="fp32", on_nvme=False)
    about["stages_layout"] = "no pipeline"
    refuse_unreadable_layout(config, 2, about, tmp_path)
    with pytest.raises(InvalidInputError, match="at ZeRO stage 0 with tp 4, not 2"):
        refuse_unreadable_layout(config, 4, {**about, "tensor_parallel": 4}, tmp_path)


def test_state_on_nvme_stays_with_its_ranks(trial: Callable[..., Trial]) -> None:
    one = trial(ZERO, data_parallel_size=1)
    one.adopt(of_stage(1), 2)
    about = one.run.checkpoints / checkpoint_name(2) / "about.json"
    text = about.read_text()
    assert '"on_nvme": false' in text
    about.write_text(text.replace('"on_nvme": false', '"on_nvme": true'))
    vouch(about.parent)
    assert one.train(resume=2) == [TrainerExit.CONFIG_ERROR]
    assert "its state on NVMe belongs to 2 ranks, and there are 1" in words_of(one)


@pytest.mark.parametrize(
    ("ranks", "file"),
    [
        (2, "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        pytest.param(2, "random_rank_000000.pt", marks=pytest.mark.variant),
        pytest.param(1, "zero_pp_rank_1_mp_rank_00_optim_states.pt", marks=pytest.mark.variant),
    ],
    ids=["state", "random numbers", "met by the converter"],
)
def test_damage_is_called_by_its_name(ranks: int, file: str, trial: Callable[..., Trial]) -> None:
    """Zeros in the place of the end of a file, whose size tells nothing."""
    hurt = trial(ZERO, data_parallel_size=ranks)
    hurt.adopt(of_stage(1), 2)
    path = hurt.run.checkpoints / checkpoint_name(2) / file
    content = path.read_bytes()
    path.write_bytes(content[:-500] + bytes(500))
    assert 0 not in hurt.train(resume=2)
    assert {record.cause for record in hurt.exits() if record.rank == 0} == {"bad_checkpoint"}
