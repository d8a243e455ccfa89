"""A run that is interrupted ends as one that is not: bit for bit, at the same layout.

Each correction of megatron-core that this needs is also left out once: when such a test fails,
megatron-core has learnt it and the correction can go.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from test_trainer_layouts import EXPERT_LAYOUTS
from trial_runs import (
    DP2,
    EVALUATING,
    GPT,
    LIMIT_SECONDS,
    MOE,
    PP2,
    TP2_PP2,
    VPP2,
    MakeTrial,
    Trial,
    assert_near,
    assert_resumes_exactly,
    largest_difference,
    retire_patiently,
    trained,
)
from variants import varied

from bench import prefork
from hpctrain.base.errors import InvalidInputError
from hpctrain.checkpoints.discover import inspect
from hpctrain.checkpoints.publish import published_steps
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.manifest import checkpoint_name, digest_file, read_manifest
from hpctrain.records.run_records import TrainerExit
from hpctrain.train.engines.megatron import fixes
from hpctrain.train.engines.megatron.snapshot import check_state_types

DP2_BF16: dict[str, Any] = dict(DP2, dropout=0.1, precision="bf16")
TP2_PP2_ASYNC: dict[str, Any] = dict(TP2_PP2, dropout=0.1, async_save=True)
EXPERTS = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=64,
    add_bias_linear=False,
    expert_model_parallel_size=2,
    data_parallel_size=2,
)
OWN_PARTS = dict(optimizer_sharding="dp_reshardable", ddp_bucket_size=3000)
# each rank saves its own part, by the plan of earlier saves
OWN: dict[str, dict[str, Any]] = {
    "tp2 pp2": TP2_PP2_ASYNC,
    "dp2 overlap bf16": dict(DP2_BF16, async_save=True),
    "vpp": VPP2,
    "ep2": EXPERTS,
    "two instances": dict(DP2, data_parallel_size=4, num_distributed_optimizer_instances=2),
    "no distributed optimizer": dict(use_distributed_optimizer=False, data_parallel_size=2),
}
GPTS: dict[str, dict[str, Any]] = {
    "tp2 pp2, fp32, async": dict(TP2_PP2_ASYNC, **EVALUATING),
    "dp2 overlap, bf16, sync": dict(DP2_BF16, **EVALUATING),
    **{
        f"own, {name}": dict(settings, **OWN_PARTS, save_interval_steps=1)
        for name, settings in OWN.items()
    },
    # `fixes.prime_adam` and the two corrections of `step`; the second kind is one without sharding
    "bf16": dict(precision="bf16"),
    "bf16, no distributed optimizer": dict(precision="bf16", use_distributed_optimizer=False),
    "gradients summed in bf16": dict(DP2_BF16, grad_reduce_in_fp32=False),
    "bert": dict(model_type="bert", **PP2, dropout=0.1, eval_interval_steps=2),
}
EXACT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: (GPT, settings) for name, settings in GPTS.items()},
    **{
        f"experts, {name}": (MOE, EXPERT_LAYOUTS[name])
        for name in ("dp2 ep2", "tp2 etp2", "tp2 ep2 etp1", "dp4 ep2 etp2", "tp2 dp2 ep2 etp2")
    },
}


@pytest.mark.parametrize("name", varied(EXACT, "tp2 pp2, fp32, async"))
def test_resume_is_exact(name: str, trial: MakeTrial) -> None:
    base, settings = EXACT[name]
    whole, resumed = (
        trained(base, **settings),
        trial(base, **{"save_interval_steps": 2, **settings}),
    )
    assert_resumes_exactly(resumed, whole)
    assert [row.eval_loss for row in whole.rows[4:]] == [row.eval_loss for row in resumed.rows]
    assert [row.learning_rate for row in whole.rows[4:]] == [r.learning_rate for r in resumed.rows]


@pytest.mark.parametrize("layout", [{}, pytest.param(TP2_PP2, marks=pytest.mark.variant)])
def test_resume_at_other_layouts(layout: dict[str, Any], trial: MakeTrial) -> None:
    """Saved with several padded gradient buckets, which megatron-core alone saves wrongly."""
    source = trained(**DP2, ddp_bucket_size=3000)
    assert_near(trial(save_interval_steps=3, **layout).goes_on(source), source, 5)


# The loss that balances experts is one of each micro-batch: its size stays.
DENSE = dict(DP2, dropout=0.0, micro_batch_size=1, **OWN_PARTS)


@pytest.mark.variant("test_resume_at_other_layouts")
@pytest.mark.parametrize("kind", ["dense", "dense, more", "experts"])
def test_another_dp_goes_on_within_rounding(kind: str, trial: MakeTrial) -> None:
    """What a run does that may go on with fewer nodes: each rank saves its own part, and the ranks
    of another size cut it anew when they load."""
    layout, size = DENSE | (EXPERTS if kind == "experts" else {}), 1 if kind == "dense" else 4
    source = trained(**layout)
    other = trial(**layout | dict(data_parallel_size=size)).goes_on(source)
    assert_near(other, source, 5, norm=1e-4)


@pytest.mark.variant("test_resume_at_other_layouts")
@pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_instances_goes_on_within_rounding(
    saved: int, now: int, trial: MakeTrial
) -> None:
    four = dict(DENSE, data_parallel_size=4)
    source = trained(**four, num_distributed_optimizer_instances=saved)
    assert_near(trial(**four, num_distributed_optimizer_instances=now).goes_on(source), source, 5)


def test_a_state_of_other_types_is_not_loaded(tmp_path: Path) -> None:
    own = dict(use_precision_aware_optimizer=True, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    config = MegatronConfig(**{**GPT, **own})
    check_state_types(config, ["bf16", "bf16", "fp32"], tmp_path)
    with pytest.raises(InvalidInputError, match=r"no such optimizer.* bf16 bf16 fp32"):
        check_state_types(config, None, tmp_path)


@pytest.mark.variant("test_resume_at_other_layouts")
def test_no_other_layout_when_each_rank_saves_its_own(trial: MakeTrial) -> None:
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
        assert "tp, pp, dp [1, 1, 2]" in other.message()
    # of the other kind: the checkpoint says how to read it
    assert_resumes_exactly(trial(**DP2, micro_batch_size=1, ddp_bucket_size=3000), source)


@pytest.mark.variant("test_resume_is_exact")
def test_evaluation_leaves_no_trace() -> None:
    plain, evaluating = trained(**DP2_BF16), trained(**DP2_BF16, **EVALUATING)
    assert plain.exact == evaluating.exact
    assert evaluating.evaluated.keys() == {2, 4, 6} and not plain.evaluated


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


KEPT: dict[str, tuple[dict[str, Any], list[int]]] = {
    "the wanted ones": (
        dict(save_interval_steps=1, keep_checkpoints=2, keep_every_steps=3),
        [3, 5, 6],
    ),
    "by the clock": (
        dict(save_interval_seconds=0.01, train_steps=3, data_parallel_size=2),
        [1, 2, 3],
    ),
}


@pytest.mark.variant("test_checkpoint_files_are_as_the_manifest_says")
@pytest.mark.parametrize("name", KEPT)
def test_checkpoints_that_are_saved_and_kept(name: str, trial: MakeTrial) -> None:
    settings, steps = KEPT[name]
    kept = trial(**settings)
    assert set(kept.train(prepare=retire_patiently)) == {0}
    assert published_steps(kept.run.checkpoints) == steps


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


# -- corrections, and what happens without them ----------------------------------------------------

# Another test may have installed the fixes in this process before ranks are forked from it.
_UNFIXED_PARAM_STATE = DistributedOptimizer.sharded_param_state_fully_reshardable
_UNFIXED_LOAD = DistributedOptimizer.load_state_dict


def test_tensor_parallel_ranks_draw_different_masks(trial: MakeTrial) -> None:
    """cpu._rng_trackers: without it the tracker never switches and both ranks draw the same."""
    drawn = trial(tensor_model_parallel_size=2)
    answers = drawn.run.directory

    def draw() -> None:
        from megatron.core import tensor_parallel

        from hpctrain.train.engines.megatron.mesh import open_mesh
        from hpctrain.train.rank_environment import read_launch

        mesh = open_mesh(drawn.config, read_launch(os.environ))
        outside = torch.rand(3).tolist()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inside = torch.rand(3).tolist()
        again = torch.rand(3).tolist()
        text = json.dumps([outside, inside, again])
        (answers / f"drawn-{mesh.tensor_rank}").write_text(text)
        torch.distributed.barrier()  # rank 0 serves the store that the other may still need

    codes = prefork.fork(draw, 2, drawn.run.logs).wait(LIMIT_SECONDS)
    assert codes == [0, 0]
    first, second = (json.loads((answers / f"drawn-{rank}").read_text()) for rank in (0, 1))
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]
    assert first[0] != first[2]


@pytest.mark.variant("test_resume_is_exact")
def test_padded_buckets_are_saved_wrongly_without_the_fix(trial: MakeTrial) -> None:
    """With it: test_resume_at_other_layouts."""

    def without_the_fix() -> None:
        fixes.keep_bucket_padding = lambda: None
        DistributedOptimizer.sharded_param_state_fully_reshardable = _UNFIXED_PARAM_STATE

    source = trial(save_interval_steps=2, **DP2, ddp_bucket_size=3000)
    assert source.train(prepare=without_the_fix) == [0, 0]
    assert largest_difference(trial().goes_on(source, 2), source, 3)[0] > 1e-3


@pytest.mark.variant("test_resume_is_exact")
def test_steps_are_shared_without_the_fix(trial: MakeTrial) -> None:
    """With it: every test of test_trainer_layouts.py."""

    def shared_steps() -> None:
        fixes.separate_adam_steps = lambda: None
        DistributedOptimizer.load_state_dict = _UNFIXED_LOAD

    source = trained(**DP2)
    resumed = trial().goes_on(source, 2, prepare=shared_steps)
    assert largest_difference(resumed, source, 3)[0] > 1e-3
