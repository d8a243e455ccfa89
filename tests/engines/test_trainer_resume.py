"""A run that is interrupted ends as one that is not: bit for bit, at the same layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from trial_runs import (
    DP2,
    EVALUATING,
    LIMIT_SECONDS,
    TP2_PP2,
    Trial,
    largest_difference,
    retire_in_turn,
    trained,
)
from variants import varied

from bench import prefork
from hpctrain.checkpoints.discover import inspect
from hpctrain.records.manifest import checkpoint_name, digest_file, read_manifest
from hpctrain.records.run_records import TrainerExit

VARIANT = pytest.mark.variant  # of its own test: the others always run


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(TP2_PP2, dropout=0.1, async_save=True), id="tp2 pp2, fp32, async"),
        pytest.param(
            dict(DP2, dropout=0.1, precision="bf16"),
            id="dp2 overlap, bf16, sync",
            marks=pytest.mark.variant,
        ),
    ],
)
def test_resume_is_exact(settings: dict[str, Any], trial: Callable[..., Trial]) -> None:
    whole = trained(**settings, **EVALUATING)
    resumed = trial(save_interval_steps=2, **settings, **EVALUATING)
    resumed.adopt(whole, 4)
    assert set(resumed.train(resume=4)) == {0}
    assert list(resumed.exact) == [5, 6]
    assert resumed.exact == {step: whole.exact[step] for step in resumed.exact}
    assert [row.eval_loss for row in whole.rows[4:]] == [row.eval_loss for row in resumed.rows]
    assert [row.learning_rate for row in whole.rows[4:]] == [r.learning_rate for r in resumed.rows]


@pytest.mark.parametrize("layout", [{}, pytest.param(TP2_PP2, marks=VARIANT)])
def test_resume_at_other_layouts(layout: dict[str, Any], trial: Callable[..., Trial]) -> None:
    """Saved with several padded gradient buckets, which megatron-core alone saves wrongly."""
    source, target = trained(**DP2, ddp_bucket_size=3000), trial(save_interval_steps=3, **layout)
    target.adopt(source, 4)
    assert set(target.train(resume=4)) == {0}
    loss, norm = largest_difference(target, source, 5)
    assert loss <= 1e-5
    assert norm <= 1e-5


VPP = dict(
    pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=2,
    pipeline_layer_split=((1, 1), (1, 1)),
)
EXPERTS = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=64,
    add_bias_linear=False,
    expert_model_parallel_size=2,
    data_parallel_size=2,
)
OWN_PARTS = dict(optimizer_sharding="dp_reshardable", ddp_bucket_size=3000)


@pytest.mark.variant("test_resume_is_exact")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(dict(TP2_PP2, dropout=0.1, async_save=True), marks=VARIANT),
        pytest.param(dict(DP2, dropout=0.1, precision="bf16", async_save=True), marks=VARIANT),
        pytest.param(VPP, marks=VARIANT),
        EXPERTS,
        pytest.param(dict(use_distributed_optimizer=False, data_parallel_size=2), marks=VARIANT),
    ],
    ids=["tp2 pp2", "dp2 overlap bf16", "vpp", "ep2", "no distributed optimizer"],
)
def test_resume_is_exact_when_each_rank_saves_its_own(
    settings: dict[str, Any], trial: Callable[..., Trial]
) -> None:
    whole = trained(save_interval_steps=1, **settings, **OWN_PARTS)
    resumed = trial(**settings, **OWN_PARTS)
    resumed.adopt(whole, 4)
    assert set(resumed.train(resume=4)) == {0}
    assert resumed.exact == {step: whole.exact[step] for step in (5, 6)}


# The loss that balances experts is one of each micro-batch: its size stays.
DENSE = dict(DP2, dropout=0.0, micro_batch_size=1, **OWN_PARTS)


@pytest.mark.variant("test_resume_at_other_layouts")
@pytest.mark.parametrize("kind", varied(["dense", "dense, more", "experts"], "dense"))
def test_another_dp_goes_on_within_rounding(kind: str, trial: Callable[..., Trial]) -> None:
    """What a run does that may go on with fewer nodes: each rank saves its own part, and the ranks
    of another size cut it anew when they load."""
    layout, size = DENSE | (EXPERTS if kind == "experts" else {}), 1 if kind == "dense" else 4
    source, other = trained(**layout), trial(**layout | dict(data_parallel_size=size))
    other.adopt(source, 4)
    assert other.train(resume=4) == [0] * size
    loss, norm = largest_difference(other, source, 5)
    assert loss < 1e-5 and norm < 1e-4


@pytest.mark.variant("test_resume_at_other_layouts")
def test_no_other_layout_when_each_rank_saves_its_own(trial: Callable[..., Trial]) -> None:
    """Said before anything is loaded: megatron-core would fail in the middle, or not at all."""
    source = trained(**DENSE)
    for layout in (
        dict(OWN_PARTS, tensor_model_parallel_size=2),
        dict(OWN_PARTS, overlap_grad_reduce=False),
        dict(OWN_PARTS, overlap_grad_reduce=True, ddp_bucket_size=4000),
    ):
        other = trial(micro_batch_size=1, **layout)
        other.adopt(source, 4)
        assert set(other.train(resume=4)) == {TrainerExit.CONFIG_ERROR}
        assert "tp, pp, dp [1, 1, 2]" in (other.exits()[0].message or "")
    # of the other kind: the checkpoint says how to read it
    same = trial(**DP2, micro_batch_size=1, ddp_bucket_size=3000)
    same.adopt(source, 4)
    assert same.train(resume=4) == [0, 0]
    assert same.exact == {step: source.exact[step] for step in (5, 6)}


@pytest.mark.variant("test_resume_is_exact")
def test_evaluation_leaves_no_trace() -> None:
    settings = dict(DP2, dropout=0.1, precision="bf16")
    plain, evaluating = trained(**settings), trained(**settings, **EVALUATING)
    assert plain.exact == evaluating.exact
    assert all(row.eval_loss is not None for row in evaluating.rows if row.step % 2 == 0)
    assert {row.eval_loss for row in plain.rows} == {None}


def test_checkpoint_files_are_as_the_manifest_says(gpt_reference: Trial) -> None:
    directory = gpt_reference.run.checkpoints / checkpoint_name(4)
    manifest = read_manifest(directory)
    assert manifest is not None
    names = {file.name for file in manifest.files}
    on_disk = {path.name for path in directory.iterdir() if path.is_file()} - {"manifest.json"}
    assert names == on_disk
    assert any(name.endswith(".distcp") for name in names)
    for file in manifest.files:
        assert digest_file(directory, file.name) == file
    assert manifest.consumed_samples == 32
    assert inspect(directory, 4, "sha256").good


@pytest.mark.variant("test_checkpoint_files_are_as_the_manifest_says")
def test_only_the_wanted_checkpoints_are_kept(trial: Callable[..., Trial]) -> None:
    kept = trial(save_interval_steps=1, keep_checkpoints=2, keep_every_steps=3)
    assert kept.train(prepare=retire_in_turn) == [0]
    assert _steps(kept.run.checkpoints) == [3, 5, 6]


@pytest.mark.variant("test_checkpoint_files_are_as_the_manifest_says")
def test_saves_by_the_clock(trial: Callable[..., Trial]) -> None:
    clocked = trial(save_interval_seconds=0.01, train_steps=3, **DP2)
    assert clocked.train() == [0, 0]
    assert _steps(clocked.run.checkpoints) == [1, 2, 3]


def _steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("iter_")) for path in root.glob("iter_???????"))


def _weights(trial: Trial, step: int, place: Path) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint, read by a process of its own."""
    found = place / "weights.pt"

    def read() -> None:
        dist.init_process_group("gloo", rank=0, world_size=1)
        directory = trial.run.checkpoints / checkpoint_name(step)
        loaded = dist_checkpointing.load_plain_tensors(str(directory))
        names = [name for name in loaded if name.startswith(("decoder.", "embedding."))]
        torch.save({name: loaded[name] for name in names}, found)

    ranks = prefork.fork(read, 1, place)
    assert ranks.wait(LIMIT_SECONDS) == [0], ranks.log()
    loaded: dict[str, torch.Tensor] = torch.load(found)
    return loaded


def test_saved_weights_are_those_of_the_last_step(tmp_path: Path) -> None:
    """With overlap_param_gather half of each rank's weights are one step old until gathered."""
    plain, overlapped = trained(data_parallel_size=2), trained(**DP2)
    expected, found = (_weights(one, 6, tmp_path) for one in (plain, overlapped))
    assert expected.keys() == found.keys()
    assert any("linear_fc1" in name for name in expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0, msg=name)
