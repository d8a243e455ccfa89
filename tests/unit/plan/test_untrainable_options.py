"""Options that an engine would not read, or could not train, are refused at `submit` by name."""

from __future__ import annotations

from typing import Any

import pytest
from specimens import GPT_TINY, run_spec

from hpctrain.plan.abilities.trainable import untrainable_fields
from hpctrain.spec.engines.registry import ENGINES
from hpctrain.spec.run import RunSpec

BERT = {**GPT_TINY, "family": "bert"}
MLA = {**GPT_TINY, "family": "llama", "ffn": 128, "mla": dict(kv_rank=64)}


def spec(**changes: Any) -> RunSpec:
    usual: dict[str, Any] = dict(model=GPT_TINY, gpus=8, batch=64, micro="auto")
    return run_spec(**{**usual, **changes})


def megatron(**options: Any) -> dict[str, Any]:
    return {"megatron": options}


@pytest.mark.parametrize("precision", ["fp8", "fp4", "bf16", "fp32", "fp16"])
def test_each_engine_trains_the_precisions_of_its_abilities(precision: str) -> None:
    for name, abilities in ENGINES.items():
        if name == "megatron-lm":
            continue  # needs a checkout, and has a message of its own
        if precision not in abilities.precisions:
            continue  # refused where it is written (tests/unit/spec/test_engine_sections.py)
        wanted = spec(engine={"name": name}, precision=precision)
        refused = "precision" in dict(untrainable_fields(wanted))
        assert refused is (precision not in abilities.trained_precisions), name


def test_another_engine_names_the_one_that_trains_it() -> None:
    (_, message), *_ = untrainable_fields(spec(engine={"name": "ddp"}, precision="fp8"))
    assert message == "hpctrain trains in bf16 and fp32 with ddp, not in fp8; engine megatron does"
    (_, message), *_ = untrainable_fields(spec(engine={"name": "ddp"}, precision="fp16"))
    assert message == "hpctrain trains in bf16 and fp32 with ddp, not in fp16"


@pytest.mark.parametrize(
    ("precision", "argument"), [("fp8", "fp8-format: hybrid"), ("fp4", "fp4-format: e2m1")]
)
def test_an_external_megatron_lm_takes_formats_by_its_arguments(
    precision: str, argument: str
) -> None:
    wanted = spec(engine={"name": "megatron-lm", "checkout": "/megatron"}, precision=precision)
    ((field, message),) = untrainable_fields(wanted)
    assert field == "precision" and f"`engine.arguments: {{{argument}}}`" in message


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        (
            dict(engine=megatron(fp8_param_gather=True), precision="fp8"),
            "engine.megatron.fp8_param_gather",
        ),
        (
            dict(engine=megatron(cross_entropy_loss_fusion=True), precision="fp32"),
            "engine.megatron.cross_entropy_loss_fusion",
        ),
        (
            dict(engine={**megatron(cross_entropy_loss_fusion=True), "deterministic": True}),
            "engine.megatron.cross_entropy_loss_fusion",
        ),
        (
            dict(
                engine=megatron(defer_embedding_wgrad_compute=True),
                model={**GPT_TINY, "mtp_layers": 1},
            ),
            "engine.megatron.defer_embedding_wgrad_compute",
        ),
        (
            dict(engine=megatron(cuda_graph_impl="local"), model=BERT),
            "engine.megatron.cuda_graph_impl",
        ),
        (dict(engine=megatron(tp_comm_overlap=True), model=MLA), "engine.megatron.tp_comm_overlap"),
        (
            dict(engine=megatron(tp_comm_overlap=True), model={**GPT_TINY, "mtp_layers": 1}),
            "engine.megatron.tp_comm_overlap",
        ),
    ],
)
def test_what_would_be_ignored_or_wrong_is_refused(changes: dict[str, Any], field: str) -> None:
    assert [name for name, _ in untrainable_fields(spec(**changes))] == [field]


@pytest.mark.parametrize(
    "changes",
    [
        dict(precision="fp8"),
        dict(precision="fp4"),
        dict(engine=megatron(grad_reduce_in_fp32=False, cross_entropy_loss_fusion=True)),
        dict(recompute="full", recompute_layers=1),
        dict(activation_offload_layers=1, recompute="none"),
    ],
)
def test_what_can_be_trained_is_not_refused(changes: dict[str, Any]) -> None:
    assert untrainable_fields(spec(**changes)) == []
