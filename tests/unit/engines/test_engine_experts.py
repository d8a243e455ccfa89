"""What the trainer is told about experts, latent attention and prediction layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from planned_job import planned_job

from hpctrain.engines.megatron import MegatronConfig, megatron_config, megatron_model
from hpctrain.engines.train_json import parse_train_config
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.run import RunSpec

ROOT = Path(__file__).resolve().parents[3]
EXPERTS = dict(experts=8, top_k=2, ffn=1024, shared_ffn=2048, dense_layers=1)
LATENT = dict(kv_rank=512, nope_dim=64, rope_dim=32, value_dim=96)


def told(parallel: dict[str, Any] | None = None, **model: Any) -> MegatronConfig:
    """The example llama7b with `model` changed, on one node of 8 GPUs."""
    base = load_run_spec(ROOT / "examples" / "llama7b.yaml", ()).document
    document = base.model_dump(mode="json", by_alias=True)
    document["model"] |= {"layers": 4, **model}
    document["parallel"] = parallel or {}
    document["resources"]["gpus"] = 8
    spec = RunSpec.model_validate(document)
    site = load_profile(find_profile("a100x1")).document
    return megatron_config(planned_job(spec, site))


def test_a_dense_model_has_none_of_it() -> None:
    config = told()
    assert config.num_moe_experts is None and config.mtp_num_layers is None
    assert not config.multi_latent_attention and config.expert_model_parallel_size == 1


def test_experts() -> None:
    config = told(moe=EXPERTS)
    assert (config.num_moe_experts, config.moe_router_topk) == (8, 2)
    assert (config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size) == (1024, 2048)
    assert config.moe_first_dense_layers == 1
    assert told(moe={**EXPERTS, "shared_ffn": 0}).moe_shared_expert_intermediate_size is None


@pytest.mark.parametrize(("ep", "expert_tp"), [(1, 2), (4, 1)])
def test_experts_are_split_over_tp_or_spread_whole(ep: int, expert_tp: int) -> None:
    config = told(dict(tp=2, ep=ep), moe=EXPERTS)
    assert config.expert_model_parallel_size == ep
    assert config.expert_tensor_ranks == expert_tp
    assert config.data_parallel_size == 4, "ep takes no GPUs from dp"


def test_latent_attention() -> None:
    config = told(mla=LATENT)
    assert config.multi_latent_attention and config.q_lora_rank is None
    sizes = (config.kv_lora_rank, config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim)
    assert sizes == (512, 64, 32, 96)
    assert told(mla={**LATENT, "q_rank": 768}).q_lora_rank == 768


def test_prediction_layers() -> None:
    assert told(mtp_layers=2).mtp_num_layers == 2


@pytest.mark.parametrize(
    "model",
    [
        {},
        dict(moe=EXPERTS),
        dict(moe={**EXPERTS, "shared_ffn": 0, "dense_layers": 0}, kv_heads=8),
        dict(mla=LATENT),
        dict(mla={**LATENT, "q_rank": 768}, mtp_layers=1),
        dict(family="gpt", **dict.fromkeys(("activation", "norm", "positions", "tied", "bias"))),
        dict(family="bert", **dict.fromkeys(("activation", "norm", "positions", "tied", "bias"))),
    ],
    ids=["llama", "experts", "grouped", "latent", "prediction", "gpt", "bert"],
)
def test_the_model_comes_back_from_megatrons_names(model: dict[str, Any]) -> None:
    config = told(**model)
    again = megatron_model(config.model, config.padded_vocab_size, config.transformer_impl)
    assert dict(again) == {name: getattr(config, name) for name in dict(again)}
    assert config.model.family == model.get("family", "llama")
    assert parse_train_config(config.model_dump_json()) == config
