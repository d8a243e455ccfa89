"""What each option needs of libraries and GPUs, and the refusal where a rank lacks it."""

from __future__ import annotations

from typing import Any

import pytest
from test_option_problems import FLEX, FP8, MOE, PARTS, SP, config
from test_software_agreement import GOOD, ranks

from hpctrain.records.software import Library, SoftwareFacts
from hpctrain.train.software_agreement import judge, needs_of

FACTS = GOOD.model_copy(update=dict(capabilities=("9.0", "9.0"), apex_wgrad=Library(version="1")))


def changed(**fields: Any) -> SoftwareFacts:
    return FACTS.model_copy(update=fields)


def te(version: str) -> SoftwareFacts:
    return changed(transformer_engine=Library(version=version))


MISSING = changed(transformer_engine=Library())
AMPERE = changed(gpus=("NVIDIA A100",) * 2, capabilities=("8.0", "8.0"))
BLACKWELL = changed(gpus=("NVIDIA B200",) * 2, capabilities=("10.0", "10.0"))
MXFP8 = {**FP8, "fp8_recipe": "mxfp8", "fp8": "e4m3"}
EP2 = dict(expert_model_parallel_size=2, **FLEX, **MOE)
GRAPHS = dict(cuda_graph_impl="transformer_engine")

REFUSED: list[tuple[dict[str, Any], SoftwareFacts, str]] = [
    (FP8, MISSING, "`fp8_recipe: tensorwise` needs TransformerEngine 2.2: not installed"),
    (FP8, te("2.1.0+cu12"), "needs TransformerEngine 2.2: 2.1.0+cu12"),
    (FP8, AMPERE, "needs compute capability 8.9: NVIDIA A100 has 8.0"),
    ({**FP8, "fp8_recipe": "blockwise"}, changed(cuda_build="12.8"), "needs CUDA 12.9: torch"),
    ({**FP8, "fp8_recipe": "blockwise"}, te("2.2"), "needs TransformerEngine 2.3"),
    (MXFP8, FACTS, "needs compute capability 10.0 or more, below 12.0: NVIDIA H100 has 9.0"),
    (
        MXFP8,
        changed(gpus=("RTX 5090",) * 2, capabilities=("12.0",) * 2),
        "below 12.0: RTX 5090 has 12.0",
    ),
    (dict(fp4="e2m1", precision="bf16"), FACTS, "`precision: fp4` needs compute capability 10.0"),
    (
        dict(fp4="e2m1", precision="bf16"),
        BLACKWELL.model_copy(update=dict(transformer_engine=Library(version="2.6.0"))),
        "`precision: fp4` needs TransformerEngine 2.7: 2.6.0",
    ),
    (dict(tp_comm_overlap=True, **SP), te("1.8.0"), "`tp_comm_overlap` needs TransformerEngine"),
    (
        dict(defer_embedding_wgrad_compute=True),
        changed(apex_wgrad=Library(error="ImportError: libc10.so")),
        "`defer_embedding_wgrad_compute` needs Apex's fused_weight_gradient_mlp_cuda: "
        "cannot be imported (ImportError: libc10.so)",
    ),
    (dict(cpu_offloading_num_layers=1), MISSING, "`activation_offload_layers` needs"),
    (GRAPHS, MISSING, "`cuda_graph_impl: transformer_engine` needs TransformerEngine"),
    (
        dict(cuda_graph_impl="local"),
        changed(gpus=(), capabilities=(), cuda_build="13.0"),
        "`cuda_graph_impl: local` needs GPUs",
    ),
    (dict(moe_permute_fusion=True, **MOE), te("2.0.0"), "needs TransformerEngine 2.1: 2.0.0"),
    (EP2, FACTS, "`moe_flex_dispatcher_backend: deepep` needs DeepEP: not installed"),
    (
        {**EP2, "moe_flex_dispatcher_backend": "hybridep"},
        changed(hybrid_ep=Library(error="deep_ep 1.2 has no HybridEPBuffer")),
        "needs HybridEP of DeepEP: cannot be imported (deep_ep 1.2 has no HybridEPBuffer)",
    ),
    (
        {**PARTS, "recompute_modules": ("layernorm",)},
        MISSING,
        "`recompute_modules: [layernorm]` needs TransformerEngine: not installed",
    ),
]


@pytest.mark.parametrize(("changes", "facts", "words"), REFUSED)
def test_an_option_without_what_it_needs_is_refused_on_every_rank(
    changes: dict[str, Any], facts: SoftwareFacts, words: str
) -> None:
    # `cpu`: the missing GPU itself is another refusal
    needs = needs_of(config(accelerator="cpu", **changes))
    (refusal,) = judge(ranks(n0=facts, n1=facts), needs)
    assert words in refusal.message and refusal.everywhere and refusal.hint


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        (FP8, FACTS),
        (FP8, te("2.2.0.dev0+39c0e70")),
        ({**FP8, "fp8_recipe": "delayed"}, te("1.13.0")),
        ({**FP8, "fp8_recipe": "blockwise"}, FACTS),
        (MXFP8, BLACKWELL),
        (dict(fp4="e2m1", precision="bf16"), BLACKWELL),
        (dict(tp_comm_overlap=True, **SP), FACTS),
        (dict(defer_embedding_wgrad_compute=True), FACTS),
        (EP2, changed(deep_ep=Library(version="1.2.1"))),
        (GRAPHS, FACTS),
    ],
)
def test_an_option_with_what_it_needs_is_accepted(
    changes: dict[str, Any], facts: SoftwareFacts
) -> None:
    assert list(judge(ranks(n0=facts), needs_of(config(accelerator="cpu", **changes)))) == []


def test_a_single_node_that_lacks_it_is_named() -> None:
    (refusal, *_) = judge(ranks(n0=FACTS, n1=AMPERE), needs_of(config(accelerator="cpu", **FP8)))
    assert refusal.nodes == ("n1",) and not refusal.everywhere


@pytest.mark.parametrize(
    ("version", "least", "enough"),
    [
        ("2.7.0.dev0", (2, 7), True),
        ("2.10.1+cu13", (2, 9), True),
        ("2.6.9", (2, 7), False),
        ("unknown version", (1, 0), False),
    ],
)
def test_versions_are_numbers(version: str, least: tuple[int, int], enough: bool) -> None:
    assert Library(version=version).is_at_least(least) is enough


def test_a_missing_library_is_no_version() -> None:
    assert not Library().is_at_least((0, 1))
