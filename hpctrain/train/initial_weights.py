"""Draw initial weights: each number depends on the seed, the weight's name and its place only.

A rank draws its own part, wherever the weight is split: the model is the same at every layout,
experts differ on all expert-parallel ranks, and the start takes the time of a part. A counter-based
generator gives the numbers (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"):
SplitMix64's output function (Steele et al. 2014) of the element's index, and Box-Muller. Equal bit
for bit on one kind of device. Belongs here: the numbers. Does not belong here: which weights there
are (see the engines' rooms).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

# SplitMix64: the odd step between two counters, and the multipliers of its output function.
_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ELEMENTS_AT_ONCE = 2**22


def stream_key(seed: int, name: str) -> int:
    """Return the 64-bit key of one weight's numbers."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def fill_normal(
    part: torch.Tensor,
    key: int,
    *,
    mean: float,
    std: float,
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> None:
    """Fill a part of a weight in place with numbers of a normal distribution.

    `part` has as many axes as `global_shape`; `offsets` is the place of its first element. Only the
    inner axes' sizes decide: a weight that is padded along its first axis keeps its numbers.
    """
    flat = part.detach().reshape(-1)
    shares_memory = flat.data_ptr() == part.data_ptr() or not part.numel()
    values = flat if shares_memory and part.is_contiguous() else torch.empty_like(flat)
    for first in range(0, flat.numel(), _ELEMENTS_AT_ONCE):
        local = torch.arange(
            first, min(first + _ELEMENTS_AT_ONCE, flat.numel()), device=part.device
        )
        places = global_places(local, part.shape, global_shape, offsets)
        drawn = normal(key, places).mul_(std).add_(mean)
        values[first : first + drawn.numel()] = drawn.to(part.dtype)
    if values is not flat:
        part.detach().copy_(values.view(part.shape))


def global_places(
    local: torch.Tensor,
    shape: Sequence[int],
    global_shape: Sequence[int],
    offsets: Sequence[int],
) -> torch.Tensor:
    """Return the row-major indices in the whole weight of elements of a part, as int64."""
    places = torch.zeros_like(local)
    stride, inner = 1, 1
    for axis in range(len(shape) - 1, -1, -1):
        places += (local // inner % shape[axis] + offsets[axis]) * stride
        inner *= shape[axis]
        stride *= global_shape[axis]
    return places


def normal(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers (float32) for int64 places, each from two uniform ones."""
    radius = uniform(key, places).log_().mul_(-2.0).sqrt_()
    angle = uniform(key ^ _SECOND, places).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_())


def uniform(key: int, places: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers in (0, 1): the upper 23 bits of SplitMix64, and a half."""
    bits = _mixed(places * _signed(_STEP) + _signed(key))
    return _shifted(bits, 41).to(torch.float32).add_(0.5).mul_(2.0**-23)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function, in int64 that wraps around."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _signed(_FIRST)
    numbers = (numbers ^ _shifted(numbers, 27)) * _signed(_SECOND)
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as unsigned numbers: torch's shift of int64 keeps the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number
