"""Recipes of 8 and 4 bit numbers, with TransformerEngine's names and defaults.

Belongs here: the documents. Does not belong here: rounding (see `pytorch.fp8`).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

# As there: arguments that a recipe lacks are ignored, and megatron-core passes some.
from pydantic.dataclasses import dataclass


class Format(Enum):
    """Largest numbers (forward, backward) of the formats."""

    E2M1 = (6, 6)
    E4M3 = (448, 448)
    E5M2 = (57344, 57344)
    HYBRID = (448, 57344)


class Recipe:
    """A way to choose the scale of a tensor."""


@dataclass
class DelayedScaling(Recipe):
    """Scales follow from the largest magnitudes of earlier steps, which are stored."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8CurrentScaling(Recipe):
    """Scales follow from the tensor itself."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class MXFP8BlockScaling(Recipe):
    """One scale per block of 32 numbers."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    """One scale per block of 128 or 128 x 128 numbers."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class NVFP4BlockScaling(Recipe):
    """4 bit numbers, one scale per block of 16."""

    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
