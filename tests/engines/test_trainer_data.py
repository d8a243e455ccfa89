"""Blended Megatron datasets: same samples in every layout, after resumes, and with gaps."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from trial_runs import (
    LIMIT_SECONDS,
    TWO,
    MakeTrial,
    Trial,
    assert_resumes_exactly,
    largest_difference,
    retire_patiently,
    trained,
    wrap,
)

from bench import prefork
from hpctrain.checkpoints.publish import published_steps
from hpctrain.data.making import __main__
from hpctrain.job.prepare import prepare
from hpctrain.records.datasets import DatasetSidecar, bin_path, idx_path, sidecar_path
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import checkpoint_name, read_manifest
from hpctrain.records.run_records import SkipList, SkippedData, TrainerExit, write_record
from hpctrain.train.datasets.token_samples import TokenSamples

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
def test_layouts_and_resumes_see_the_same_samples(blend: Blend, trial: MakeTrial) -> None:
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
        other.goes_on(whole)
        assert largest_difference(other, whole, 5)[0] <= 1e-5
        for mine, theirs in zip(other.rows, whole.rows[4:], strict=True):
            if theirs.eval_loss is not None:
                assert mine.eval_loss == pytest.approx(theirs.eval_loss, abs=1e-5)


@pytest.mark.variant("test_another_order_of_samples_is_refused")
def test_one_dataset_without_weights(blend: Blend, trial: MakeTrial) -> None:
    single = trial(data_blend=blend[:1], train_steps=2)
    assert single.train() == [0]
    assert len(single.rows) == 2


def _refused(made: Trial, *words: str, **launch: Any) -> None:
    codes = made.train(**launch)
    assert set(codes) == {TrainerExit.CONFIG_ERROR}
    message = made.message()
    for word in words:
        assert word in message
    assert made.exits()[0].traceback is None


def test_missing_data_is_refused(trial: MakeTrial) -> None:
    _refused(trial(data_blend=((1.0, "/nowhere/data"),)), "/nowhere/data.bin", "not found")


def test_a_larger_vocabulary_in_the_sidecar_is_refused(tmp_path: Path, trial: MakeTrial) -> None:
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


def test_a_foreign_token_in_the_data_is_refused(tmp_path: Path, trial: MakeTrial) -> None:
    """Data from elsewhere has no sidecar: the first batch with a token too large tells."""
    prefix = tmp_path / "foreign"
    write_dataset(prefix, 60, 0, largest=4000)
    made = trial(data_blend=((1.0, str(prefix)),))
    _refused(made, "token id", "vocab_size 250")


def test_no_documents_for_validation_are_refused(blend: Blend, trial: MakeTrial) -> None:
    made = trial(data_blend=blend, data_split="100,0,0", eval_interval_steps=2)
    _refused(made, "validation")


def test_a_share_that_is_rounded_to_no_document_is_refused(
    tmp_path: Path, trial: MakeTrial
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
    change: dict[str, Any], words: str, gpt_reference: Trial, trial: MakeTrial
) -> None:
    changed = trial(**change)
    changed.adopt(gpt_reference, 2)
    _refused(changed, words, resume=2)


def test_data_that_cannot_be_read_is_named(tmp_path: Path, trial: MakeTrial) -> None:
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
    blend: Blend, trial: MakeTrial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


# -----------------------------------------------------------------------------------------------
# Data that is left out: the same samples after every restart, and the run still has its length.


def _skip(trial: Trial, *ranges: tuple[int, int]) -> None:
    skips = [
        SkippedData(from_samples=first, to_samples=end, reason="spike", time=1.0)
        for first, end in ranges
    ]
    write_record(trial.run.skips, SkipList(skips=tuple(skips)))


def _advance_data() -> None:
    """The data itself lacks samples 16 to 31: what is asked for from there on comes 16 later."""

    @wrap(TokenSamples, "microbatches")
    def advanced(real: Any, self: Any, samples: range, reads: bool = True) -> Iterator[Any]:
        later = 16 if samples.start >= 16 else 0
        return real(self, range(samples.start + later, samples.stop + later), reads)


def test_as_if_the_data_had_been_advanced(trial: MakeTrial) -> None:
    skipping = trial(save_interval_steps=1, **TWO)
    _skip(skipping, (16, 32))
    advanced, whole = trial(**TWO), trained(**TWO)
    assert skipping.train() == [0, 0]
    assert advanced.train(prepare=_advance_data) == [0, 0]
    assert skipping.exact == advanced.exact
    assert skipping.exact[2] == whole.exact[2] and skipping.exact[3] != whole.exact[3]
    assert [row.consumed_samples for row in skipping.rows] == [8, 16, 40, 48, 56, 64]
    manifest = read_manifest(skipping.run.checkpoints / checkpoint_name(6))
    assert manifest is not None and manifest.consumed_samples == 64
    for step in (2, 3):  # right before the range, and behind it
        resumed = trial(**TWO)
        _skip(resumed, (16, 32))
        assert_resumes_exactly(resumed, skipping, step)


@pytest.mark.variant("test_as_if_the_data_had_been_advanced")
def test_the_last_checkpoint_before_left_out_data_stays(trial: MakeTrial) -> None:
    kept = trial(save_interval_steps=1, keep_checkpoints=1)
    _skip(kept, (24, 32))
    assert kept.train(prepare=retire_patiently) == [0]
    assert published_steps(kept.run.checkpoints) == [3, 6]


@pytest.mark.parametrize(
    "text", ["{", '{"skips": [{"from_samples": 8, "to_samples": 8, "reason": "", "time": 0}]}']
)
def test_a_list_that_makes_no_sense_is_refused(text: str, trial: MakeTrial) -> None:
    """Training on data that somebody wanted left out must not happen silently."""
    made = trial(**TWO)
    made.run.skips.write_text(text)
    assert made.train() == [TrainerExit.CONFIG_ERROR] * 2
    assert "skips" in made.message()
    assert made.rows == []


# -----------------------------------------------------------------------------------------------
# The promise of examples/digits: gradients of two processes are those of one, tensor by tensor.

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# Two partial sums in place of one, in fp32; relative to the largest number of a tensor.
ROUNDING = 1e-5
# The norm of all gradients is 1. The bias of keys has none but rounding: softmax does not see it.
NOTHING = 1e-9


def kept_gradients(target: Path) -> Callable[[], None]:
    """In each rank: the first update writes down what it is given."""

    def watch() -> None:
        update = torch.optim.AdamW.step

        def step(self: Any, *arguments: Any) -> Any:
            path = target / f"{os.environ['RANK']}.pt"
            if not path.exists():
                groups = [group["params"] for group in self.param_groups]
                torch.save([p.grad.clone() for params in groups for p in params], path)
            return update(self, *arguments)

        torch.optim.AdamW.step = step

    return watch


def gradients(place: Path, gpus: int) -> list[Any]:
    """Of the first step, the same on every rank."""
    overrides = [f"resources.gpus={gpus}", "budget.steps=4", "schedule.warmup_steps=0"]
    prepared = prepare(EXAMPLES / "digits/tiny.yaml", "sandbox", overrides, runs=place)
    run = RunLayout(place / f"on-{gpus}")
    run.create()
    run.train_config.write_text(prepared.train.model_dump_json())
    ranks = prefork.start(run.train_config, gpus, run.logs, prepare=kept_gradients(run.logs))
    assert ranks.wait(LIMIT_SECONDS) == [0] * gpus, ranks.log()
    kept = [torch.load(run.logs / f"{rank}.pt") for rank in range(gpus)]
    for others in kept[1:]:
        assert all(torch.equal(a, b) for a, b in zip(kept[0], others, strict=True))
    return kept[0]


@pytest.mark.variant("test_losses_are_those_of_one_process")
def test_two_processes_have_the_gradients_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["--output", "data/digits", "--builtin", "digits", "--json"]) == 0
    alone, spread = gradients(tmp_path, 1), gradients(tmp_path, 2)
    assert len(alone) == len(spread) > 30
    for one, two in zip(alone, spread, strict=True):
        assert one.abs().max() > 0
        assert (one - two).abs().max() <= ROUNDING * one.abs().max() + NOTHING
