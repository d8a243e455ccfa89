"""What the trainer is told, for the examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned_job import planned_job

from hpctrain.engines.megatron import MegatronConfig, megatron_config
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec

ROOT = Path(__file__).resolve().parents[3]


def told(example: str, profile: str, *overrides: str) -> MegatronConfig:
    spec = load_run_spec(ROOT / "examples" / f"{example}.yaml", overrides).document
    site = load_profile(find_profile(profile)).document
    return megatron_config(planned_job(spec, site))


def test_gpt() -> None:
    config = told("gpt175b", "a100x64")
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size) == (96, 12288, 49152)
    assert (config.activation, config.normalization) == ("gelu", "LayerNorm")
    assert config.position_embedding_type == "learned_absolute"
    assert config.share_embeddings_and_output_weights and config.add_bias_linear
    assert config.padded_vocab_size % (128 * config.tensor_model_parallel_size) == 0
    assert config.virtual_pipeline_model_parallel_size == 3
    assert config.pipeline_layer_split == ((4, 4, 4),) * 8
    assert (config.train_steps, config.lr_decay_steps) == (95368, 82650)
    assert config.save_interval_seconds == 1800.0 and config.save_interval_steps == 100


def test_llama() -> None:
    config = told("llama7b", "a100x1")
    assert (config.activation, config.normalization) == ("swiglu", "RMSNorm")
    assert (config.position_embedding_type, config.ffn_hidden_size) == ("rope", 11008)
    assert not config.share_embeddings_and_output_weights and not config.add_bias_linear
    assert config.data_parallel_size == 8 and config.virtual_pipeline_model_parallel_size is None
    assert config.lr_decay_steps == config.train_steps, "the decay takes the whole budget"


@pytest.mark.parametrize(("recompute", "told_as"), [("none", None), ("full", "full")])
def test_recompute(recompute: str, told_as: str | None) -> None:
    config = told("llama7b", "a100x64", f"recompute={recompute}", "resources.gpus=16")
    assert config.recompute_granularity == told_as


def test_overlap_only_where_there_is_something_to_hide() -> None:
    """megatron-core refuses to overlap the gather without the overlapped reduction."""
    alone = told("gpt-tiny", "sandbox")
    assert not alone.overlap_grad_reduce and not alone.overlap_param_gather, "dp is 1"
    both = told("llama7b", "a100x1")
    assert both.overlap_grad_reduce and both.overlap_param_gather
    reduced = told("llama7b", "a100x64", "optimizer.overlap_grad_reduce=false")
    assert not reduced.overlap_param_gather


def test_sizes_of_a_run_that_may_shrink_have_the_same_buckets() -> None:
    """Each rank saves its own part, which ranks of another dp can load."""
    plain, elastic = (
        told("gpt175b", "a100x64", *more) for more in ((), ("resources.min_nodes=32",))
    )
    assert plain.optimizer_sharding == elastic.optimizer_sharding == "dp_reshardable"
    assert (plain.ddp_bucket_size, elastic.ddp_bucket_size) == (None, 40_000_000)
    alone = told("gpt-tiny", "sandbox", "resources.min_nodes=1")
    assert alone.overlap_grad_reduce and alone.overlap_param_gather, "also with dp 1"


def test_rank_grid_covers_all_gpus() -> None:
    for config, gpus in ((told("gpt175b", "a100x64"), 512), (told("gpt-tiny", "sandbox"), 4)):
        assert gpus == (
            config.tensor_model_parallel_size
            * config.pipeline_model_parallel_size
            * config.context_parallel_size
            * config.data_parallel_size
        )


def test_the_document_survives_its_file() -> None:
    config = told("gpt175b", "a100x64")
    assert MegatronConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(("steps", "interval"), [(60, 20), (12, 10), (2, 1)])
def test_short_runs_tell_the_times_of_their_ranks_too(steps: int, interval: int) -> None:
    """The first step is in no window, and a window is told a step after its last."""
    config = told("gpt-tiny", "sandbox", f"budget.steps={steps}", "schedule.warmup_steps=0")
    assert config.rank_times_interval_steps == interval
