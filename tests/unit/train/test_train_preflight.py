"""What the trainer refuses before torch is imported, and how it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import InvalidInputError
from hpctrain.engines.megatron import MegatronConfig
from hpctrain.records.epochs import claim_epoch
from hpctrain.records.layout import RunLayout
from hpctrain.records.manifest import Manifest, checkpoint_name
from hpctrain.train.engines.megatron.preflight import engine_problems, option_problems
from hpctrain.train.job import Job, read_config
from hpctrain.train.preflight import check
from hpctrain.train.rank_environment import Launch
from hpctrain.train.stop import StopSignals

# -- What the trainer refuses before torch is imported, and how it says so -----------------------


GOOD: dict[str, Any] = dict(
    run_name="tiny", num_layers=4, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4,
    num_query_groups=4, kv_channels=16, vocab_size=250, padded_vocab_size=256, seq_length=32,
    activation="gelu", normalization="LayerNorm", layernorm_epsilon=1e-5,
    position_embedding_type="learned_absolute", rotary_base=10000,
    share_embeddings_and_output_weights=True, add_bias_linear=True, dropout=0.0,
    transformer_impl="auto", tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
    virtual_pipeline_model_parallel_size=None, context_parallel_size=1, data_parallel_size=1,
    sequence_parallel=False, pipeline_layer_split=((2,), (2,)),
    micro_batch_size=2, global_batch_size=8, train_steps=6, precision="fp32",
    recompute_granularity=None, deterministic_mode=False, seed=1, lr=1e-3, min_lr=0.0,
    lr_decay_style="cosine", lr_warmup_steps=1, lr_decay_steps=6, adam_beta1=0.9,
    adam_beta2=0.95, adam_eps=1e-8, weight_decay=0.1, clip_grad=1.0,
    use_distributed_optimizer=True, overlap_grad_reduce=False, overlap_param_gather=False,
    data_blend=(), data_split="98,2,0", data_cache=None, tokenizer=None,
    eval_interval_steps=None, eval_batches=1, save_interval_steps=None,
    save_interval_seconds=None, async_save=False, keep_checkpoints=1, keep_every_steps=None,
    log_interval_steps=1, distributed_timeout_seconds=60.0, model_flops_per_step=1.0,
    peak_flops_per_gpu=None,
)  # fmt: skip


def job(
    directory: Path, *, epoch: int = 0, resume: str = "", world: int = 4, **changes: Any
) -> Job:
    run = RunLayout(directory / "run")
    if not run.directory.exists():
        run.create()
    launch = Launch(0, world, 0, "node", epoch, resume)
    return Job(MegatronConfig(**{**GOOD, **changes}), launch, run, StopSignals())


def problems(made: Job) -> str:
    with pytest.raises(InvalidInputError) as caught:
        check(made)
    return str(caught.value)


def test_a_good_job_passes(tmp_path: Path) -> None:
    check(job(tmp_path))


def test_the_checks_do_without_torch() -> None:
    """They run, and signals are taken, before the seconds in which torch is imported."""
    program = (
        "import sys, hpctrain.train.entry\n"
        "print([name for name in ('torch', 'megatron', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


LOCAL = dict(transformer_impl="local")
INTERLEAVED = dict(virtual_pipeline_model_parallel_size=2, pipeline_layer_split=((1, 1), (1, 1)))

LATENT = dict(multi_latent_attention=True, position_embedding_type="rope")
EXPERTS = dict(num_moe_experts=4, expert_model_parallel_size=2, sequence_parallel=True)


def test_good_experts_pass(tmp_path: Path) -> None:
    check(job(tmp_path, **EXPERTS))
    check(job(tmp_path, mtp_num_layers=1, position_embedding_type="rope"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(world=3), "needs 4 processes, but 3 were started"),
        (dict(global_batch_size=7), "global_batch_size 7 is not divisible"),
        (dict(num_attention_heads=6, num_query_groups=3), "num_query_groups 3 and tp 2 do not divide each other"),
        (dict(padded_vocab_size=251), "padded_vocab_size 251 is not divisible by tp 2"),
        (dict(sequence_parallel=True, seq_length=33), "sequence_parallel needs tp > 1"),
        (dict(padded_vocab_size=128), "padded_vocab_size is below vocab_size 250"),
        (dict(pipeline_layer_split=((2,), (1,))), "does not add up to 4 layers"),
        (dict(pipeline_layer_split=((4,),)), "must have 2 stages of 1 chunks"),
        (dict(INTERLEAVED, global_batch_size=6), "microbatches divisible by pp 2, got 3"),
        (dict(lr_warmup_steps=6), "lr_warmup_steps 6 must be below"),
        (dict(min_lr=1.0), "min_lr 1 is above lr 0.001"),
        (dict(LOCAL, context_parallel_size=2, world=8), "needs TransformerEngine"),
        (dict(expert_model_parallel_size=2), "above 1 needs num_moe_experts"),
        (dict(EXPERTS, expert_model_parallel_size=3), "3 does not divide tp x cp x dp = 2"),
        (dict(EXPERTS, num_moe_experts=3), "num_moe_experts 3 is not divisible by ep 2"),
        (dict(EXPERTS, expert_model_parallel_size=1), "experts with biases cannot be split"),
        (dict(EXPERTS, sequence_parallel=False), "experts with tp need sequence_parallel"),
        (dict(mtp_num_layers=1), "prediction layers behind a pipeline need rotary positions"),
        (dict(data_blend=((1.0, "/nowhere/data"),)), "/nowhere/data.idx: data file not found"),
        (dict(resume="newest"), "not a checkpoint's name: 'newest'"),
        (dict(resume="iter_0000004"), "does not exist"),
    ],
)
def test_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in problems(job(tmp_path, **changes))


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    told = problems(job(tmp_path, world=3, min_lr=1.0))
    assert len(told.splitlines()) == 2


def test_no_start_at_step_0_beside_a_checkpoint(tmp_path: Path) -> None:
    made = job(tmp_path)
    (made.run.checkpoints / checkpoint_name(4)).mkdir()
    assert "asked to start from step 0, but iter_0000004 exists" in problems(made)


def test_no_resume_without_a_manifest(tmp_path: Path) -> None:
    made = job(tmp_path, resume=checkpoint_name(4))
    directory = made.run.checkpoints / checkpoint_name(4)
    directory.mkdir()
    assert "no readable manifest" in problems(made)
    manifest = Manifest(
        step=4, epoch=0, engine="megatron", layout="", world_size=4, consumed_samples=32,
        time=0.0, files=(),
    )  # fmt: skip
    (directory / "manifest.json").write_text(manifest.model_dump_json())
    check(made)


def test_no_launch_without_an_epoch_once_there_were_some(tmp_path: Path) -> None:
    made = job(tmp_path)
    claim_epoch(made.run.epochs, "somebody")
    assert "HPCTRAIN_EPOCH is not set" in problems(made)
    check(job(tmp_path, epoch=1))


def test_train_json_is_read_with_all_its_problems(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    with pytest.raises(InvalidInputError, match=r"train\.json: No such file"):
        read_config(path)
    path.write_text(MegatronConfig(**GOOD).model_dump_json())
    assert read_config(path) == MegatronConfig(**GOOD)
    path.write_text('{"run_name": "x", "colour": "red"}')
    with pytest.raises(InvalidInputError) as caught:
        read_config(path)
    assert "colour: Extra inputs are not permitted" in str(caught.value)
    assert "model: Field required" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "node_dependent"),
    [
        (dict(data_blend=((1.0, "/nowhere/data"),)), True),
        (dict(min_lr=1.0), False),
        (dict(data_blend=((1.0, "/nowhere/data"),), min_lr=1.0), False),
    ],
)
def test_what_another_node_may_have_is_told_from_what_is_wrong_everywhere(
    tmp_path: Path, changes: dict[str, Any], node_dependent: bool
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check(job(tmp_path, **changes))
    assert caught.value.node_dependent is node_dependent


# ------------------------------------------------------------------------------------------------
# Options of megatron-core that cannot be had with a model, a layout or each other are refused.


PLAIN = dict(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, pipeline_layer_split=((4,),)
)
BF16 = dict(precision="bf16")
FP8 = dict(precision="bf16", fp8="hybrid", fp8_recipe="tensorwise")
SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
MOE = dict(num_moe_experts=4, moe_ffn_hidden_size=64, add_bias_linear=False)
FLEX = dict(moe_token_dispatcher_type="flex")
FULL, PARTS = dict(recompute_granularity="full"), dict(recompute_granularity="selective")


def config(**changes: Any) -> MegatronConfig:
    return MegatronConfig(**{**GOOD, **PLAIN, **changes})


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(grad_reduce_in_fp32=False), "no effect with `precision: fp32`"),
    (dict(cross_entropy_loss_fusion=True), "rounds its gradient to bf16"),
    (
        dict(cross_entropy_loss_fusion=True, deterministic_mode=True, **BF16),
        "fused cross entropy is not deterministic",
    ),
    ({**FP8, "precision": "fp32"}, "the others in bf16"),
    (dict(fp8_param=True, **FP8), "`fp8_param_gather` is not supported"),
    (dict(fp4="e2m1", **FP8), "exclude each other"),
    (dict(transformer_impl="local", **FP8), "`precision: fp8` needs TransformerEngine's layers"),
    (
        dict(transformer_impl="local", fp4="e2m1", **BF16),
        "`precision: fp4` needs TransformerEngine's layers",
    ),
    (dict(ffn_hidden_size=120, **FP8), "ffn_hidden_size / tp divisible by 16, got 120"),
    (
        {**FP8, "fp8_recipe": "mxfp8", "hidden_size": 80, "kv_channels": 24},
        "hidden_size divisible by 32, got 80",
    ),
    (dict(seq_length=30, micro_batch_size=1, **FP8), "divisible by 8, got 30"),
    (
        {**MOE, "moe_ffn_hidden_size": 40, **FP8},
        "moe_ffn_hidden_size / etp divisible by 16, got 40",
    ),
    (
        {**FP8, "fp8_recipe": "delayed", **PARTS, "recompute_modules": ("layernorm",)},
        "`fp8_recipe: delayed` does not go with recompute_modules layernorm",
    ),
    (dict(recompute_num_layers=2), "no effect with recompute none"),
    (dict(recompute_num_layers=2, **PARTS), "no effect with recompute selective"),
    (dict(recompute_num_layers=5, **FULL), "above the 4 layers of a chunk"),
    (
        dict(transformer_impl="local", **PARTS, recompute_modules=("layernorm",)),
        "`recompute_modules: [layernorm]` needs TransformerEngine's layers",
    ),
    (dict(cpu_offloading_num_layers=4), "must be below the 4 layers"),
    (dict(cpu_offloading_num_layers=1, **FULL), "does not go with recompute full"),
    (
        dict(
            cpu_offloading_num_layers=1,
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        "a model without a pipeline",
    ),
    (dict(tp_comm_overlap=True), "tp of at least 2 with sequence_parallel"),
    (
        dict(tp_comm_overlap=True, **LATENT, **SP),
        "does not know the projections of latent attention",
    ),
    (dict(defer_embedding_wgrad_compute=True), "fills the end of a pipeline"),
    (
        dict(
            defer_embedding_wgrad_compute=True,
            mtp_num_layers=1,
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        "wrong with prediction layers",
    ),
    (
        dict(
            defer_embedding_wgrad_compute=True,
            model_type="bert",
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        "is for gpt and llama",
    ),
    (FLEX, "`moe_token_dispatcher_type: flex` has no effect: the model has no experts"),
    (dict(moe_permute_fusion=True), "`moe_permute_fusion` has no effect"),
    (dict(moe_shared_expert_overlap=True), "`moe_shared_expert_overlap` has no effect"),
    ({**FLEX, **MOE}, "needs etp x ep above 1"),
    (dict(moe_shared_expert_overlap=True, **MOE), "no effect without `shared_ffn`"),
    (
        dict(
            moe_shared_expert_overlap=True,
            moe_shared_expert_intermediate_size=32,
            expert_model_parallel_size=2,
            **FLEX,
            **MOE,
        ),
        "needs `moe_token_dispatcher_type: alltoall`",
    ),
    (dict(cuda_graph_impl="local", accelerator="cpu"), "needs GPUs, and the run trains on CPUs"),
    (dict(cuda_graph_impl="local", model_type="bert"), "is for gpt and llama"),
    (dict(cuda_graph_impl="local", **FULL), "does not go with full recomputation"),
    (
        dict(cuda_graph_impl="transformer_engine", cpu_offloading_num_layers=1),
        "does not go with `activation_offload_layers`",
    ),
    (
        dict(cuda_graph_impl="transformer_engine", dropout=0.1, **PARTS),
        "cannot draw dropout again while core_attn is recomputed",
    ),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_an_option_that_cannot_be_had_is_named(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = config(**changes)
    (problem,) = option_problems(made)
    assert words in problem.message
    assert problem in list(engine_problems(made, RunLayout(tmp_path))), "every launch checks it"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        BF16,
        FP8,
        {**FP8, "fp8_recipe": "mxfp8", "fp8": "e4m3"},
        dict(fp4="e2m1", **BF16),
        dict(grad_reduce_in_fp32=False, cross_entropy_loss_fusion=True, **BF16),
        dict(recompute_num_layers=4, **FULL),
        dict(recompute_modules=("mlp", "core_attn"), transformer_impl="local", **PARTS),
        dict(cpu_offloading_num_layers=3),
        dict(tp_comm_overlap=True, **SP),
        dict(
            defer_embedding_wgrad_compute=True,
            pipeline_model_parallel_size=2,
            pipeline_layer_split=((2,), (2,)),
        ),
        dict(expert_model_parallel_size=2, moe_permute_fusion=True, **FLEX, **MOE),
        dict(cuda_graph_impl="transformer_engine", dropout=0.1),
        dict(cuda_graph_impl="local", **PARTS),
    ],
)
def test_what_can_be_had_is_not_refused(changes: dict[str, Any]) -> None:
    assert list(option_problems(config(**changes))) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(expert_tensor_parallel_size=1, **SP, **MOE), "experts would get wrong gradients"),
        (dict(expert_tensor_parallel_size=3, **SP, **MOE), "etp 3 x ep 1 does not divide"),
        (dict(expert_tensor_parallel_size=2), "has no effect: the model has no experts"),
        (
            {
                **SP, **MOE, "moe_ffn_hidden_size": 63, "expert_tensor_parallel_size": 2,
                "expert_model_parallel_size": 2, "data_parallel_size": 2,
            },
            "moe_ffn_hidden_size is not divisible by etp 2",
        ),
    ],
)  # fmt: skip
def test_experts_are_split_only_where_their_gradients_are_right(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    found = engine_problems(config(**changes), RunLayout(tmp_path))
    assert words in " ".join(problem.message for problem in found)


def test_a_file_of_an_older_version_has_none_of_the_options() -> None:
    """`GOOD` is such a file: it names no option."""
    made = config()
    assert list(option_problems(made)) == [] and made.software_needs == ()
    assert (made.fp8, made.fp4, made.cuda_graph_impl) == (None, None, "none")
    assert made.grad_reduce_in_fp32 and made.expert_tensor_parallel_size is None
