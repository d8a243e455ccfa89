"""Initial weights depend on seed, name and place; how a weight is split changes none of them."""

from __future__ import annotations

import math

import pytest
import torch

from hpctrain.train.initial_weights import (
    Constant,
    Distribution,
    Normal,
    TruncatedNormal,
    Uniform,
    fill,
    global_places,
    normal,
    stream_key,
    uniform,
)


def splitmix64(key: int, place: int) -> int:
    """The published function, in Python's integers."""
    mask = 2**64 - 1
    z = (place * 0x9E3779B97F4A7C15 + key) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_the_numbers_are_those_of_splitmix64() -> None:
    key = stream_key(1234, "decoder.layers.0.mlp.weight")
    places = torch.tensor([0, 1, 2, 12345, 2**40 + 3])
    expected = [((splitmix64(key, int(p)) >> 41) + 0.5) / 2**23 for p in places]
    assert uniform(key, places).tolist() == expected


def whole(shape: tuple[int, ...], key: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.empty(shape, dtype=dtype)
    fill(made, key, Normal(0.0, 0.02), global_shape=shape, offsets=[0] * len(shape))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_cut_out_of_the_whole(dtype: torch.dtype) -> None:
    shape = (4, 6, 10)
    expected = whole(shape, dtype=dtype)
    for axis, parts in ((0, 4), (1, 2), (1, 3), (2, 5)):
        size = shape[axis] // parts
        for number in range(parts):
            part_shape = list(shape)
            part_shape[axis] = size
            offsets = [0, 0, 0]
            offsets[axis] = number * size
            part = torch.empty(part_shape, dtype=dtype)
            fill(part, 7, Normal(0.0, 0.02), global_shape=shape, offsets=offsets)
            assert torch.equal(part, expected.narrow(axis, number * size, size))


def test_a_view_is_filled_in_place() -> None:
    """The halves of a gated MLP are views of one weight."""
    both = torch.zeros(8, 6)
    first, second = both.chunk(2, dim=0)
    left = both[:, :3]
    for part, offsets in ((first, (0, 0)), (second, (4, 0))):
        fill(part, 7, Normal(0.0, 0.02), global_shape=(8, 6), offsets=offsets)
    assert torch.equal(both, whole((8, 6)))
    left.zero_()
    fill(left, 7, Normal(0.0, 0.02), global_shape=(8, 6), offsets=(0, 0))
    assert torch.equal(both, whole((8, 6)))


def test_padding_of_the_first_axis_changes_nothing() -> None:
    assert torch.equal(whole((128, 16)), whole((256, 16))[:128])


def test_other_names_and_seeds_are_other_numbers() -> None:
    keys = {stream_key(seed, name) for seed in range(50) for name in ("a", "b", "c")}
    assert len(keys) == 150
    drawn = [whole((64, 64), key) for key in sorted(keys)[:20]]
    for number, one in enumerate(drawn):
        for other in drawn[number + 1 :]:
            both = torch.stack([one.flatten(), other.flatten()])
            assert abs(float(torch.corrcoef(both)[0, 1])) < 0.08


def test_the_distribution_is_normal() -> None:
    """A million numbers: moments and tails, and no correlation between neighbours."""
    drawn = normal(stream_key(1, "x"), torch.arange(2**20)).double()
    assert abs(drawn.mean()) < 4e-3 and abs(drawn.std() - 1) < 3e-3
    assert abs((drawn**3).mean()) < 1.5e-2 and abs((drawn**4).mean() - 3) < 4e-2
    for limit in (1.0, 2.0, 3.0):
        share = float((drawn.abs() > limit).double().mean())
        assert share == pytest.approx(math.erfc(limit / math.sqrt(2)), rel=0.06)
    for lag in (1, 2, 64, 4096):
        assert abs(float((drawn[:-lag] * drawn[lag:]).mean())) < 5e-3


def test_places_in_the_whole() -> None:
    local = torch.arange(6)
    found = global_places(local, (2, 3), (10, 7), (4, 2))
    assert found.tolist() == [4 * 7 + 2, 4 * 7 + 3, 4 * 7 + 4, 5 * 7 + 2, 5 * 7 + 3, 5 * 7 + 4]
    # the inner axes are whole: the same numbers without a division
    assert global_places(local, (2, 3), (10, 3), (4, 0)).tolist() == list(range(12, 18))
    assert global_places(torch.arange(1), (), (), ()).tolist() == [0]


DISTRIBUTIONS: dict[str, Distribution] = {
    "constant": Constant(0.3),
    "uniform": Uniform(-0.1, 0.3),
    "normal": Normal(0.1, 0.02),
    "truncated": TruncatedNormal(0.1, 0.02, 0.09, 0.13),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_any_range_of_the_flattened_weight_has_the_numbers_of_the_whole(name: str) -> None:
    """Ranges that begin anywhere: vector instructions and their remainders compute the same."""
    shape, drawn = (211, 331), DISTRIBUTIONS[name]
    expected = torch.empty(shape)
    fill(expected, 7, drawn, global_shape=shape, offsets=(0, 0))
    generator, size = torch.Generator().manual_seed(3), expected.numel()
    for _ in range(40):
        first = int(torch.randint(size, (), generator=generator))
        part = torch.empty(int(torch.randint(1, size - first + 1, (), generator=generator)))
        fill(part, 7, drawn, global_shape=(size,), offsets=(first,))
        assert torch.equal(part, expected.flatten()[first : first + part.numel()])


def test_numbers_between_two_limits() -> None:
    drawn = Uniform(-0.1, 0.3).numbers(7, torch.arange(2**18)).double()
    assert drawn.min() >= -0.1 - 1e-7 and drawn.max() <= 0.3 + 1e-7
    assert float(drawn.mean()) == pytest.approx(0.1, abs=1e-3)
    assert float(drawn.std()) == pytest.approx(0.4 / math.sqrt(12), rel=5e-3)


@pytest.mark.parametrize(("low", "high"), [(-2.0, 2.0), (-0.02, 0.02), (0.0, 0.05), (-1.0, 0.01)])
def test_a_truncated_normal_distribution_is_that_of_torch(low: float, high: float) -> None:
    """Quantiles beside those of `torch.nn.init.trunc_normal_`, which rejects what is outside."""
    std = 0.02
    ours = TruncatedNormal(0.0, std, low, high).numbers(7, torch.arange(2**18))
    theirs = torch.empty(2**18)
    torch.nn.init.trunc_normal_(theirs, 0.0, std, low, high, generator=torch.manual_seed(5))
    assert ours.min() >= low and ours.max() <= high and ours.isfinite().all()
    shares = torch.linspace(0.01, 0.99, 50)
    assert torch.allclose(ours.quantile(shares), theirs.quantile(shares), atol=0.02 * std)
