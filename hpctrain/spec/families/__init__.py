"""What a published family of models is: a file of data for each, read from its `config.json`.

A family says which parts its models have (`choices`), which name of `config.json` is which field of
`model` (`fields`), and what of that file changes nothing here (`ignored`) or cannot be expressed
(`fixed`). Belongs here: the form of these files, finding one, and reading a `config.json` by it.
Does not belong here: what parts are (`hpctrain.spec.architecture`), building a model
(`hpctrain.train`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, model_validator

from hpctrain.spec.document import Document
from hpctrain.spec.families.readers import READERS, UnreadableError, given
from hpctrain.spec.fields import did_you_mean
from hpctrain.spec.positions import shorten

DIRECTORY = Path(__file__).resolve().parent
# All files in one, each completed by those that it is like: read in a hundredth of the time.
# `make golden` writes it (tests/golden/test_packaged_json.py), with both tables of other types.
COMPILED = DIRECTORY / "families.json"

# The family of models that are known by a count alone.
OTHER = "other"

Config = Mapping[str, Any]
Role = Literal[
    "query", "key", "value", "qkv", "key_value", "output", "gate", "up", "gate_up", "down",
    "query_down", "query_up", "latent_down", "latent_up",
]  # fmt: skip


class FieldRow(Document):
    """Where a field of `model` stands in `config.json`.

    In a file it may be the name alone, or `[name, default]`.
    """

    name: str = Field(min_length=1, description="Name in config.json; the first one that is there")
    others: tuple[str, ...] = Field((), description="Other names of the same, older or newer")
    default: Any = Field(None, description="What transformers takes where it is absent")
    values: dict[str, Any] = Field({}, description="Their value -> ours, where they differ")
    times: str | None = Field(None, description="Multiplied by the value of this name")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: object) -> object:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, list):
            return dict(zip(("name", "default"), data, strict=False))
        return data


class WeightRow(Document):
    """A weight of the class of transformers, or one of each expert or layer; beside it its bias.

    In a file it may be the name alone.
    """

    name: str = Field(
        min_length=1, description="Name without `.weight`; `{expert}`, `{head}`: its number"
    )
    beside: str | None = Field(
        None, description="Name where attention and MLP have norms beside each other (Falcon 40B)"
    )
    ends: tuple[str, str] = Field((".weight", ".bias"), description="Of the weight and the bias")
    transposed: bool = Field(False, description="Input x output (GPT-2's Conv1D)")
    stacked: bool = Field(
        False, description="Rows of all queries, all keys, all values; else group by group"
    )
    alternating: bool = Field(False, description="Rows of gate and up take turns (GPT-OSS)")
    of_experts: bool = Field(False, description="One tensor for all experts of a layer")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, data: object) -> object:
        return {"name": data} if isinstance(data, str) else data


class Family(Document):
    """One family. Names of classes are those of transformers."""

    name: str
    title: str = Field(min_length=2, description="As people call it")
    like: str | None = Field(None, description="A family whose file this one completes")
    model_types: tuple[str, ...] = Field((), description="`model_type` of its config.json")
    section: str | None = Field(None, description="Where the text model stands in config.json")
    settings: str = Field("", description="Class of the configuration")
    classes: dict[str, str] = Field({}, description="Task -> class of the model")
    blocks: tuple[str, ...] = Field((), description="Classes of the repeated blocks")
    linears: tuple[tuple[str, Role], ...] = Field(
        (),
        description="Linear layers of a block, by their last names: what LoRA adapts (of models "
        "with experts those of attention, for peft takes others for experts)",
    )
    layer_prefix: str = Field("", description="Begins the weights of layer `{layer}`")
    weights: dict[str, WeightRow] = Field(
        {}, description="Part of the model -> its weight: what `hpctrain convert` reads and writes"
    )
    unused_weights: tuple[str, ...] = Field(
        (), description="Patterns of tensors in published files that are no weights (fnmatch)"
    )
    choices: dict[str, Any] = Field({}, description="Fields of `model` that its models have")
    fields: dict[str, FieldRow] = Field({}, description="Field of `model` -> where it stands")
    readers: tuple[str, ...] = Field((), description="Functions for what one name cannot say")
    absent: dict[str, Any] = Field(
        {}, description="Name that a reader reads -> what transformers takes where it is absent"
    )
    dropouts: tuple[str, ...] = Field((), description="Names that take `model.dropout`")
    hidden_dropout: bool = Field(True, description="Dropout behind attention and MLP, too")
    whole_heads: bool = Field(
        False, description="The class wants `hidden` to be a multiple of `heads` in any case"
    )
    ignored: tuple[str, ...] = Field((), description="Names that change nothing in training")
    fixed: dict[str, tuple[Any, ...]] = Field(
        {}, description="Name -> the values that are trained here; any other is refused"
    )

    @property
    def class_name(self) -> str:
        """The class that stands for the family in messages."""
        return next(iter(self.classes.values()))

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Last names of linear layers, sorted."""
        return tuple(sorted({name for name, _ in self.linears}))


def family_names() -> list[str]:
    """List the families of which a spec can say the parts, sorted."""
    return sorted({*_tables()[0]} - {OTHER})


@cache
def family_named(name: str) -> Family | None:
    """Find a family by its name; None if there is none."""
    values = _tables()[0].get(name)
    return None if values is None else Family.model_validate(values)


def family_of(config: Config) -> Family | None:
    """Find the family of a `config.json`; None for one that is not in the tables."""
    kind = config.get("model_type")
    names = (name for name, values in _tables()[0].items() if kind in values.get("model_types", ()))
    return family_named(next(names, ""))


def unknown_type(config: Config) -> tuple[str, str | None]:
    """Say that a `config.json` is of no family, with a hint."""
    kind = config.get("model_type")
    if kind is None:
        return "this is no config.json: it has no `model_type`", None
    families, refused, _ = _tables()
    shown = _shown(kind)
    message = f"`model_type`: hpctrain does not know models of type {shown}"
    if (part := missing_part(config)) is not None:
        own = "a program of your own can train it under hpctrain: `hpctrain explain trainer`"
        return f"{message}: {part}", own if kind in refused else COUNT_IT
    types = [one for values in families.values() for one in values.get("model_types", ())]
    hint = did_you_mean(kind, types) if isinstance(kind, str) else None
    known = "give the fields of `model` yourself: `hpctrain explain model`"
    return message, hint or known


COUNT_IT = "to train its class of transformers, count it: `hpctrain init --model DIR` writes a spec"


def missing_part(config: Config) -> str | None:
    """Name the part for which a `config.json` is of no family; None where that is not known."""
    _, refused, counted = _tables()
    kind = config.get("model_type")
    return {**refused, **counted}.get(kind) if isinstance(kind, str) else None


def countable(config: Config) -> bool:
    """Tell whether the class of a `config.json` may be a causal language model of texts."""
    return isinstance(config.get("model_type"), str) and config["model_type"] not in _tables()[1]


def config_digest(config: Config) -> str:
    """Compute the digest of a `config.json`, whatever the order and spelling of its values."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


@cache
def block_classes() -> frozenset[str]:
    """Names of the classes of repeated blocks of all families."""
    return frozenset(name for values in _tables()[0].values() for name in values.get("blocks", ()))


@cache
def _tables() -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, str]]:
    """Families by name, and why models of other types are none of them: those that are no causal
    language models of texts, and those that can be counted."""
    read: Callable[[str], bytes] = cast(Any, __spec__).loader.get_data  # PEP 302, also from a zip
    document = json.loads(read(str(COMPILED)))
    return document["families"], document["refused"], document["counted"]


# -- Read a `config.json` ------------------------------------------------------------------------


@dataclass
class Reading:
    """What a `config.json` says: fields of `model`, and what of it could not be taken.

    `names`: field of `model` -> its name there. `refused`: (name, why). `unknown`: names with a
    value that nobody here knows; the class of transformers may.
    """

    family: Family
    fields: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    refused: list[tuple[str, str]] = field(default_factory=list)
    unknown: list[tuple[str, Any]] = field(default_factory=list)


def text_config(config: Config, family: Family) -> Config:
    """Return the settings of the text model, which may stand in a section of their own."""
    section = config.get(family.section) if family.section is not None else None
    return {**config, **section} if isinstance(section, dict) else config


def read_config(config: Config, family: Family) -> Reading:
    """Read a `config.json` of a family. Values are not checked: `ModelSpec` does that."""
    text = text_config(config, family)
    whole = {**_defaults(text, family), **text}
    reading = Reading(family, {"family": family.name})
    for path, row in family.fields.items():
        name = next((name for name in (row.name, *row.others) if name in text), row.name)
        value = _value(whole, row)
        if row.values and isinstance(text.get(name), str) and text[name] not in row.values:
            words = " or ".join(map(_shown, row.values))
            reading.refused.append((name, f"is {_shown(text[name])}, known here is {words}"))
            value = None
        put(reading.fields, path, value)
        reading.names[path] = name
    known = {name for row in family.fields.values() for name in (row.name, *row.others, row.times)}
    known |= {*family.ignored, *family.dropouts, *family.fixed, family.section}
    for name in family.readers:
        reader = READERS[name]
        known.update(reader.names)
        names = [name for name in reader.names if text.get(name) is not None] or [*reader.names]
        try:
            for path, value in reader.read(whole):
                put(reading.fields, path, value)
                reading.names[path] = next(
                    (one for one in names if text.get(one) == value), names[0]
                )
        except UnreadableError as error:
            wrong = str(error)
            reading.refused.append((wrong, f"is {_shown(text.get(wrong))}, and cannot be read"))
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            # a value of another type than in any file that transformers writes
            where = next((one for one in names if not isinstance(text.get(one), dict)), names[0])
            reading.refused.append((where, f"is {_shown(text.get(where))}, and cannot be read"))
    for name, allowed in family.fixed.items():
        if name in text and text[name] not in allowed:
            only = " or ".join(map(_shown, allowed))
            reading.refused.append((name, f"is {_shown(text[name])}, trained here is {only}"))
    for name, value in text.items():
        if name not in known and given(value) and not name.startswith("_"):
            reading.unknown.append((name, value))
    reading.fields = dict(_without_empty(reading.fields))
    return reading


def _defaults(config: Config, family: Family) -> dict[str, Any]:
    """List what transformers takes for the names that a file leaves out. Absent is not null."""
    rows = {
        row.name: row.default
        for row in family.fields.values()
        if row.default is not None and not any(name in config for name in row.others)
    }
    return {**rows, **family.absent}


def _value(config: Config, row: FieldRow) -> Any:
    found = next((config[name] for name in (row.name, *row.others) if name in config), None)
    if row.values and isinstance(found, str | bool | int) and str(found) in row.values:
        found = row.values[str(found)]
    if row.times is not None and found is not None:
        factor = config.get(row.times)
        found = found * factor if isinstance(factor, int) and isinstance(found, int) else None
    return found


def write_config(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Write a `config.json` from the fields of `model`, nested as in a spec.

    What no row and no reader can write stays away: reading the result shows what it is.
    """
    config: dict[str, Any] = {}
    for path, row in family.fields.items():
        value = value_at(fields, path)
        # of several names for one value the default, else the first one
        theirs = {_key(ours): name for name, ours in reversed(row.values.items())}
        if isinstance(row.default, str) and row.default in row.values:
            theirs[_key(row.values[row.default])] = row.default
        if value is None and None not in row.values.values():
            continue
        if row.values and isinstance(value, str) and _key(value) not in theirs:
            continue  # a choice that the class has not
        named = theirs.get(_key(value), value)
        config[row.name] = {"True": True, "False": False}.get(named, named)
    for row in family.fields.values():
        if row.times is not None and config.get(row.name) and config.get(row.times):
            config[row.name] //= config[row.times]
    for name in family.readers:
        write = READERS[name].write
        if write is not None:
            config |= write(fields)
    return config


def _key(value: Any) -> str:
    return json.dumps(value)


def value_at(fields: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of nested fields; None where there is none."""
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def put(fields: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path of nested fields; None is no value."""
    if value is None:
        return
    *outer, last = path.split(".")
    for name in outer:
        fields = fields.setdefault(name, {})
    fields[last] = value


def _without_empty(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Leave out parts of which nothing was read but what says nothing alone."""
    for name, value in fields.items():
        if isinstance(value, dict) and not value:
            continue
        yield name, value


def _shown(value: Any) -> str:
    return shorten(json.dumps(value))
