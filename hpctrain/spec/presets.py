"""Published models by name: `model: llama-3-8b` instead of a dozen fields.

Belongs here: the catalogue `models.yaml`, and putting its fields in the place of a name. Does not
belong here: the fields themselves (`model`), reading files (`loader`).
"""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from pydantic import Field

from hpctrain.spec.document import Document
from hpctrain.spec.fields import did_you_mean
from hpctrain.spec.positions import Parsed

CATALOGUE = FilePath(__file__).resolve().parent / "catalogue" / "models.yaml"
MODEL, PRESET = "model", "preset"


class ModelPreset(Document):
    """One published model. `shape`: fields of `model`; `parameters`: as published, each once."""

    name: str = Field(min_length=2)
    parameters: int = Field(ge=1)
    source: str = Field(min_length=3)
    shape: dict[str, Any]


class ModelPresets(Document):
    """All of them, in the order of the file."""

    presets: tuple[ModelPreset, ...]

    def named(self, name: str) -> ModelPreset | None:
        return next((one for one in self.presets if one.name == name), None)


def expand_preset(parsed: Parsed, catalogue: ModelPresets) -> None:
    """Replace the name of a model by its fields; those that the file gives stay.

    Fields of the catalogue have the place of the name. An unknown name is a problem of the file.
    """
    model = parsed.data.get(MODEL) if isinstance(parsed.data, dict) else None
    given = model if isinstance(model, dict) else {}
    where = (MODEL, PRESET) if PRESET in given else (MODEL,)
    name, place = given.pop(PRESET, model), parsed.values[where]
    if not isinstance(name, str):
        message = f"`{MODEL}.{PRESET}`: expected the name of a model"
        parsed.problems.append(place.problem(message))
        parsed.broken.add((MODEL,))
        return
    found = catalogue.named(name)
    if found is None:
        names = [one.name for one in catalogue.presets]
        hint = did_you_mean(name, names) or f"presets are {', '.join(names)}"
        parsed.problems.append(place.problem(f"`{MODEL}`: no preset is called `{name}`", hint))
        parsed.broken.add((MODEL,))
        parsed.data[MODEL] = dict(given)
        return
    parsed.values.pop((MODEL, PRESET), None)
    parsed.data[MODEL] = {**found.shape, **given}
    for field in found.shape.keys() - given.keys():
        parsed.values[MODEL, field] = place
