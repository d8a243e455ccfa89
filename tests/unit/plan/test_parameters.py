"""Counts of parameters and operations, as published: of whole models, layers and ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from planner_knowledge import knowledge_of
from specimens import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    GPT175B,
    LLAMA7B,
    LLAMA405B,
    MIXTRAL,
)

from hpctrain.plan.cost.from_spec import case_of
from hpctrain.plan.cost.weights import weights_of
from hpctrain.plan.documents import Plan
from hpctrain.plan.mesh.candidate import candidate_of, columns_of, layout_of
from hpctrain.plan.mesh.stages import build_stages, split_layers
from hpctrain.plan.model.parameters import (
    count_model,
    expert_parameters,
    expert_tp,
    layer_parameters,
    linear_parameters,
    model_flops_per_step,
    mtp_parameters,
    pad_vocab,
    total_parameters,
)
from hpctrain.plan.model.vision import Convolution, resnet_convolutions
from hpctrain.plan.planner import make_plan
from hpctrain.plan.request import PlanRequest
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import ParallelSpec, RunSpec


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [
        (50257, 1, 50304),  # 393 x 128; the GPT-2 vocabulary in Megatron's own examples
        (50257, 8, 51200),  # 50 x 1024
        (51200, 8, 51200),
        (512, 2, 512),
        (513, 2, 768),  # 3 x 256
        (2, 4, 512),
    ],
)
def test_vocabulary_is_padded_to_128_times_tp(vocab: int, tp: int, padded: int) -> None:
    assert pad_vocab(vocab, tp) == padded


def test_llama_2_7b_has_its_published_number_of_parameters() -> None:
    # layer: 4 x 4096^2 + 3 x 4096 x 11008 + 2 x 4096 = 202,383,360; 32 of them;
    # embedding and output 2 x 32000 x 4096 = 262,144,000; final norm 4096
    assert total_parameters(ModelSpec.model_validate(LLAMA7B)) == 6_738_415_616


def test_llama_3_405b_has_its_published_number_of_parameters() -> None:
    # layer: 2 x 16384 x (128 + 8) x 128 + 3 x 16384 x 53248 + 2 x 16384 = 3,187,703,808;
    # 126 of them; 2 x 128256 x 16384 = 4,202,692,608; final norm 16384
    assert total_parameters(ModelSpec.model_validate(LLAMA405B)) == 405_853_388_800


def test_gpt_layer_follows_12_h_squared_plus_13_h() -> None:
    model = ModelSpec.model_validate(GPT175B)
    assert layer_parameters(model, 1) == 12 * 12288**2 + 13 * 12288


def test_tied_model_counts_its_table_once() -> None:
    untied = ModelSpec.model_validate(GPT175B)
    tied = untied.model_copy(update={"tied": True})
    assert total_parameters(untied) - total_parameters(tied) == 51200 * 12288


def test_model_flops_follow_narayanan_without_recomputation() -> None:
    # 72 B s L h^2 (1 + s / 6h + V / 12Lh): arXiv 2104.04473 with 72 for 96
    model, batch = ModelSpec.model_validate(GPT175B), 1536
    s, h, layers, vocab = 2048, 12288, 96, 51200
    expected = 72 * batch * s * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * layers * h))
    assert model_flops_per_step(model, batch) == pytest.approx(expected, rel=1e-12)


def test_model_flops_of_grouped_queries_and_gated_mlp() -> None:
    # per token: 6 x (126 x (2 x 16384 x 136 x 128 + 3 x 16384 x 53248) + 128256 x 16384)
    #          + 12 x 126 x 128 x 128 x 8192
    linear = 126 * (2 * 16384 * 136 * 128 + 3 * 16384 * 53248) + 128256 * 16384
    expected = (6 * linear + 12 * 126 * 16384 * 8192) * 16 * 8192
    assert model_flops_per_step(ModelSpec.model_validate(LLAMA405B), 16) == expected


# -- Counts of mixtures of experts, latent attention, token prediction and BERT, as published ---


BERT: dict[str, Any] = dict(family="bert", layers=12, hidden=768, heads=12, vocab=30522, seq=512)


def model_of(shape: dict[str, Any], **others: object) -> ModelSpec:
    return ModelSpec.model_validate({**shape, **others})


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        # sums over the tensors of the published checkpoints; DeepSeek-V3 has 58 x 256 biases of
        # its router besides, which are no parameters but moved by a rule (arXiv 2412.19437, 2.1.2)
        (DEEPSEEK_V3, 671_026_419_200 - 58 * 256),
        (DEEPSEEK_V2, 235_741_434_880),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
        (MIXTRAL, 46_702_792_704),
    ],
    ids=["deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "mixtral-8x7b"],
)
def test_totals_of_published_checkpoints(shape: dict[str, Any], parameters: int) -> None:
    assert total_parameters(model_of(shape)) == parameters


def test_experts_are_spread_over_ep_and_whole_then() -> None:
    mixtral, expert = model_of(MIXTRAL), 3 * 4096 * 14336
    assert expert_parameters(mixtral, 1, 1) == 8 * expert
    assert expert_parameters(mixtral, 4, 1) == 8 * expert // 4
    assert expert_parameters(mixtral, 4, 8) == expert_parameters(mixtral, 1, 8) == expert
    assert expert_parameters(model_of(BERT), 1) == 0
    assert [expert_tp(*sizes) for sizes in ((4, 1), (4, 2), (1, 1))] == [4, 1, 1]


def test_layers_of_both_kinds() -> None:
    model = model_of(DEEPSEEK_V3)
    dense, experts = layer_parameters(model, 1, layer=2), layer_parameters(model, 1, layer=3)
    # layer 2: one MLP of 18432; layer 3: 256 + 1 of 2048, and the router
    assert experts - dense == 3 * 7168 * (257 * 2048 - 18432) + 256 * 7168
    assert layer_parameters(model, 1) == experts
    assert layer_parameters(model, 1, 64) == experts - 3 * 7168 * 2048 * 252


def test_latent_attention_of_deepseek_v3() -> None:
    mlp = 3 * 7168 * 18432 + 2 * 7168
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    keys_values = 7168 * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = queries + keys_values + 128 * 128 * 7168
    assert layer_parameters(model_of(DEEPSEEK_V3), 1, layer=0) == attention + mlp
    # down-projections and norms stay whole on each of 8 ranks
    whole = 7168 * (1536 + 576) + 1536 + 512 + 2 * 7168
    split = attention + mlp - whole
    assert layer_parameters(model_of(DEEPSEEK_V3), 8, layer=0) == split // 8 + whole


def test_token_prediction_adds_a_layer_a_projection_and_norms() -> None:
    model = model_of(DEEPSEEK_V3, mtp_layers=1)
    added = total_parameters(model) - total_parameters(model_of(DEEPSEEK_V3))
    assert added == mtp_parameters(model, 1)
    assert added == layer_parameters(model, 1) + 2 * 7168**2 + 3 * 7168
    assert mtp_parameters(model_of(DEEPSEEK_V3, mtp_layers=3), 1) == 3 * added


def test_bert_base() -> None:
    # 12 layers of 12 h^2 + 13 h; words, positions, segments; final norm; masked-word head
    # h^2 + h, norm and output bias. The encoder of the paper has 109,482,240 of these (with one
    # norm behind the embeddings for the final one, and its pooler, as large as the head's h^2 + h).
    h = 768
    encoder = 12 * (12 * h * h + 13 * h) + (30522 + 512 + 2) * h + 2 * h + h * h + h
    assert encoder == 109_482_240
    heads = 2 * h + 30522
    assert total_parameters(model_of(BERT)) == encoder + heads


def test_flops_count_active_experts_the_router_and_token_prediction() -> None:
    h, layers = 4096, 32
    attention = 2 * h * (32 + 8) * 128
    linear = layers * (attention + 3 * h * 2 * 14336 + 8 * h) + 32000 * h
    assert linear_parameters(model_of(MIXTRAL)) == linear
    square = 12 * layers * h * 4096
    assert model_flops_per_step(model_of(MIXTRAL), 3) == (6 * linear + square) * 4096 * 3
    again = attention + 3 * h * 2 * 14336 + 8 * h + 2 * h * h + 32000 * h
    predicted = model_flops_per_step(model_of(MIXTRAL, mtp_layers=1), 3)
    assert predicted == (6 * (linear + again) + square * 33 // 32) * 4096 * 3


def test_flops_of_latent_attention_have_both_head_sizes() -> None:
    h, a = 7168, 128
    latent = h * 1536 + 1536 * a * 192 + h * 576 + 512 * a * 256 + a * 128 * h
    dense = latent + 3 * h * 18432
    experts = latent + 3 * h * 9 * 2048 + 256 * h
    linear = 3 * dense + 58 * experts + 129280 * h
    assert linear_parameters(model_of(DEEPSEEK_V3)) == linear
    full = model_flops_per_step(model_of(DEEPSEEK_V3), 1)
    assert full == (6 * linear + 6 * 61 * a * (192 + 128) * 4096) * 4096


def test_causal_variant_halves_attention_of_causal_models_only() -> None:
    model = model_of(MIXTRAL)
    full, causal = (model_flops_per_step(model, 1, causal) for causal in (False, True))
    assert full - causal == 6 * 32 * 4096 * 4096 * 4096
    bert = model_of(BERT)
    assert model_flops_per_step(bert, 1, True) == model_flops_per_step(bert, 1)


def test_flops_of_bert() -> None:
    linear = 12 * 12 * 768**2 + 768**2 + 30522 * 768
    expected = (6 * linear + 12 * 12 * 768 * 512) * 512 * 256
    assert model_flops_per_step(model_of(BERT), 256) == expected


# -- ViT and ResNet against the counts that torchvision publishes with its weights --------------


# torchvision, models/resnet.py and vision_transformer.py: num_params, and _ops (10^9
# multiplications for one image, forward)
RESNETS = {
    18: (11_689_512, 1.814),
    34: (21_797_672, 3.664),
    50: (25_557_032, 4.089),
    101: (44_549_160, 7.801),
    152: (60_192_808, 11.514),
}
VITS = {
    # layers, hidden, heads, patch, image
    "vit_b_16": ((12, 768, 12, 16, 224), 86_567_656, 17.564),
    "vit_b_16 at 384": ((12, 768, 12, 16, 384), 86_859_496, 55.484),
    "vit_b_32": ((12, 768, 12, 32, 224), 88_224_232, 4.409),
    "vit_l_16": ((24, 1024, 16, 16, 224), 304_326_632, 61.555),
    "vit_l_32": ((24, 1024, 16, 32, 224), 306_535_400, 15.378),
    "vit_h_14": ((32, 1280, 16, 14, 224), 632_045_800, 167.295),
    "vit_h_14 at 518": ((32, 1280, 16, 14, 518), 633_470_440, 1016.717),
}


def resnet(layers: int, classes: int = 1000, image: int = 224) -> ModelSpec:
    return ModelSpec.model_validate(
        dict(family="resnet", layers=layers, vocab=classes, image=image)
    )


def vit(layers: int, hidden: int, heads: int, patch: int, image: int) -> ModelSpec:
    shape = dict(layers=layers, hidden=hidden, heads=heads, patch=patch, image=image)
    return ModelSpec.model_validate({**shape, "family": "vit", "vocab": 1000})


@pytest.mark.parametrize("layers", RESNETS)
def test_resnets(layers: int) -> None:
    parameters, operations = RESNETS[layers]
    assert total_parameters(resnet(layers)) == parameters
    forward = model_flops_per_step(resnet(layers), 1) / 6e9
    assert round(forward, 3) == operations
    assert model_flops_per_step(resnet(layers), 256) == 256 * model_flops_per_step(
        resnet(layers), 1
    )


@pytest.mark.parametrize("name", VITS)
def test_vision_transformers(name: str) -> None:
    shape, parameters, operations = VITS[name]
    assert total_parameters(vit(*shape)) == parameters
    assert round(model_flops_per_step(vit(*shape), 1) / 6e9, 3) == operations


def test_classes_are_rows_of_the_last_layer() -> None:
    assert total_parameters(resnet(50)) - total_parameters(resnet(50, 10)) == 990 * 2049
    assert total_parameters(resnet(18)) - total_parameters(resnet(18, 10)) == 990 * 513


@pytest.mark.parametrize("layers", RESNETS)
def test_a_resnet_has_as_many_layers_as_its_name_says(layers: int) -> None:
    convolutions = list(resnet_convolutions(resnet(layers)))
    shortcuts = 4 if layers >= 50 else 3  # they do not count, the classifier does
    assert len(convolutions) - shortcuts + 1 == layers
    assert convolutions[-1].outputs == resnet(layers).hidden


def test_sides_of_feature_maps_round_up() -> None:
    def sides(image: int) -> list[int]:
        return sorted({one.side for one in resnet_convolutions(resnet(50, image=image))})

    assert sides(224) == [7, 14, 28, 56, 112]
    assert sides(225) == [8, 15, 29, 57, 113]
    assert sides(8) == [1, 2, 4]


def test_a_convolution_counts_its_batch_norm_once() -> None:
    stem = Convolution(inputs=3, outputs=64, kernel=7, side=112)
    assert (stem.parameters, stem.multiplications) == (9408 + 128, 9408 * 112 * 112)


@pytest.mark.parametrize("model", [resnet(50), vit(12, 768, 12, 16, 224)], ids=["resnet", "vit"])
def test_one_stage_holds_the_whole_model(model: ModelSpec) -> None:
    parallel = ParallelSpec()
    split = split_layers(model.layers, parallel)
    [stage] = build_stages(model, layout_of(parallel, 8), split)
    assert stage.parameters_per_gpu == total_parameters(model)


# -- What LoRA leaves to learn, and what that saves in memory -----------------------------------


def spec(**fields: Any) -> RunSpec:
    return RunSpec.model_validate(
        dict(
            name="tuned",
            model={**LLAMA7B, "seq": 2048},
            batch={"global": 8, "micro": 1},
            budget=dict(steps=4),
            optimizer=dict(lr=1e-4),
            checkpoint=dict(every_steps=2),
            engine=dict(name="ddp"),
            resources=dict(gpus=8),
            recompute="full",
        )
        | fields
    )


# peft prints for Llama-2-7B with r=8 and q_proj, v_proj: "trainable params: 4,194,304"; with all
# linear layers and r=16: 39,976,960.
@pytest.mark.parametrize(
    ("lora", "count"),
    [(dict(rank=8, targets=("q_proj", "v_proj")), 4_194_304), (dict(rank=16), 39_976_960)],
)
def test_known_counts(lora: dict[str, Any], count: int) -> None:
    assert count_model(spec(lora=lora)).trainable == count


def test_the_multiple_of_the_vocabulary_is_that_of_the_model() -> None:
    own = spec(model={**LLAMA7B, "seq": 2048, "vocab_multiple": 256}, engine=dict(name="megatron"))
    assert count_model(own).vocab_multiple == 256


def test_everything_learns_without_lora() -> None:
    counts = count_model(spec())
    assert counts.trainable == counts.parameters == total_parameters(spec().model)
    assert counts.trainable_share == 1.0


def planned(**fields: Any) -> Plan:
    return make_plan(spec(**fields), load_profile(find_profile("a100x64")).document)


def test_frozen_weights_have_no_gradients_and_no_moments() -> None:
    tuned = planned(lora={}).memory[0]
    thin = 39_976_960
    weights = total_parameters(spec().model) + thin  # 32000 is a multiple of 128
    assert tuned.weights_bytes == 2 * weights
    assert tuned.gradients_bytes == 4 * thin
    assert tuned.optimizer_bytes == 4 * weights + 8 * thin


def test_the_plan_counts_thin_matrices_and_what_learns() -> None:
    tuned = planned(lora=dict(rank=8, targets=("q_proj", "v_proj")))
    assert tuned.parameters == 6_738_415_616 + 4_194_304
    assert tuned.parameters == tuned.stages[0].parameters_per_gpu
    assert tuned.learned == tuned.learned_parameters == 4_194_304


def test_the_search_counts_what_the_plan_counts() -> None:
    tuned = spec(lora=dict(rank=64))
    columns = columns_of(replace(candidate_of(tuned, ParallelSpec(), 8), recompute=2))
    case = case_of(PlanRequest(tuned, load_profile(find_profile("a100x64")).document), columns)
    assert float(np.max(weights_of(case).dense)) == pytest.approx(
        count_model(tuned).parameters, rel=1e-5
    )


def test_frozen_weights_need_two_products_of_three() -> None:
    model, tuned = spec().model, spec(lora={})
    whole = model_flops_per_step(model, 8)
    tokens = 8 * model.seq
    expected = whole - 2 * linear_parameters(model) * tokens + 6 * 39_976_960 * tokens
    assert count_model(tuned).flops_per_step == expected
    assert count_model(spec()).flops_per_step == whole
    assert planned(lora={}).model_flops_per_step == expected


def test_a_step_of_tuning_is_shorter_by_the_gradients_of_frozen_weights() -> None:
    larger = dict(engine=dict(name="fsdp"), resources=dict(gpus=64), batch={"global": 64})
    whole, tuned = predicted(**larger), predicted(**larger, lora={})
    assert 0.6 < tuned / whole < 0.9  # norms of many kernels take as long


def predicted(**fields: Any) -> float:
    profile = load_profile(find_profile("a100x64")).document
    plan = make_plan(spec(**fields), profile, knowledge_of(profile))
    assert plan.prediction is not None
    return plan.prediction.parts.compute_seconds


def test_a_model_of_7_billion_is_tuned_where_it_could_not_be_trained() -> None:
    with pytest.raises(Exception, match="GiB"):
        planned()
    assert planned(lora={}).memory[0].total_bytes < 80 * 2**30
