"""Families of models: what the presets fill in, and what is refused, with the exact words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from wrong_specs import VALID, problems_of, shown

from hpctrain.judge.causes import FAILURE_CAUSES, Cause
from hpctrain.spec.loader import load_run_spec
from hpctrain.spec.model import RESNET_FEATURES, ModelSpec
from hpctrain.spec.positions import write_resolved
from hpctrain.spec.profiling import ProfileSpec
from hpctrain.spec.reference import json_schema
from hpctrain.spec.run import BudgetName

OLD = next(line for line in VALID.splitlines() if line.startswith("model:"))
TEXT = "layers: 4, hidden: 64, heads: 4, vocab: 512, seq: 128"
DEEP = f"family: llama, ffn: 176, {TEXT}"
EXPERTS = "experts: 8, top_k: 2, ffn: 32"

GOOD = {
    "bert": "family: bert, layers: 12, hidden: 768, heads: 12, vocab: 30522, seq: 512",
    "vit": "family: vit, layers: 12, hidden: 768, heads: 12, vocab: 1000",
    "vit at 384": "family: vit, layers: 2, hidden: 64, heads: 4, vocab: 9, image: 384, patch: 32",
    "resnet": "family: resnet, layers: 50, vocab: 1000",
    "resnet, small": "family: resnet, layers: 18, vocab: 10, image: 32",
    "moe": f"family: llama, {TEXT}, moe: {{{EXPERTS}}}",
    "moe, first layer dense": f"{DEEP}, moe: {{{EXPERTS}, shared_ffn: 32, dense_layers: 1}}",
    "mla": f"{DEEP}, mla: {{kv_rank: 32}}, mtp_layers: 1",
}


def with_model(text: str, engine: str = "ddp") -> str:
    return VALID.replace(OLD, f"model: {{{text}}}") + f"engine: {{name: {engine}}}\n"


@pytest.mark.parametrize("text", GOOD.values(), ids=GOOD)
def test_families_load_and_survive_writing(tmp_path: Path, text: str) -> None:
    file, again = tmp_path / "spec.yaml", tmp_path / "resolved.yaml"
    file.write_text(with_model(text))
    loaded = load_run_spec(file)
    again.write_text(write_resolved(loaded))
    assert load_run_spec(again).document == loaded.document


def model(text: str, tmp_path: Path) -> ModelSpec:
    (tmp_path / "spec.yaml").write_text(with_model(text))
    return load_run_spec(tmp_path / "spec.yaml").document.model


def test_bert_is_an_encoder_with_the_choices_of_its_paper(tmp_path: Path) -> None:
    bert = model(GOOD["bert"], tmp_path)
    assert (bert.positions, bert.norm, bert.activation) == ("learned", "layernorm", "gelu")
    assert (bert.tied, bert.bias, bert.causal, bert.reads_images) == (True, True, False, False)
    assert bert.ffn_size == 3072


def test_causal_families(tmp_path: Path) -> None:
    assert model(TEXT, tmp_path).causal and model(DEEP, tmp_path).causal
    assert not model(GOOD["vit"], tmp_path).causal


def test_tokens_of_a_vit_are_its_patches_and_the_class_token(tmp_path: Path) -> None:
    assert model(GOOD["vit"], tmp_path).seq == 14 * 14 + 1
    assert model(GOOD["vit at 384"], tmp_path).seq == 12 * 12 + 1
    assert model(GOOD["vit"] + ", seq: 197", tmp_path).seq == 197
    assert not model(GOOD["vit"], tmp_path).tied


@pytest.mark.parametrize("layers", RESNET_FEATURES)
def test_a_resnet_needs_layers_and_classes_only(layers: int, tmp_path: Path) -> None:
    resnet = model(f"family: resnet, layers: {layers}, vocab: 7", tmp_path)
    assert (resnet.hidden, resnet.heads) == (512 if layers < 50 else 2048, 1)
    assert (resnet.seq, resnet.image, resnet.causal) == (7 * 7, 224, False)
    assert model(f"family: resnet, layers: {layers}, vocab: 7, image: 299", tmp_path).seq == 100


def test_sizes_of_heads() -> None:
    shape: dict[str, Any] = dict(
        family="llama", layers=2, hidden=96, heads=8, vocab=9, seq=8, ffn=64
    )
    plain = ModelSpec(**shape)
    assert (plain.query_key_size, plain.value_size, plain.head_size) == (12, 12, 12)
    mla = ModelSpec(**shape, mla=dict(kv_rank=32, nope_dim=16, rope_dim=8, value_dim=20))
    assert (mla.query_key_size, mla.value_size) == (24, 20)
    # heads need not divide hidden where the heads have sizes of their own
    assert ModelSpec(**{**shape, "hidden": 100}, mla=dict(kv_rank=32)).value_size == 128


def test_ffn_of_a_model_without_dense_layers_is_that_of_an_expert(tmp_path: Path) -> None:
    moe = model(GOOD["moe"], tmp_path)
    assert (moe.ffn, moe.ffn_size) == (None, 32)
    mixed = model(GOOD["moe, first layer dense"], tmp_path)
    assert mixed.ffn_size == 176
    assert [mixed.has_experts(layer) for layer in range(4)] == [False, True, True, True]
    assert not model(TEXT, tmp_path).has_experts(3)


BAD = [
    (f"{TEXT}, moe: {{experts: 4, top_k: 5, ffn: 8}}", "`model.moe`: top_k 5 is above experts 4"),
    (f"{TEXT}, moe: {{experts: 1, top_k: 1, ffn: 8}}",
     "`model.moe.experts`: must be at least 2, got `1`"),
    (f"{TEXT}, moe: {{{EXPERTS}, dense_layers: 4}}",
     "`model`: moe.dense_layers 4 leaves none of the 4 layers with experts"),
    (f"{TEXT}, moe: {{{EXPERTS}, dense_layers: 5}}",
     "`model`: moe.dense_layers 5 leaves none of the 4 layers with experts"),
    (f"{TEXT}, moe: {{{EXPERTS}, shared_ffn: 64}}",
     "`model`: moe.shared_ffn needs an MLP without bias: shared experts have none"),
    (f"family: llama, {TEXT}, moe: {{{EXPERTS}, dense_layers: 1}}",
     "`model`: ffn is required with swiglu (Llama-7B: 11008 at hidden 4096)"),
    (f"family: llama, {TEXT}", "`model`: ffn is required with swiglu"),
    (f"family: bert, {TEXT}, moe: {{{EXPERTS}}}",
     "`model`: moe goes with causal language models, not with bert"),
    (f"family: bert, {TEXT}, mtp_layers: 1",
     "`model`: mtp_layers goes with causal language models, not with bert"),
    (f"{GOOD['vit']}, mla: {{kv_rank: 8}}",
     "`model`: mla goes with causal language models, not with vit"),
    (f"{TEXT}, encoder_layers: 2, mtp_layers: 1",
     "`model`: encoder_layers goes with plain layers: attention to all tokens and an MLP"),
    (f"{TEXT}, encoder_layers: 2, attention: {{window: 4}}",
     "`model`: encoder_layers goes with plain layers: attention to all tokens and an MLP"),
    (f"family: bert, {TEXT}, encoder_layers: 2",
     "`model`: encoder_layers goes with plain layers: attention to all tokens and an MLP"),
    (f"{TEXT}, positions: relative",
     "`model`: relative positions are those of a model with `encoder_layers`"),
    (f"{TEXT}, relative: {{buckets: 16}}", "`model`: relative goes with `positions: relative`"),
    (f"{TEXT}, encoder_layers: 2, init_std: 0.01",
     "`model`: init_std: the first weights of an encoder-decoder follow from its class"),
    ("layers: 4, hidden: 64, heads: 4, vocab: 512, seq: 3, encoder_layers: 2",
     "`model`: seq 3 leaves an encoder no span of its text"),
    (f"{DEEP}, kv_heads: 4, mla: {{kv_rank: 8}}",
     "`model`: mla takes the place of kv_heads: remove one of them"),
    (f"{DEEP}, head_dim: 4, mla: {{kv_rank: 8}}",
     "`model`: mla says all head sizes (nope_dim, rope_dim, value_dim): remove head_dim"),
    (f"{TEXT}, mla: {{kv_rank: 8}}",
     "`model`: mla carries rotary positions of its own: set `positions: rope`"),
    (f"{DEEP}, mla: {{}}", "`model.mla.kv_rank`: required, but missing"),
    (f"{TEXT}, mtp_layers: -1", "`model.mtp_layers`: must be at least 0, got `-1`"),
    (f"{GOOD['vit']}, patch: 15", "`model`: image 224 is not divisible by patch 15"),
    (f"{GOOD['vit']}, patch: 0", "`model.seq`: required, but missing"),
    (f"{GOOD['vit']}, image: wide", "`model.seq`: required, but missing"),
    (f"{GOOD['vit']}, seq: 128",
     "`model`: seq 128 does not fit 14 x 14 patches and one class token: remove it, it is 197"),
    (f"{GOOD['vit']}, positions: rope",
     "`model`: a ViT has learned positions: remove `positions`"),
    ("family: vit, layers: 2, hidden: 65, heads: 4, vocab: 9",
     "`model`: hidden 65 is not divisible by heads 4"),
    ("family: resnet, layers: 49, vocab: 10",
     "`model`: a ResNet has 18, 34, 50, 101 or 152 layers, not 49"),
    ("family: resnet, layers: 50, vocab: 10, hidden: 64",
     "`model`: hidden 64 does not belong to a ResNet of 50 layers: remove it"),
    ("family: resnet, layers: 50, vocab: 10, heads: 8",
     "`model`: heads 8 does not belong to a ResNet of 50 layers: remove it"),
    ("family: resnet, layers: 50, vocab: 10, seq: 512",
     "`model`: seq 512 does not belong to a ResNet of 50 layers: remove it"),
    ("family: resnet, layers: 50, vocab: 10, mtp_layers: 1",
     "`model`: mtp_layers goes with causal language models, not with resnet"),
    ("layers: 4, hidden: 64, heads: 4, vocab: 512", "`model.seq`: required, but missing"),
    ("layers: 4, vocab: 512, seq: 8", "`model.hidden`: required, but missing"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), BAD, ids=[expected for _, expected in BAD])
def test_impossible_models_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    lines = shown(tmp_path, problems_of(tmp_path, with_model(text)))
    assert any(line.startswith("2:") and expected in line for line in lines), lines


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_images_need_steps_and_an_engine_that_knows_them(tmp_path: Path, family: str) -> None:
    text = with_model(GOOD[family], "megatron")
    [line] = shown(tmp_path, problems_of(tmp_path, text))
    assert f"engine megatron trains no {family}: set `engine.name` to `ddp`" in line
    text = with_model(GOOD[family]).replace("{steps: 60}", "{tokens: 3B}")
    [line] = shown(tmp_path, problems_of(tmp_path, text))
    assert f"budget.tokens counts tokens of text: give `steps` for a {family}" in line


def test_schema_lets_editors_leave_out_what_follows_from_the_family() -> None:
    """A preset needs nothing else."""
    preset, schema = json.loads(json_schema("spec"))["$defs"]["ModelSpec"]["anyOf"]
    assert preset == {"required": ["preset"]}
    assert schema["required"] == ["layers", "vocab"]
    by_family = {
        tuple(rule["if"]["properties"]["family"]["enum"]): rule["else"]["required"]
        for rule in schema["allOf"]
    }
    assert by_family == {("resnet",): ["hidden", "heads"], ("vit", "resnet"): ["seq"]}


# -- The causes that a spec may give a budget are those that the policy counts ------------------


def test_every_cause_with_a_budget_has_a_name_in_the_spec() -> None:
    assert set(get_args(BudgetName)) == {str(cause) for cause in FAILURE_CAUSES} | {
        str(Cause.TIME_LIMIT)
    }


# -- `profile:` says steps, ranks and a tool; what would never happen is refused where it stand


WRONG = [
    ("{steps: []}", "8:18: `profile.steps`: must not be empty"),
    ("{steps: [0]}", "8:19: `profile.steps[0]`: must be at least 1, got `0`"),
    ("{steps: [3, 5], tool: nsys}",
     "8:1: `profile`: nsys takes one range of steps, such as `[10, 11, 12]`"),
    ("{steps: [3], ranks: [0, 4]}",
     "8:30: `profile.ranks`: there is no rank 4 among 4 GPUs | ranks are 0 to 3"),
    ("{steps: [50, 61]}",
     "8:18: `profile.steps`: step 61 is after the last one, 60 | choose earlier steps"),
    ("{steps: [3], flops: true}",
     "8:23: `profile.flops`: unknown key | known here: ranks, steps, tool"),
    ("{steps: [3]}\nengine: {name: megatron-lm, checkout: /m}",
     "8:10: `profile`: an external Megatron-LM is not looked into from outside"
     " | remove it, and give Megatron-LM's own `engine.arguments`: {profile: true, "
     "profile-step-start: 3, profile-step-end: 4, use-pytorch-profiler: true}"),
]  # fmt: skip


@pytest.mark.parametrize(("profile", "expected"), WRONG)
def test_what_is_wrong_has_a_place(tmp_path: Path, profile: str, expected: str) -> None:
    problems = problems_of(tmp_path, f"{VALID}profile: {profile}\n")
    assert shown(tmp_path, problems) == [expected]


FINE: list[tuple[str, tuple[tuple[int, int], ...]]] = [
    ("{steps: [10, 12]}", ((10, 10), (12, 12))),
    ("{steps: [12, 11, 5]}", ((5, 5), (11, 12))),
    ("{steps: [10, 11, 12], tool: nsys, ranks: [0, 3]}", ((10, 12),)),
]


@pytest.mark.parametrize(("profile", "windows"), FINE)
def test_ranges_without_gaps_are_one_trace(
    tmp_path: Path, profile: str, windows: tuple[tuple[int, int], ...]
) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(f"{VALID}profile: {profile}\n")
    told: Any = load_run_spec(file).document.profile
    assert told.windows == windows


def test_the_last_step_of_a_token_budget_is_known(tmp_path: Path) -> None:
    text = VALID.replace("{steps: 60}", "{tokens: 10240}") + "profile: {steps: [11]}\n"
    (problem,) = problems_of(tmp_path, text)
    assert "step 11 is after the last one, 10" in problem.message


def test_the_number_of_traces_is_bounded() -> None:
    assert len(ProfileSpec(steps=tuple(range(1, 21))).chosen) == 20
    with pytest.raises(ValueError, match="at most 20 items"):
        ProfileSpec(steps=tuple(range(1, 22)))
