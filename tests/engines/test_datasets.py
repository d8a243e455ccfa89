"""Which sample comes when, and training on every format: the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dataset_specimens import (
    DISTILBERT,
    PACKED,
    VIT,
    config_of,
    opened,
    write_conversations,
    write_folder,
    write_pictures,
    write_texts,
)
from trial_runs import MakeTrial, assert_near, assert_resumes_exactly

from hpctrain.base.errors import InvalidInputError
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.data import sample_order
from hpctrain.train.datasets.sample_order import SampleOrder, split_rows
from hpctrain.train.engine import Evaluation, evaluated, evaluated_samples
from hpctrain.train.engines.models.tasks import loss_of

WRITERS: dict[str, tuple[dict[str, Any], Callable[[Path], Path]]] = {
    "arrays": (VIT, lambda place: write_pictures(place / "a.npz")),
    "examples": (DISTILBERT, lambda place: write_texts(place / "e.npz")),
    "packed": (PACKED, lambda place: write_conversations(place / "p.npz")),
    "images": (
        {**VIT, "data_format": "images", "augmentation": "crop_flip"},
        lambda place: write_folder(place / "folder"),
    ),
}


def test_every_epoch_shows_every_row_once_and_in_another_order() -> None:
    order = SampleOrder(np.arange(100, 150), horizon=1000, seed=7)
    epochs = [order.of(range(first, first + 50)) for first in (0, 50, 100)]
    for epoch in epochs:
        assert sorted(epoch) == [*range(100, 150)]
    assert not np.array_equal(epochs[0], epochs[1]) and not np.array_equal(epochs[1], epochs[2])
    across = order.of(range(40, 60))
    assert list(across) == [*epochs[0][40:], *epochs[1][:10]]
    assert list(order.of(range(1000, 1010))) == list(order.of(range(10))), "behind the horizon"


def test_the_order_is_what_it_was_when_this_was_written() -> None:
    """Runs that are under way go on after an upgrade, so these numbers must never change."""
    order = SampleOrder(np.arange(10), horizon=100, seed=1234)
    assert order.of(range(20)).tolist() == [
        9, 5, 6, 4, 0, 1, 8, 2, 7, 3,
        7, 4, 1, 8, 9, 2, 6, 3, 0, 5,
    ]  # fmt: skip


def test_the_split_depends_on_the_number_of_rows_alone() -> None:
    training, validation = split_rows(200, "80,15,5")
    assert (len(training), len(validation)) == (160, 30)
    assert not set(training) & set(validation)
    assert [list(one) for one in split_rows(200, "80,15,5")] == [list(training), list(validation)]
    assert list(validation) != sorted(validation), "not the last ones: data is often sorted"
    with pytest.raises(InvalidInputError, match="no samples at all"):
        split_rows(200, "0,0,0")


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}


def per_sample(
    config: Any, cache: Path, steps: Iterator[int] | range
) -> dict[int, dict[str, torch.Tensor]]:
    """What all ranks read, by the number of the sample within the run."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for rank in range(config.data_parallel_size):
        data = opened(config, cache, rank)
        for step in steps:
            for batch in data.training.microbatches(evaluated_samples(config, step)):
                for place, sample in enumerate(batch.samples):
                    assert sample not in found
                    found[sample] = {name: one[place] for name, one in tensors(batch).items()}
    return found


@pytest.mark.parametrize("format", WRITERS)
def test_a_sample_is_the_same_in_every_layout(format: str, tmp_path: Path) -> None:
    base, write = WRITERS[format]
    path = write(tmp_path)
    layouts = [(2, 1), (1, 2), (4, 2), (1, 1)]
    read = [
        per_sample(
            config_of(base, path, micro_batch_size=micro, data_parallel_size=ranks),
            tmp_path / f"cache-{ranks}",
            range(3),
        )
        for micro, ranks in layouts
    ]
    assert sorted(read[0]) == [*range(24)]
    for other in read[1:]:
        assert other.keys() == read[0].keys()
        for sample, one in read[0].items():
            assert all(torch.equal(one[name], other[sample][name]) for name in one)


def test_a_resume_needs_nothing_but_the_number_of_samples(tmp_path: Path) -> None:
    config = config_of(VIT, write_pictures(tmp_path / "a.npz"), augmentation="crop_flip")
    whole = per_sample(config, tmp_path, range(12))
    later = per_sample(config, tmp_path, range(9, 12))
    assert all(torch.equal(one["pixels"], whole[k]["pixels"]) for k, one in later.items())


def test_validation_is_never_augmented_nor_trained_on(tmp_path: Path) -> None:
    path = write_pictures(tmp_path / "a.npz")
    changes: dict[str, Any] = dict(
        data_split="60,40,0", eval_interval_steps=1, eval_batches=4, augmentation="crop_flip"
    )
    seen = []
    for seed in (1, 2):
        data = opened(config_of(VIT, path, **changes, seed=seed), tmp_path)
        assert data.validation is not None
        batches = [
            *data.validation.microbatches(range(8)),
            *data.validation.microbatches(range(16, 24)),
        ]
        seen.append(torch.cat([batch.pixels for batch in batches]))
        trained = [
            batch
            for step in range(6)
            for batch in data.training.microbatches(range(step * 8, step * 8 + 8))
        ]
        plain = opened(config_of(VIT, path, **{**changes, "augmentation": "none"}), tmp_path)
        unchanged = {
            bytes(p.numpy()) for b in plain.training.microbatches(range(8)) for p in b.pixels
        }
        held = {bytes(picture.numpy()) for picture in seen[-1]}
        assert not held & unchanged
        assert not held & {bytes(p.numpy()) for batch in trained for p in batch.pixels}
    assert torch.equal(seen[0], seen[1])


def test_validation_data_of_their_own(tmp_path: Path) -> None:
    path, other = write_pictures(tmp_path / "a.npz"), write_pictures(tmp_path / "b", 10)
    config = config_of(
        VIT, path, data_validation=str(other), eval_interval_steps=1, train_steps=100
    )
    data = opened(config, tmp_path)
    assert data.rows == 50, "all of the sources are trained on"
    assert data.validation is not None
    (first, *_) = data.validation.microbatches(range(8))
    assert first.labels.tolist() == [0, 1], "in their own order"


def test_what_decides_about_the_order_is_kept_in_checkpoints(tmp_path: Path) -> None:
    small = config_of(VIT, write_pictures(tmp_path / "a.npz"))
    large = config_of(VIT, write_pictures(tmp_path / "b.npz", 60))
    orders = [sample_order(one, opened(one, tmp_path)) for one in (small, large)]
    assert [order["samples to train on"] for order in orders] == [49, 59]
    assert {name for name in orders[0] if orders[0][name] != orders[1][name]} == {
        "samples to train on", "data_blend"
    }  # fmt: skip
    assert orders[0]["data_format"] == "arrays"


# -----------------------------------------------------------------------------------------------
# Training on every format: losses of one process on two, resumes that change nothing, refusals.

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
@pytest.mark.parametrize("kind", RUNS)
def test_two_ranks_learn_what_one_does(kind: str, tmp_path: Path, trial: MakeTrial) -> None:
    base, write = RUNS[kind]
    settings: dict[str, Any] = dict(
        data_blend=[(1.0, str(write(tmp_path)))],
        data_split="75,25,0",
        eval_interval_steps=3,
        save_interval_steps=4,
    )
    alone, spread = trial(base, **settings), trial(base, **settings, **TWO)
    assert alone.train() == [0] and spread.train() == [0, 0]
    assert_near(spread, alone, 1, ROUNDING, 20 * ROUNDING)
    evaluated = {row.step: row.eval_loss for row in alone.rows if row.eval_loss is not None}
    assert sorted(evaluated) == [3, 6]
    for row in spread.rows:
        assert row.eval_loss == pytest.approx(evaluated.get(row.step), abs=1e-5)
    right = [row.eval_accuracy for row in spread.rows if row.eval_loss is not None]
    assert right == [row.eval_accuracy for row in alone.rows if row.eval_loss is not None]
    assert all((one is None) == (kind == "packed") for one in right), "of classes only"
    if kind in RESUMED:
        resumed = trial(base, **settings)
        assert_resumes_exactly(resumed, alone)


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


def test_data_that_are_made_up_can_be_learned(trial: MakeTrial) -> None:
    made = trial(VIT, train_steps=20, lr_decay_steps=20, lr=5e-3)
    assert made.train() == [0]
    losses = list(made.losses.values())
    assert min(losses[-4:]) < losses[0] - 0.1


def test_a_run_never_goes_on_with_other_data(tmp_path: Path, trial: MakeTrial) -> None:
    path = write_pictures(tmp_path / "a.npz")
    settings: dict[str, Any] = dict(data_blend=[(1.0, str(path))], save_interval_steps=2)
    whole = trial(VIT, **settings, train_steps=2, lr_decay_steps=6)
    assert whole.train() == [0]
    write_pictures(path, 60)
    later = trial(VIT, **settings, train_steps=2, lr_decay_steps=6)
    later.adopt(whole, 2)
    assert later.train(resume=2) == [TrainerExit.CONFIG_ERROR]
    assert "samples to train on was 49 and is now 59" in later.message()


def test_files_are_looked_at_before_torch_is_imported(tmp_path: Path, trial: MakeTrial) -> None:
    path = write_pictures(tmp_path / "a.npz", side=9)
    made = trial(VIT, data_blend=[(1.0, str(path)), (1.0, str(tmp_path / "b"))])
    assert made.train() == [TrainerExit.CONFIG_ERROR]
    message = made.message()
    assert "9 x 9 pixels, the model reads 8 x 8" in message
    assert f"{tmp_path}/b.npz: does not exist" in message
