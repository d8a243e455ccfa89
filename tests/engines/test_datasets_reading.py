"""What is read: contents, refusals, and processes that read ahead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
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
from PIL import Image
from torch.utils.data._utils import signal_handling
from waiting import wait_until

from hpctrain.base.errors import InvalidInputError
from hpctrain.train.datasets.npz_arrays import open_archive
from hpctrain.train.datasets.row_samples import RowSamples
from hpctrain.train.datasets.sample_rows import ImageTransform
from hpctrain.train.faults import DataError
from hpctrain.train.stop import LEFT_TO_RANKS

FOLDER: dict[str, Any] = {**VIT, "data_format": "images", "augmentation": "crop_flip"}


@pytest.fixture(autouse=True)
def _no_handler_stays() -> Iterator[None]:
    """torch's DataLoader takes over SIGCHLD and raises in whatever runs when a child of a later
    test ends (torch/utils/data/_utils/signal_handling.py)."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)
    signal_handling._SIGCHLD_handler_set = False


def first_batch(config: Any, cache: Path) -> Any:
    return next(iter(opened(config, cache).training.microbatches(range(8))))


def test_packed_rows_learn_the_token_that_follows(tmp_path: Path) -> None:
    path = write_conversations(tmp_path / "p.npz")
    batch = first_batch(config_of(PACKED, path), tmp_path)
    assert torch.equal(batch.labels[:, :-1], batch.tokens[:, 1:])
    assert batch.loss_mask.dtype == torch.float32 and batch.loss_mask.sum(1).tolist() == [14, 14]
    assert batch.positions[0, :18].tolist() == [*range(16), 0, 1]


def test_padding_is_masked(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "e.npz")
    batch = first_batch(config_of(DISTILBERT, path), tmp_path)
    assert batch.tokens.shape == (2, 12) == batch.attention_mask.shape
    assert (batch.tokens[:, 0] == batch.labels).all()
    lengths = batch.attention_mask.sum(1)
    for row, length in zip(batch.attention_mask, lengths, strict=True):
        assert row[:length].all() and not row[length:].any()


def test_files_and_classes_of_a_folder(tmp_path: Path) -> None:
    config = config_of(FOLDER, write_folder(tmp_path / "images"), data_split="100,0,0")
    samples = opened(config, tmp_path / "cache").training
    rows = getattr(samples, "rows")  # noqa: B009
    names = [rows.path(row).relative_to(tmp_path / "images") for row in range(len(rows))]
    assert [str(name) for name in names[5:8]] == [
        "class-0/ä5.png",
        "class-1/ä0.png",
        "class-1/ä1.png",
    ]
    batch = rows.read(np.array([0, 7, 17]), range(3), training=False)
    assert batch.labels.tolist() == [0, 1, 2]
    assert batch.pixels.shape == (3, 3, 8, 8) and batch.pixels.dtype == torch.float32
    assert len(list((tmp_path / "cache").iterdir())) == 1
    (tmp_path / "images" / "class-1" / "new.jpg").write_bytes(b"")
    assert opened(config, tmp_path / "cache").rows == 19, "the folder was looked at again"


def test_several_sources_are_read_as_a_whole(tmp_path: Path) -> None:
    paths = [write_pictures(tmp_path / "a.npz", 30), write_pictures(tmp_path / "b.npz", 20)]
    data = opened(config_of(VIT, *paths, data_split="100,0,0", train_steps=7), tmp_path)
    seen = [
        batch
        for step in range(7)
        for batch in data.training.microbatches(range(step * 8, step * 8 + 8))
    ]
    labels = torch.cat([batch.labels for batch in seen])[:50]
    assert data.rows == 50 and torch.bincount(labels).tolist() == [5] * 10


@pytest.mark.parametrize("base", [VIT, DISTILBERT, PACKED], ids=["arrays", "examples", "packed"])
def test_made_up_rows_are_for_the_model(base: dict[str, Any], tmp_path: Path) -> None:
    data = opened(config_of(base, eval_interval_steps=1), tmp_path)
    assert data.validation is not None
    for samples in (data.training, data.validation):
        once, again = (
            next(iter(samples.microbatches(range(8)))),
            next(iter(samples.microbatches(range(8)))),
        )
        for name, tensor in vars(once).items():
            assert name == "samples" or torch.equal(tensor, getattr(again, name))
        labels = once.labels
        assert labels.min() >= 0 and labels.max() < config_of(base).model.vocab
    if base is PACKED:
        learned = once.loss_mask[:, :-1].bool()
        assert learned.any() and not once.loss_mask[:, -1].any()
        assert (once.labels[:, :-1] == (once.tokens[:, :-1] + 1) % 250)[learned].all()


@pytest.mark.parametrize("compressed", [False, True])
def test_archives_are_mapped_unless_they_are_compressed(tmp_path: Path, compressed: bool) -> None:
    path, x = tmp_path / "a.npz", np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = dict(x=x, f=np.asfortranarray(x), none=np.zeros((0, 3)))
    (np.savez_compressed if compressed else np.savez)(path, **arrays)
    found = open_archive(path, arrays)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())
    base = found["x"].base
    while base is not None and not isinstance(base, np.memmap):
        base = getattr(base, "base", None)
    assert isinstance(base, np.memmap) != compressed


def test_pixels_depend_on_seed_and_sample_alone() -> None:
    look = ImageTransform(side=8, mean=(0.5,), std=(0.5,), augmentation="crop_flip", seed=1)
    image = Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3))
    array = np.arange(64, dtype=np.uint8).reshape(8, 8)
    for show in (lambda look, k: look.of_image(image, k), lambda look, k: look.of_array(array, k)):
        once, again, other = show(look, 5), show(look, 5), show(look, 6)
        assert np.array_equal(once, again) and not np.array_equal(once, other)
        reseeded = ImageTransform(8, (0.5,), (0.5,), "crop_flip", 2)
        assert any(not np.array_equal(show(look, k), show(reseeded, k)) for k in range(4))
        assert np.array_equal(show(look, None), show(look, None))
    assert look.of_array(array, None).shape == (3, 8, 8)
    expected = (array[0] / np.float32(255) - 0.5) / 0.5
    assert np.allclose(look.of_array(array, None)[2, 0], expected)


def test_mirroring_is_left_out_where_it_is_not_asked_for() -> None:
    """A mirrored 2 is no 2."""
    ramp = np.tile(np.arange(8, dtype=np.float32) / 8, (8, 1))
    for augmentation, falling in (("crop", False), ("crop_flip", True)):
        look = ImageTransform(8, (0.0,), (1.0,), augmentation, 1)  # type: ignore[arg-type]
        middles = [look.of_array(ramp, sample)[0, 4, 2:6] for sample in range(20)]
        assert any((np.diff(middle) < 0).all() for middle in middles) == falling


# -- refusals --------------------------------------------------------------------------------


def test_what_is_not_for_the_model_is_refused(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path / "a.npz", classes=12)
    with pytest.raises(InvalidInputError, match=r"a\.npz: class 11 in the data.* 0 to 9"):
        opened(config_of(VIT, pictures), tmp_path)
    texts = write_texts(tmp_path / "e.npz")
    model = {**DISTILBERT["model"], "vocab": 20}
    small = config_of({**DISTILBERT, "model": model, "vocab_size": 20}, texts)
    with pytest.raises(InvalidInputError, match=r"token id .* vocab_size 20"):
        first_batch(small, tmp_path)
    with pytest.raises(InvalidInputError, match="leaves none of 50 samples for validation"):
        few = config_of(
            VIT, write_pictures(tmp_path / "b.npz"), data_split="100,0,0", eval_interval_steps=2
        )
        opened(few, tmp_path)


def test_a_class_without_images_is_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images")
    (root / "zebra").mkdir()
    with pytest.raises(InvalidInputError, match="no images in zebra"):
        opened(config_of(FOLDER, root), tmp_path / "cache")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_is_named(workers: int, tmp_path: Path) -> None:
    root = write_folder(tmp_path / "images", per_class=2, classes=2)
    for path in root.rglob("*.png"):
        path.write_bytes(path.read_bytes()[:200])
    config = config_of(FOLDER, root, data_workers=workers, data_split="100,0,0")
    samples = opened(config, tmp_path / "cache").training
    with pytest.raises(DataError, match=r"sample \d: .*\.png cannot be read"):
        next(iter(samples.microbatches(range(8))))
    close(samples)


# -- reading ahead ---------------------------------------------------------------------------


def close(samples: Any) -> None:
    assert isinstance(samples, RowSamples)
    if samples.prefetcher is not None:
        samples.prefetcher.close()


def pixels(samples: Any, *firsts: int) -> torch.Tensor:
    steps = [range(first, first + 8) for first in firsts]
    return torch.cat([batch.pixels for step in steps for batch in samples.microbatches(step)])


def reading_ahead(tmp_path: Path, workers: int = 2) -> Any:
    config = config_of(FOLDER, write_folder(tmp_path / "images"), data_workers=workers)
    return opened(config, tmp_path / "cache").training


def test_processes_keep_the_order_also_behind_a_gap(tmp_path: Path) -> None:
    ahead = reading_ahead(tmp_path)
    config = config_of(FOLDER, tmp_path / "images")
    plain = opened(config, tmp_path / "cache").training
    steps = (0, 8, 16, 40, 48)  # 24 to 39 are left out
    assert torch.equal(pixels(ahead, *steps), pixels(plain, *steps))
    close(ahead)


def _children() -> list[int]:
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(word) for word in path.read_text().split()]


def test_signals_of_slurm_do_not_end_the_readers(tmp_path: Path) -> None:
    """Slurm sends them to all processes of a step; a rank still reads while it saves, and SIGQUIT
    asks the rank alone for its stacks."""
    before = set(_children())
    ahead = reading_ahead(tmp_path, workers=1)
    first = pixels(ahead, 0)
    readers = [pid for pid in _children() if pid not in before]
    assert readers
    for pid in readers:
        for number in LEFT_TO_RANKS:
            os.kill(pid, number)
    more = [pixels(ahead, step * 8) for step in range(1, 6)]
    assert len(first) == 8 and all(len(one) == 8 for one in more)
    close(ahead)

    def gone() -> bool:
        multiprocessing.active_children()  # collects those that have ended
        return not set(readers) & set(_children())

    wait_until(gone, f"the end of {readers}")


def test_a_reader_that_is_killed_is_an_error_of_the_data(tmp_path: Path) -> None:
    plain = reading_ahead(tmp_path / "plain", workers=0)
    before = set(_children())
    ahead = reading_ahead(tmp_path, workers=1)
    pixels(ahead, 0)
    readers = set(_children()) - before
    for pid in readers:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    pixels(plain, 0)  # the rank does something else, and is not disturbed
    with pytest.raises(DataError, match="reads data ahead has ended"):
        for step in range(1, 20):
            pixels(ahead, step * 8)
    close(ahead)


@pytest.mark.variant("test_a_reader_that_is_killed_is_an_error_of_the_data")
def test_readers_end_with_a_rank_that_is_gone(tmp_path: Path) -> None:
    """Ranks leave by os._exit or are killed: nobody says goodbye to their readers."""
    # A new interpreter: in a fork of this one torch finds readers of earlier tests in its table and
    # refuses an iterator that lies where one of theirs has lain (`_set_worker_pids`).
    ended = in_new_interpreter(
        tmp_path,
        "import os; ahead = t.reading_ahead(path, 1); t.pixels(ahead, 0); "
        "print(*t._children(), flush=True); os._exit(0)",
    )
    assert ended.returncode == 0 and ended.stdout.strip(), ended.stderr
    readers = [int(word) for word in ended.stdout.split()]
    wait_until(lambda: not any(map(_lives, readers)), f"the end of {readers}")


@pytest.mark.variant("test_a_reader_that_is_killed_is_an_error_of_the_data")
def test_an_interpreter_ends_that_has_readers(tmp_path: Path) -> None:
    """At its end Python sends SIGTERM to its children, and waits for them."""
    code = "ahead = t.reading_ahead(path, 1); print(len(t.pixels(ahead, 0)))"
    ended = in_new_interpreter(tmp_path, code)
    assert (ended.returncode, ended.stdout) == (0, "8\n"), ended.stderr


def in_new_interpreter(directory: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code that knows this module as `t` and the directory as `path`."""
    here = Path(__file__).parent
    head = "import sys, pathlib, test_datasets_reading as t; path = pathlib.Path(sys.argv[1]); "
    # to files: readers of a rank that is gone would keep a pipe open
    with (directory / "out").open("w+") as out, (directory / "errors").open("w+") as errors:
        ended = subprocess.run(
            [sys.executable, "-c", head + code, str(directory)],
            cwd=here,
            env={**os.environ, "PYTHONPATH": f"{here.parents[1]}:{here.parent}"},
            stdout=out,
            stderr=errors,
            text=True,
            timeout=300,
        )
        out.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess((), ended.returncode, out.read(), errors.read())


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
