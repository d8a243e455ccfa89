"""Training on blended Megatron datasets: same samples in every layout, and after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from trial_runs import Trial, largest_difference

from hpctrain.records.datasets import DatasetSidecar, bin_path, idx_path, sidecar_path
from hpctrain.records.run_records import TrainerExit

VOCAB = 250
Blend = tuple[tuple[float, str], ...]


def write_dataset(prefix: Path, documents: int, seed: int, largest: int = VOCAB - 1) -> None:
    """Documents of 20 to 120 tokens, the last one being the end-of-document token."""
    builder = IndexedDatasetBuilder(str(bin_path(prefix)), dtype=DType.optimal_dtype(VOCAB))
    draw = random.Random(seed)
    for _ in range(documents):
        tokens = [draw.randrange(largest) for _ in range(draw.randrange(20, 120))] + [VOCAB - 1]
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(str(idx_path(prefix)))


@pytest.fixture(scope="module")
def blend(tmp_path_factory: pytest.TempPathFactory) -> Blend:
    directory = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("prose", "code")):
        write_dataset(directory / name, 60, number)
    return ((30.0, str(directory / "prose")), (70.0, str(directory / "code")))


@pytest.mark.variant("test_resume_at_other_layouts")
def test_layouts_and_resumes_see_the_same_samples(
    blend: Blend, trial: Callable[..., Trial]
) -> None:
    settings: dict[str, Any] = dict(
        data_blend=blend, data_split="90,10,0", eval_interval_steps=3, save_interval_steps=2
    )
    whole = trial(**settings)
    assert whole.train() == [0]
    for layout in (
        dict(data_parallel_size=2, micro_batch_size=1),
        dict(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
    ):
        other = trial(**{**settings, **layout})
        other.adopt(whole, 4)
        assert set(other.train(resume=4)) == {0}
        assert largest_difference(other, whole, 5)[0] <= 1e-5
        for mine, theirs in zip(other.rows, whole.rows[4:], strict=True):
            if theirs.eval_loss is not None:
                assert mine.eval_loss == pytest.approx(theirs.eval_loss, abs=1e-5)


@pytest.mark.variant("test_another_order_of_samples_is_refused")
def test_one_dataset_without_weights(blend: Blend, trial: Callable[..., Trial]) -> None:
    single = trial(data_blend=blend[:1], train_steps=2)
    assert single.train() == [0]
    assert len(single.rows) == 2


def _refused(made: Trial, *words: str, **launch: Any) -> None:
    codes = made.train(**launch)
    assert set(codes) == {TrainerExit.CONFIG_ERROR}
    message = made.exits()[0].message or ""
    for word in words:
        assert word in message
    assert made.exits()[0].traceback is None


def test_missing_data_is_refused(trial: Callable[..., Trial]) -> None:
    _refused(trial(data_blend=((1.0, "/nowhere/data"),)), "/nowhere/data.bin", "not found")


def test_a_larger_vocabulary_in_the_sidecar_is_refused(
    tmp_path: Path, trial: Callable[..., Trial]
) -> None:
    prefix = tmp_path / "large"
    write_dataset(prefix, 10, 0)
    sidecar = DatasetSidecar(
        documents=10,
        tokens=1,
        dtype="uint16",
        text_bytes=1,
        vocab_size=50257,
        end_of_document="",
        end_of_document_id=50256,
        tokenizer="",
        tokenizer_sha256="",
        sources_sha256="",
        request_sha256="",
        bin_bytes=1,
        idx_bytes=1,
    )
    sidecar_path(prefix).write_text(sidecar.model_dump_json())
    _refused(trial(data_blend=((1.0, str(prefix)),)), "50257", "250")


def test_a_foreign_token_in_the_data_is_refused(
    tmp_path: Path, trial: Callable[..., Trial]
) -> None:
    """Data from elsewhere has no sidecar: the first batch with a token too large tells."""
    prefix = tmp_path / "foreign"
    write_dataset(prefix, 60, 0, largest=4000)
    made = trial(data_blend=((1.0, str(prefix)),))
    _refused(made, "token id", "vocab_size 250")


def test_no_documents_for_validation_are_refused(blend: Blend, trial: Callable[..., Trial]) -> None:
    made = trial(data_blend=blend, data_split="100,0,0", eval_interval_steps=2)
    _refused(made, "validation")


def test_a_share_that_is_rounded_to_no_document_is_refused(
    tmp_path: Path, trial: Callable[..., Trial]
) -> None:
    """2 % of 13 documents are none: megatron-core would count epochs of nothing for ever."""
    write_dataset(tmp_path / "few", 13, 0)
    made = trial(data_blend=((1.0, str(tmp_path / "few")),), data_split="98,2,0")
    _refused(made, "none of the 13", "validation")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(train_steps=7), "training samples"),
        (dict(seed=7), "seed"),
        (dict(global_batch_size=4, train_steps=12), "global_batch_size"),
    ],
)
def test_another_order_of_samples_is_refused(
    change: dict[str, Any], words: str, gpt_reference: Trial, trial: Callable[..., Trial]
) -> None:
    changed = trial(**change)
    changed.adopt(gpt_reference, 2)
    _refused(changed, words, resume=2)


def test_data_that_cannot_be_read_is_named(tmp_path: Path, trial: Callable[..., Trial]) -> None:
    """The index promises more tokens than the file has."""
    prefix = tmp_path / "short"
    write_dataset(prefix, 60, 0)
    tokens = bin_path(prefix)
    tokens.write_bytes(tokens.read_bytes()[: tokens.stat().st_size // 2])
    made = trial(data_blend=((1.0, str(prefix)),))
    assert made.train() == [TrainerExit.CRASH]
    (record,) = made.exits()
    assert record.cause == "data_loader"
    assert "cannot be read" in (record.message or "")


@pytest.mark.variant("test_resume_at_other_layouts")
def test_copies_on_the_node_are_what_is_read_and_change_nothing(
    blend: Blend, trial: Callable[..., Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and the indexes in the cache stay the same; the copies are read, not their sources."""
    scratch = tmp_path / "scratch"
    monkeypatch.setenv("TMPDIR", str(scratch))
    settings: dict[str, Any] = dict(data_blend=blend, data_parallel_size=2, micro_batch_size=1)
    plain, staged = trial(**settings), trial(**settings, stage_data=True)
    assert plain.train() == [0, 0] and staged.train() == [0, 0]
    assert staged.exact == plain.exact
    indexes = [sorted(path.name for path in made.run.data_cache.rglob("*.npy"))
               for made in (plain, staged)]  # fmt: skip
    assert indexes[0] and indexes[0] == indexes[1]
    (copy,) = scratch.rglob("prose.bin")
    copy.write_bytes(bytes(copy.stat().st_size))
    others = trial(**settings, stage_data=True)
    assert others.train() == [0, 0]
    assert others.exact != plain.exact
