"""Draw initial weights: each number depends on the seed, the weight's name and its place only.

A rank draws its own part, wherever the weight is split: the model is the same at every layout,
experts differ on all expert-parallel ranks, and the start takes the time of a part. A counter-based
generator gives the numbers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
SplitMix64's output function (Steele et al. 2014) of the element's index, and from these uniform
numbers those of other distributions. Equal bit for bit on one kind of device. Belongs here: the
numbers. Does not belong here: which weights there are, and their distributions (see the engines'
rooms).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# SplitMix64: the odd step between two counters, and the multipliers of its output function.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# A CPU computes what its cache contains; a GPU needs enough elements for all of its cores.
_ELEMENTS_AT_ONCE = {"cpu": 2**15}
_ELEMENTS_AT_ONCE_ON_GPU = 2**22


class Distribution(Protocol):
    """What the elements of a weight are drawn from."""

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        """Return float32 numbers for int64 places in the whole weight, in row-major order."""
        ...


@dataclass(frozen=True)
class Constant:
    """One value for all elements."""

    value: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        return torch.full(places.shape, self.value, dtype=torch.float32, device=places.device)


@dataclass(frozen=True)
class Uniform:
    """Numbers between `low` and `high`."""

    low: float
    high: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        return uniform(key, places).mul_(self.high - self.low).add_(self.low)


@dataclass(frozen=True)
class Normal:
    """A normal distribution."""

    mean: float
    std: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        return normal(key, places).mul_(self.std).add_(self.mean)


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal distribution without what lies outside of `low` and `high`.

    The inverse of its distribution function, of uniform numbers (Devroye 1986, "Non-uniform random
    variate generation", section II.2).
    """

    mean: float
    std: float
    low: float
    high: float

    def numbers(self, key: int, places: torch.Tensor) -> torch.Tensor:
        first, last = (
            math.erf((limit - self.mean) / (self.std * math.sqrt(2.0)))
            for limit in (self.low, self.high)
        )
        drawn = uniform(key, places).mul_(last - first).add_(first).erfinv_()
        drawn = drawn.mul_(self.std * math.sqrt(2.0)).add_(self.mean)
        return drawn.clamp_(self.low, self.high)


@torch.no_grad()
def fill(
    part: torch.Tensor,
    key: int,
    distribution: Distribution,
    *,
    global_shape: Sequence[int],
    offsets: Sequence[int],
    device: torch.device | None = None,
) -> None:
    """Fill a part of a weight in place with numbers of a distribution.

    `part` has as many axes as `global_shape`; `offsets` is the place of its first element. Only the
    inner axes' sizes decide: a weight that is padded along its first axis keeps its numbers. The
    numbers are computed on `device`, by default that of `part`.
    """
    flat = part.detach().reshape(-1)
    shares_memory = flat.data_ptr() == part.data_ptr() or not part.numel()
    values = flat if shares_memory and part.is_contiguous() else torch.empty_like(flat)
    device = device or part.device
    at_once = _ELEMENTS_AT_ONCE.get(device.type, _ELEMENTS_AT_ONCE_ON_GPU)
    for first in range(0, flat.numel(), at_once):
        last = min(first + at_once, flat.numel())
        local = torch.arange(first, last, device=device)
        places = global_places(local, part.shape, global_shape, offsets)
        values[first:last] = distribution.numbers(key, places).to(part.dtype)
    if values is not flat:
        part.detach().copy_(values.view(part.shape))


def fill_normal(
    part: torch.Tensor,
    key: int,
    *,
    mean: float,
    std: float,
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """Fill a part of a weight in place with numbers of a normal distribution, as `fill` does."""
    fill(part, key, Normal(mean, std), global_shape=global_shape, offsets=offsets)


def stream_key(seed: int, name: str) -> int:
    """Return the 64-bit key of one weight's numbers."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def global_places(
    local: torch.Tensor,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    """Return the row-major indices in the whole weight of elements of a part, as int64."""
    sizes, wholes, starts = list(shape), list(global_shape), list(offsets)
    while len(sizes) > 1 and sizes[-1] == wholes[-1]:
        # an axis that is not split and the one outside of it are one: divisions are slow
        inner = sizes.pop()
        for axes in (wholes, starts):
            axes.pop()
        for axes in (sizes, wholes, starts):
            axes[-1] *= inner
    if len(sizes) == 1:
        return local + starts[0]
    places = torch.zeros_like(local)
    stride, inner = 1, 1
    for size, whole, start in zip(sizes[::-1], wholes[::-1], starts[::-1], strict=True):
        places += (local // inner % size + start) * stride
        inner *= size
        stride *= whole
    return places


def normal(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers (float32) for int64 places: Box-Muller, of one 64-bit number.

    Its upper 23 bits are one of the two uniform numbers, the next 23 the other one.
    """
    bits = random_bits(key, places)
    radius = _fractions(_shifted(bits, 41)).log_().mul_(-2.0).sqrt_()
    angle = _fractions(bits.bitwise_right_shift_(18).bitwise_and_(2**23 - 1)).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_())


def uniform(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers in (0, 1): the upper 23 bits of SplitMix64, and a half."""
    return _fractions(_shifted(random_bits(key, places), 41))


def random_bits(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output (int64 that wraps around) for int64 places."""
    bits = (places * _signed(_STEP)).add_(_signed(key))
    bits.bitwise_xor_(_shifted(bits, 30)).mul_(_signed(_FIRST))
    bits.bitwise_xor_(_shifted(bits, 27)).mul_(_signed(_SECOND))
    return bits.bitwise_xor_(_shifted(bits, 31))


def _fractions(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of 23 bits, in the middles of 2^23 parts of (0, 1)."""
    return numbers.to(torch.float32).add_(0.5).mul_(2.0**-23)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as unsigned numbers: torch's shift of int64 keeps the sign."""
    return (numbers >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number
