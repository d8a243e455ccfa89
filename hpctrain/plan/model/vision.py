"""Count parameters and operations of models that read images, in closed forms.

Covers the ends of a ViT, and whole ResNets.

As torchvision builds them, whose published counts the tests compare with. Belongs here: what has
to do with pixels. Does not belong here: the transformer layers of a ViT (`parameters`).
None of it is split over ranks: these models are planned with data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.spec.run import ModelSpec


COLORS = 3

# He et al. 2016 (arXiv 1512.03385), table 1: blocks of the four stages.
RESNET_BLOCKS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
STEM_FEATURES = 64
BOTTLENECK_FROM = 50  # layers; such blocks are 1x1, 3x3, 1x1 convolutions
BOTTLENECK_EXPANSION = 4


@dataclass(frozen=True)
class Convolution:
    """A square convolution without bias, and the batch norm (2 parameters a feature) behind it."""

    inputs: int
    outputs: int
    kernel: int
    side: int  # positions of its output along one side

    @property
    def weights(self) -> int:
        return self.kernel**2 * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        return self.weights + 2 * self.outputs

    @property
    def multiplications(self) -> int:
        return self.weights * self.side**2


def stem_parameters(model: ModelSpec) -> int:
    """Count a ViT's stem: patch projection with bias, class token, learned positions.

    Dosovitskiy et al. 2020 (arXiv 2010.11929), equation 1.
    """
    if model.family == "resnet":
        return 0
    projection = COLORS * model.patch**2 * model.hidden + model.hidden
    return projection + model.hidden + model.seq * model.hidden


def head_parameters(model: ModelSpec) -> int:
    """Count a ViT's head: final norm, and a linear layer with bias over the classes."""
    if model.family == "resnet":
        return 0
    norm = model.hidden * (2 if model.norm == "layernorm" else 1)
    return norm + model.hidden * model.vocab + model.vocab


def end_multiplications(model: ModelSpec) -> int:
    """Count multiplications of a ViT's ends for one image, forward: patches and class row."""
    patches = (model.image // model.patch) ** 2
    return patches * COLORS * model.patch**2 * model.hidden + model.hidden * model.vocab


def resnet_parameters(model: ModelSpec) -> int:
    """Count all parameters of a ResNet: convolutions, batch norms, and classifier with bias."""
    layers = sum(convolution.parameters for convolution in resnet_convolutions(model))
    return layers + model.hidden * model.vocab + model.vocab


def resnet_multiplications(model: ModelSpec) -> int:
    """Count multiplications for one image, forward: every convolution, and the classifier."""
    layers = sum(convolution.multiplications for convolution in resnet_convolutions(model))
    return layers + model.hidden * model.vocab


def resnet_convolutions(model: ModelSpec) -> Iterator[Convolution]:
    """Yield all convolutions in order.

    The stem (7x7, stride 2, then a pooling of stride 2), and four stages, each but the first
    halving the side and doubling the features. Blocks that change the shape have a shortcut.
    """
    side = halved(model.image)
    yield Convolution(COLORS, STEM_FEATURES, 7, side)
    side, inputs = halved(side), STEM_FEATURES
    bottleneck = model.layers >= BOTTLENECK_FROM
    for stage, blocks in enumerate(RESNET_BLOCKS[model.layers]):
        width = STEM_FEATURES * 2**stage
        for block in range(blocks):
            before = side
            side = halved(side) if stage > 0 and block == 0 else side
            outputs = width * (BOTTLENECK_EXPANSION if bottleneck else 1)
            if bottleneck:  # the stride in the 3x3, as torchvision has it ("ResNet v1.5")
                yield Convolution(inputs, width, 1, before)
                yield Convolution(width, width, 3, side)
                yield Convolution(width, outputs, 1, side)
            else:
                yield Convolution(inputs, width, 3, side)
                yield Convolution(width, width, 3, side)
            if inputs != outputs or before != side:  # option B of the paper
                yield Convolution(inputs, outputs, 1, side)
            inputs = outputs


def resnet_kept(model: ModelSpec) -> int:
    """Count the 16-bit numbers that the backward pass needs of one image.

    The outputs of each convolution and batch norm, and the positions of the pooling's maxima
    (eight bytes each).
    """
    pooled = STEM_FEATURES * halved(halved(model.image)) ** 2
    kept = sum(2 * layer.outputs * layer.side**2 for layer in resnet_convolutions(model))
    return kept + 4 * pooled


def halved(side: int) -> int:
    """Count positions behind a stride of 2 with such padding that a side of 1 stays 1."""
    return -(-side // 2)
