"""Configurations that no library writes: each is one of a family, changed in some places at random.

The number of an example says all of it, so that one that fails can be made again.
"""

from __future__ import annotations

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

_FAMILIES = sorted((Path(__file__).parents[2] / "families").glob("*.json"))
_NESTED: Any = "x"
for _level in range(30):
    _NESTED = {"a": [_NESTED]}
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 33, 320, 4096, 10**6, 10**12, 10**29, 10**40),
    *(0.5, -0.5, 0.0, 1.0, 4096.0, 1e-30, 1e30, 1e308, float("inf"), float("nan")),
    *("", "4096", "gelu", "foo", "Infinity", "\0", "$HOME", "x" * 300, "\u202e\x1b[2J"),
    *([], [1, 2], ["x"], [None], [[1], {"a": 2}], ["full_attention", 3], [0, 1, 1]),
    *({}, {"a": 1}, {"rope_type": "foo"}, {"type": "yarn", "factor": -1}, _NESTED),
    *({"full_attention": 3}, {"rope_type": "linear", "factor": "8"}, {"rope_theta": None}),
)
# Names of any family, which another one does not know or knows otherwise.
_NAMES = sorted({name for file in _FAMILIES for name in json.loads(file.read_text())})


def odd_config(number: int) -> dict[str, Any]:
    """Make the example of a number."""
    chance = random.Random(number)
    config: dict[str, Any] = json.loads(chance.choice(_FAMILIES).read_text())
    for _ in range(chance.choice((1, 1, 1, 2, 2, 3, 5))):
        places = [config, *(one for one in config.values() if isinstance(one, dict) and one)]
        place = chance.choice(places) if chance.random() < 0.3 else config
        name = chance.choice(sorted(place) or ["a"])
        kind = chance.random()
        if kind < 0.1:
            place.pop(name, None)
        elif kind < 0.25:
            place[chance.choice(_NAMES)] = deepcopy(chance.choice(ODD_VALUES))
        elif kind < 0.3:
            place[f"name_{chance.randrange(9)}"] = deepcopy(chance.choice(ODD_VALUES))
        elif kind < 0.4 and isinstance(place.get(name), int):
            place[name] = max(1, place[name] * chance.choice((1, 2, 3, 1000)) + chance.choice((0, 1)))
        else:
            place[name] = deepcopy(chance.choice(ODD_VALUES))
    return config
