"""DeepSpeed: losses of one process, whatever the stage and wherever things are kept; resumes that
are exact with the same ranks, within rounding with others, or refused; its own configuration."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from damaged_checkpoints import flip_a_byte, vouch
from planned_job import planned_job
from trial_runs import (
    DROPPING_ZERO,
    PLAIN,
    PLAIN_LLAMA,
    ROUNDING,
    ZERO,
    ZERO3,
    ZERO_PP2,
    ZERO_TP2_PP2,
    MakeTrial,
    Trial,
    assert_near,
    assert_resumes_exactly,
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
from hpctrain.engines.deepspeed import DeepSpeedConfig, ds_config
from hpctrain.engines.train_json import parse_train_config, train_config
from hpctrain.plan.mesh.candidate import layout_of
from hpctrain.plan.mesh.stages import build_stages
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import (
    checkpoint_name,
    file_problem,
    read_manifest,
    read_rank_digests,
    what_is_wrong,
)
from hpctrain.records.run_records import TrainerExit
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.run import ParallelSpec
from hpctrain.train.engines.deepspeed.snapshot import refuse_unreadable_layout
from hpctrain.train.engines.models.build import build_module

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs the deepspeed extra", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
NORMS, BF16_ROUNDING, ANY = 10 * ROUNDING, 2e-3, float("inf")
BERT: dict[str, Any] = dict(
    model=dict(family="bert", layers=2, hidden=64, ffn=128, heads=4, vocab=250, seq=32),
    task="masked_language_modeling",
)
MASKED: dict[str, Any] = dict(PLAIN, **BERT)
T5: dict[str, Any] = dict(
    model=dict(BERT["model"], family="t5", encoder_layers=3, head_dim=16, logit_scale=64**-0.5),
    task="span_corruption",
)
HOST = dict(offload_optimizer="cpu", offload_parameters="cpu")
TWO_STAGES = dict(pipeline_stages=(1, 1))
ONE_REPLICA = dict(data_parallel_size=1)
# Uneven stages, one of which reads nothing; with rotary angles and a mask of each block's own.
DEEP_LLAMA: dict[str, Any] = dict(
    model={**PLAIN_LLAMA["model"], "layers": 4}, eval_interval_steps=6
)
THREE_STAGES: dict[str, Any] = dict(DEEP_LLAMA, pipeline_stages=(1, 2, 1), **ONE_REPLICA)
# Words that two ranks share unevenly and that are one weight at both ends, and biases.
UNEVEN: dict[str, Any] = dict(
    model={**PLAIN_LLAMA["model"], "vocab": 251, "tied": True, "bias": True}, vocab_size=251
)
EVALUATED = dict(UNEVEN, eval_interval_steps=3)
SPLIT_UNEVEN: dict[str, Any] = dict(EVALUATED, tensor_parallel=2, **ONE_REPLICA)
LORA = dict(lora=dict(rank=4))

# the run of one process with plain PyTorch, changes of ZERO, and bounds of losses and norms
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any], float, float]] = {
    "stage 0": (PLAIN, dict(zero_stage=0), ROUNDING, NORMS),
    "stage 2, overlapped": (PLAIN, dict(zero_stage=2, overlap_comm=True), ROUNDING, NORMS),
    "stage 2, optimizer on the host": (
        PLAIN,
        dict(zero_stage=2, offload_optimizer="cpu"),
        ROUNDING,
        NORMS,
    ),
    "stage 2, bf16": (PLAIN, dict(zero_stage=2, precision="bf16"), BF16_ROUNDING, ANY),
    "stage 3, all on the host": (PLAIN, dict(zero_stage=3, **HOST), ROUNDING, NORMS),
    "stage 3, recomputed": (
        PLAIN,
        dict(zero_stage=3, activation_checkpointing=True, overlap_comm=True),
        ROUNDING,
        NORMS,
    ),
    "stage 3, evaluating": (PLAIN, dict(zero_stage=3, eval_interval_steps=2), ROUNDING, ANY),
    # an output layer of its own, and angles in buffers that are not divided
    "llama": (PLAIN_LLAMA, dict(zero_stage=3, model=PLAIN_LLAMA["model"]), ROUNDING, NORMS),
    # most weights are frozen, and belong to no group of the optimizer
    "lora": (dict(PLAIN, **LORA), dict(zero_stage=3, **LORA), ROUNDING, NORMS),
    "two replicas of two stages, recomputed": (
        PLAIN,
        dict(TWO_STAGES, activation_checkpointing=True),
        ROUNDING,
        NORMS,
    ),
    "pipelines on neighbours": (
        PLAIN,
        dict(TWO_STAGES, parallel_order="tp-cp-ep-pp-dp"),
        ROUNDING,
        NORMS,
    ),
    "stages of llama": (dict(PLAIN_LLAMA, **DEEP_LLAMA), THREE_STAGES, ROUNDING, ANY),
    "stages of llama, bf16": (
        dict(PLAIN_LLAMA, **DEEP_LLAMA),
        dict(THREE_STAGES, precision="bf16"),
        BF16_ROUNDING,
        ANY,
    ),
    "tp, stage 2, recomputed": (
        dict(PLAIN, **EVALUATED),
        dict(SPLIT_UNEVEN, zero_stage=2, activation_checkpointing=True),
        ROUNDING,
        ANY,
    ),
    "tp, pipeline": (dict(PLAIN, **EVALUATED), dict(SPLIT_UNEVEN, **TWO_STAGES), ROUNDING, ANY),
    "tp, bf16": (
        dict(PLAIN, **EVALUATED),
        dict(SPLIT_UNEVEN, precision="bf16"),
        BF16_ROUNDING,
        ANY,
    ),
    # Of masked words each rank has another number; the mean is over those of the whole batch.
    "masked, stage 3": (MASKED, dict(BERT, zero_stage=3), ROUNDING, NORMS),
    "masked, stage 0": (MASKED, dict(BERT, zero_stage=0), ROUNDING, NORMS),
    "masked, stage 1": (MASKED, dict(BERT, zero_stage=1), ROUNDING, NORMS),
    "spans, stage 3, recomputed": (
        dict(PLAIN, **T5),
        dict(T5, zero_stage=3, activation_checkpointing=True),
        ROUNDING,
        NORMS,
    ),
    # Stage 1 has an optimizer class of its own there (BF16_Optimizer), without a scale.
    "masked, bf16": (MASKED, dict(BERT, precision="bf16"), BF16_ROUNDING, 0.05),
}


@pytest.mark.parametrize("kind", varied(LOSSES, "stage 3, all on the host"))
def test_losses_are_those_of_one_process(kind: str, trial: MakeTrial) -> None:
    """Of evaluations, too. In bf16 near enough, and not the same."""
    reference, changes, loss_bound, norm_bound = LOSSES[kind]
    plain, spread = trained(reference), trial(ZERO, **changes)
    assert spread.train() == [0] * spread.world_size
    loss, norm = largest_difference(spread, plain, 1)
    assert loss <= loss_bound and norm <= norm_bound
    assert loss > 0 or spread.config.precision == "fp32"
    assert reference is not PLAIN or spread.losses[6] < spread.losses[1] - 0.1, "it learns"
    every = changes.get("eval_interval_steps")
    assert list(spread.evaluated) == ([*range(every, 7, every)] if every else [])
    if plain.evaluated:
        assert spread.evaluated == pytest.approx(plain.evaluated, abs=loss_bound)
    assert "DeepSpeed" not in spread.said, "its log is kept out of the run's"


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
            place = f"zero_pp_rank_0_mp_rank_{stage.index * tp + rank:02d}"
            state = torch.load(checkpoint / f"{place}_optim_states.pt", weights_only=False)
            told = state["optimizer_state_dict"]
            held = sum(one.numel() for one in told["single_partition_of_fp32_groups"])
            assert held == stage.parameters_per_gpu


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


@pytest.mark.variant("test_losses_are_those_of_one_process")
@pytest.mark.parametrize("changes", [dict(zero_stage=2), {**TWO_STAGES, **ONE_REPLICA}])
def test_gradients_that_are_not_finite_end_the_run(
    changes: dict[str, Any], trial: MakeTrial
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


# -- checkpoints -----------------------------------------------------------------------------------

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
    "stage 1": DROPPING_ZERO,
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
def test_a_resume_is_exact(kind: str, trial: MakeTrial) -> None:
    assert_resumes_exactly(trial(RESUMED[kind]), trained(RESUMED[kind]))


@pytest.mark.variant("test_a_resume_is_exact")
@pytest.mark.parametrize(("stage", "ranks", "now"), [(1, 1, 2), (3, 1, 3), (3, 4, 3)])
def test_other_ranks_go_on_within_rounding(stage: int, ranks: int, now: int) -> None:
    """By the universal format, which stages 1 and 2 share. With two groups of weights: stage 3
    loads them with one number of steps and one weight decay for both, which is put right."""
    moved = moved_to(stage, ranks, now)
    assert_near(moved, of_stage(stage), 5, ROUNDING, NORMS)
    assert "re-seeded:_saved_with_2_ranks" in moved.said
    assert (moved.run.checkpoints / checkpoint_name(4) / "universal").is_dir(), "made once"


@pytest.mark.variant("test_a_resume_is_exact")
def test_a_changed_conversion_is_made_again(trial: MakeTrial) -> None:
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
def test_another_tp_goes_on_within_rounding(trial: MakeTrial) -> None:
    """Ranks are as many as before."""
    source = trained(ZERO, **UNEVEN, tensor_parallel=2, data_parallel_size=1)
    assert_near(trial(ZERO, **UNEVEN).goes_on(source, 2), source, 3, ROUNDING, NORMS)


# Three blocks. The words' weight is on the first stage and on the last one, where it is so large
# that both ranks have a part of it; on the first one rank has all.
GPT3: dict[str, Any] = dict(
    ZERO, vocab_size=1000, model={**PLAIN["model"], "layers": 3, "vocab": 1000}
)


def moved_on(moved: Trial, source: Trial, step: int) -> Trial:
    """From a checkpoint of `source` to the end."""
    moved.goes_on(source, step)
    assert "random_state_re-seeded" in moved.said
    return moved


@pytest.mark.variant("test_a_resume_is_exact")
def test_stages_are_cut_anew_joined_and_divided(trial: MakeTrial) -> None:
    source = trained(GPT3, pipeline_stages=(2, 1))
    joined = moved_on(trial(GPT3, zero_stage=2), source, 4)
    # converted once: this one finds it in the checkpoint
    longer = trial(GPT3, data_parallel_size=1, pipeline_stages=(1, 1, 1))
    moved_on(longer, joined, 4)
    joined_early = moved_on(trial(GPT3, zero_stage=2, save_interval_steps=2), source, 2)
    divided = trial(GPT3, data_parallel_size=1, pipeline_stages=(1, 2))
    for moved in (joined, longer, moved_on(divided, joined_early, 4)):
        assert_near(moved, source, 5, ROUNDING, NORMS)


@pytest.mark.variant("test_a_resume_is_exact")
def test_weights_in_bf16_go_on_from_those_in_fp32(trial: MakeTrial) -> None:
    """By another optimizer class of DeepSpeed's, and joined of two ranks' parts on each stage; a
    Llama has an output layer of its own."""
    source = trained(ZERO_TP2_PP2, precision="bf16")
    llama = dict(ZERO, model=PLAIN_LLAMA["model"], precision="bf16")
    alone = moved_on(trial(llama, data_parallel_size=1), source, 2)
    assert_near(alone, source, 3, BF16_ROUNDING, ANY)
    assert (alone.run.checkpoints / checkpoint_name(2) / "universal").is_dir()


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
@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_go_on_is_said(kind: str, trial: MakeTrial) -> None:
    stage, changes, words = REFUSED[kind]
    other = trial(ZERO, **changes)
    other.adopt(of_stage(stage), 2)
    assert other.train(resume=2) == [TrainerExit.CONFIG_ERROR] * 2
    assert words in other.said


def test_without_zero_weights_stay_split_as_they_were(tmp_path: Path) -> None:
    """Its optimizer's state has no universal form, and DeepSpeed would not say what is wrong."""
    config = parse_train_config(json.dumps({**ZERO, **SPLIT, "zero_stage": 0}))
    assert isinstance(config, DeepSpeedConfig)
    about = dict(zero_stage=0, world_size=4, tensor_parallel=2, precision="fp32", on_nvme=False)
    about["stages_layout"] = "no pipeline"
    refuse_unreadable_layout(config, 2, about, tmp_path)
    with pytest.raises(InvalidInputError, match="at ZeRO stage 0 with tp 4, not 2"):
        refuse_unreadable_layout(config, 4, {**about, "tensor_parallel": 4}, tmp_path)


def test_state_on_nvme_stays_with_its_ranks(trial: MakeTrial) -> None:
    one = trial(ZERO, data_parallel_size=1)
    one.adopt(of_stage(1), 2)
    about = one.run.checkpoints / checkpoint_name(2) / "about.json"
    text = about.read_text()
    assert '"on_nvme": false' in text
    about.write_text(text.replace('"on_nvme": false', '"on_nvme": true'))
    vouch(about.parent)
    assert one.train(resume=2) == [TrainerExit.CONFIG_ERROR]
    assert "its state on NVMe belongs to 2 ranks, and there are 1" in one.said


@pytest.mark.parametrize(
    ("ranks", "file"),
    [
        (2, "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        pytest.param(2, "random_rank_000000.pt", marks=pytest.mark.variant),
        pytest.param(1, "zero_pp_rank_1_mp_rank_00_optim_states.pt", marks=pytest.mark.variant),
    ],
    ids=["state", "random numbers", "met by the converter"],
)
def test_damage_is_called_by_its_name(ranks: int, file: str, trial: MakeTrial) -> None:
    """Zeros in the place of the end of a file, whose size tells nothing."""
    hurt = trial(ZERO, data_parallel_size=ranks)
    hurt.adopt(of_stage(1), 2)
    path = hurt.run.checkpoints / checkpoint_name(2) / file
    content = path.read_bytes()
    path.write_bytes(content[:-500] + bytes(500))
    assert 0 not in hurt.train(resume=2)
    assert {record.cause for record in hurt.exits() if record.rank == 0} == {"bad_checkpoint"}


# -- the rendered `ds_config.json` in the hands of DeepSpeed's own class ----------------------

NVME = (
    "optimizer.zero=3",
    "optimizer.offload=nvme",
    "engine.deepspeed.offload_parameters=nvme",
    "engine.deepspeed.nvme_path=/local",
)
SPECS: dict[str, tuple[str, ...]] = {
    "stage 0": ("optimizer.zero=0", "precision=fp32", "model.layers=4"),
    "stage 1": ("optimizer.zero=1",),
    "stages of a pipeline": ("optimizer.zero=1", "parallel.pp=4"),
    "weights split over two": ("optimizer.zero=2", "parallel.tp=2"),
    "tp, pp and dp": ("optimizer.zero=1", "parallel.pp=2", "parallel.tp=2"),
    "stage 2": ("optimizer.zero=2", "optimizer.overlap_grad_reduce=false"),
    "stage 2, host": ("optimizer.zero=2", "optimizer.offload=cpu"),
    "stage 3": ("optimizer.zero=3", "engine.deepspeed.reduce_precision=fp32"),
    "stage 3, host": ("optimizer.zero=3", "optimizer.offload=cpu", "engine.deepspeed.adam=torch",
                      "engine.deepspeed.offload_parameters=cpu"),
    "stage 3, nvme": NVME,
    "no clipping": ("optimizer.clip_grad=0", "optimizer.zero=2"),
    "small buckets": ("optimizer.zero=3", "engine.deepspeed.reduce_bucket=1MB",
                      "engine.deepspeed.gather_bucket=1B"),
}  # fmt: skip


def told(*overrides: str) -> DeepSpeedConfig:
    given = ("engine.name=deepspeed", "recompute=full", "resources.gpus=16", *overrides)
    spec = load_run_spec(ROOT / "examples" / "llama7b.yaml", given).document
    site = load_profile(find_profile("a100x64")).document
    config = train_config(planned_job(spec, site))
    assert isinstance(config, DeepSpeedConfig)
    return config


def taken(config: DeepSpeedConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What DeepSpeed makes of the file on as many ranks as the plan has."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig as Theirs

    monkeypatch.setattr(comm, "get_rank", lambda: 0)
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: config.data_parallel_size)
    return Theirs(json.loads(json.dumps(ds_config(config))), mpu=ranks)


@pytest.mark.parametrize("kind", SPECS)
def test_deepspeed_takes_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that it does not know it leaves out silently at the top, so each must be seen there."""
    config = told(*SPECS[kind])
    theirs = taken(config, monkeypatch)
    zero = theirs.zero_config
    half = config.precision == "bf16"
    assert (zero.stage, config.world_size) == (config.zero_stage, 16)
    places = config.tensor_parallel * max(1, len(config.pipeline_stages))
    assert theirs.world_size == config.data_parallel_size == 16 // places
    split = config.tensor_parallel if not config.pipeline_stages else 1
    assert theirs.tensor_parallel_config.autotp_size == (split if split > 1 else 0)
    assert theirs.gradient_accumulation_steps == config.microbatches
    assert theirs.train_micro_batch_size_per_gpu == config.micro_batch_size
    assert theirs.gradient_clipping == config.clip_grad
    assert theirs.bfloat16_config.enabled == half
    assert theirs.grad_accum_dtype == ("fp32" if half else None)
    assert (theirs.optimizer_name, theirs.optimizer_params["eps"]) == ("adamw", 1e-8)
    assert theirs.optimizer_params["torch_adam"] == config.torch_adam
    assert not theirs.zero_force_ds_cpu_optimizer and not theirs.timers_config.enabled
    assert not theirs.checkpoint_tag_validation_enabled and not theirs.wall_clock_breakdown
    if config.zero_stage > 0:
        assert zero.overlap_comm == config.overlap_comm
        assert zero.reduce_bucket_size == config.reduce_bucket_elements


def test_homes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = taken(told(*NVME), monkeypatch).zero_config
    assert zero.offload_optimizer.device == zero.offload_param.device == "nvme"
    assert str(zero.offload_param.nvme_path) == "/local/hpctrain-llama7b"
    assert zero.offload_param.buffer_size == 100_000_000


def test_sums_in_fp32_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert taken(told(*SPECS["stage 3"]), monkeypatch).communication_data_type == torch.float32


def test_what_deepspeed_does_not_know_it_refuses_in_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would prove nothing about that section."""
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig as Theirs

    monkeypatch.setattr(comm, "get_rank", lambda: 0)
    config = ds_config(told(*SPECS["stage 1"]))
    config["zero_optimization"]["bucket"] = 1
    with pytest.raises(ValueError, match="bucket"):
        Theirs(config, mpu=SimpleNamespace(get_data_parallel_world_size=lambda: 16))
