"""Colours of charts can be told apart, in both themes and with each kind of colour blindness.

Dichromats after Machado, Oliveira, Fernandes 2009 (doi 10.1109/TVCG.2009.113), severity 1.0, in
linear RGB. Distances in OKLab (Ottosson 2020, bottosson.github.io/posts/oklab): 1 is from black to
white, and 0.02 can just be seen.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import hpctrain.page

CSS = Path(hpctrain.page.__file__).parent / "templates" / "charts.css"
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
TO_CONES = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.7936177850, -0.0040720468),
    (1.9779984951, -2.4285922050, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.8086757660),
)


def times(matrix: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, values, strict=True)) for row in matrix]


def seen(colour: str, eyes: str) -> list[float]:
    """A colour such as `#465cdd` in OKLab, as these eyes see it."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    found = [min(1.0, max(0.0, value)) for value in times(EYES[eyes], linear)]
    return times(TO_LAB, [value ** (1 / 3) for value in times(TO_CONES, found)])


def themes() -> list[dict[str, str]]:
    blocks = re.findall(r":root \{([^}]*)\}", CSS.read_text())
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_any_two_colours_are_far_apart(theme: int, eyes: str) -> None:
    colours = {name: value for name, value in themes()[theme].items() if re.match(r"c\d", name)}
    assert len(colours) == 8
    near = {
        (one, other): math.dist(seen(colours[one], eyes), seen(colours[other], eyes))
        for one, other in itertools.combinations(colours, 2)
    }
    assert min(near.values()) >= 0.09, sorted(near.items(), key=lambda item: item[1])[:3]


def test_paper_has_the_colours_of_the_light_theme() -> None:
    light, _, paper = themes()
    assert {name: paper[name] for name in paper if re.match(r"c\d", name)} == {
        name: light[name] for name in light if re.match(r"c\d", name)
    }
