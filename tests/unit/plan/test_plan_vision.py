"""ViT and ResNet against the counts that torchvision publishes with its weights."""

from __future__ import annotations

import pytest

from hpctrain.plan.mesh.candidate import layout_of
from hpctrain.plan.mesh.stages import build_stages, split_layers
from hpctrain.plan.model.parameters import model_flops_per_step, total_parameters
from hpctrain.plan.model.vision import Convolution, resnet_convolutions
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.run import ParallelSpec

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
