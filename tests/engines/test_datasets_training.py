"""Training on every format: losses of one process on two, resumes that change nothing, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dataset_specimens import (
    DISTILBERT,
    PACKED,
    VIT,
    config_of,
    write_conversations,
    write_folder,
    write_pictures,
    write_texts,
)
from trial_runs import Trial, largest_difference
from variants import varied

from hpctrain.records.run_records import TrainerExit
from hpctrain.train.engine import Evaluation, evaluated
from hpctrain.train.engines.models.tasks import loss_of

ROUNDING = 5e-6
TWO = dict(data_parallel_size=2, micro_batch_size=1)
FOLDER = {
    **VIT, "data_format": "images", "augmentation": "crop_flip", "data_workers": 1
}  # fmt: skip
RUNS: dict[str, tuple[dict[str, Any], Callable[[Path], Path]]] = {
    "arrays": (VIT, lambda place: write_pictures(place / "a.npz")),
    "examples": (DISTILBERT, lambda place: write_texts(place / "e.npz")),
    "packed": (PACKED, lambda place: write_conversations(place / "p.npz")),
    "images, read ahead": (FOLDER, lambda place: write_folder(place / "folder")),
}
RESUMED = ("packed", "images, read ahead")


@pytest.mark.variant("test_data_that_are_made_up_can_be_learned")
@pytest.mark.parametrize("kind", varied(RUNS, "packed"))
def test_two_ranks_learn_what_one_does(
    kind: str, tmp_path: Path, trial: Callable[..., Trial]
) -> None:
    base, write = RUNS[kind]
    settings: dict[str, Any] = dict(
        data_blend=[(1.0, str(write(tmp_path)))],
        data_split="75,25,0",
        eval_interval_steps=3,
        save_interval_steps=4,
    )
    alone, spread = trial(base, **settings), trial(base, **settings, **TWO)
    assert alone.train() == [0] and spread.train() == [0, 0]
    loss, norm = largest_difference(spread, alone, 1)
    assert loss <= ROUNDING and norm <= 20 * ROUNDING
    evaluated = {row.step: row.eval_loss for row in alone.rows if row.eval_loss is not None}
    assert sorted(evaluated) == [3, 6]
    for row in spread.rows:
        assert row.eval_loss == pytest.approx(evaluated.get(row.step), abs=1e-5)
    right = [row.eval_accuracy for row in spread.rows if row.eval_loss is not None]
    assert right == [row.eval_accuracy for row in alone.rows if row.eval_loss is not None]
    assert all((one is None) == (kind == "packed") for one in right), "of classes only"
    if kind in RESUMED:
        resumed = trial(base, **settings)
        resumed.adopt(alone, 4)
        assert resumed.train(resume=4) == [0]
        assert resumed.exact == {step: row for step, row in alone.exact.items() if step > 4}


class Guesses(torch.nn.Module):
    """Says the same whatever it is shown."""

    def forward(self, pixel_values: Any) -> Any:
        return SimpleNamespace(logits=torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0]]))


def test_accuracy_is_the_share_of_classes_that_were_right() -> None:
    loss, module = loss_of(config_of(VIT)), Guesses()
    batch = SimpleNamespace(pixels=None, labels=torch.tensor([0, 1, 1]))
    assert len(loss(module, batch)) == 2, "nobody asks while training"
    found = evaluated(torch.stack([one.float() for one in loss(module.eval(), batch)]))
    assert found.accuracy == pytest.approx(2 / 3) and found.loss == pytest.approx(3.0, abs=0.01)
    assert evaluated(torch.tensor([6.0, 2.0])) == Evaluation(3.0, None)


def test_data_that_are_made_up_can_be_learned(trial: Callable[..., Trial]) -> None:
    made = trial(VIT, train_steps=20, lr_decay_steps=20, lr=5e-3)
    assert made.train() == [0]
    losses = list(made.losses.values())
    assert min(losses[-4:]) < losses[0] - 0.1


def test_a_run_never_goes_on_with_other_data(tmp_path: Path, trial: Callable[..., Trial]) -> None:
    path = write_pictures(tmp_path / "a.npz")
    settings: dict[str, Any] = dict(data_blend=[(1.0, str(path))], save_interval_steps=2)
    whole = trial(VIT, **settings, train_steps=2, lr_decay_steps=6)
    assert whole.train() == [0]
    write_pictures(path, 60)
    later = trial(VIT, **settings, train_steps=2, lr_decay_steps=6)
    later.adopt(whole, 2)
    assert later.train(resume=2) == [TrainerExit.CONFIG_ERROR]
    assert "samples to train on was 49 and is now 59" in (later.exits()[0].message or "")


def test_files_are_looked_at_before_torch_is_imported(
    tmp_path: Path, trial: Callable[..., Trial]
) -> None:
    path = write_pictures(tmp_path / "a.npz", side=9)
    made = trial(VIT, data_blend=[(1.0, str(path)), (1.0, str(tmp_path / "b"))])
    assert made.train() == [TrainerExit.CONFIG_ERROR]
    message = made.exits()[0].message or ""
    assert "9 x 9 pixels, the model reads 8 x 8" in message
    assert f"{tmp_path}/b.npz: does not exist" in message
