"""Translate between the `model` section of a spec and the settings of a class of transformers.

`settings_of` gives the keyword arguments of the family's configuration class, `differences` what
that class computes otherwise than the spec says, and `disagreements` compares a directory's
`config.json` with a spec. Belongs here: these translations, by the family's file. Does not belong
here: that file (`hpctrain.spec.families`), transformers (see `hpctrain.train.engines.models`),
opening files (see `hpctrain.checkpoints.staged`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from hpctrain.spec.explain import explain
from hpctrain.spec.families import (
    OTHER,
    Config,
    Family,
    Reading,
    family_named,
    family_of,
    read_config,
    text_config,
    unknown_type,
    value_at,
    write_config,
)
from hpctrain.spec.model import ModelSpec
from hpctrain.spec.positions import Parsed, shorten

Settings = dict[str, object]
# What a run chooses, or what classes do not compute.
_OF_A_RUN = frozenset(
    {"pretrained", "config", "family", "seq", "max_seq", "dropout", "classes", "mtp_layers"}
    | {"init_std", "vocab_multiple"}
)
# Losses beside the model, which a run chooses whatever its weights were trained with.
_BESIDE = frozenset({"moe.balance", "moe.balance_loss", "moe.z_loss"})
# Parts that a model has or has not.
_PARTS = ("moe", "mla", "mamba", "linear")
_MOST_NAMES = 8  # that one line has
# The data already contains begin, end and padding tokens. A class that wants a number has its own
# in `absent` (CWM).
_NO_TOKENS: Settings = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def family_by(model: ModelSpec) -> Family:
    """Return the family of a model."""
    family = family_named(model.family)
    assert family is not None, "the model was checked"
    return family


def type_of(model: ModelSpec) -> str:
    """Return the `model_type` of a model's config.json."""
    known = family_by(model).model_types
    return known[0] if known else str((model.config or {})["model_type"])


def fields_of(model: ModelSpec) -> dict[str, Any]:
    """List the fields of a model, nested as in a spec, also those that follow from others."""
    fields = model.model_dump(exclude_none=True, exclude={"config", "pretrained"})
    fields |= {"ffn": model.ffn_size, "max_seq": model.max_seq or model.seq}
    if model.positions == "relative":
        fields |= {"relative": model.distances.model_dump()}
    if model.mla is None:
        fields |= {"kv_heads": model.key_value_heads, "head_dim": model.head_size}
    return fields


def settings_of(model: ModelSpec) -> Settings:
    """List keyword arguments of the family's configuration class.

    Where the spec has a `config.json`, its values, with those that the spec changes; of a counted
    model they are untouched.
    """
    family = family_by(model)
    if model.counted is not None:
        return {**(model.config or {})}
    settings: Settings = write_config(fields_of(model), family)
    text: Config = {}
    if model.config is not None:
        text = text_config(model.config, family)
        before = write_config(_read(text, family, model)[0], family)
        settings = {name: to for name, to in settings.items() if before.get(name) != to}
    wanted = {name: family.absent[name] for name in _NO_TOKENS if name in family.absent}
    tokens = {} if model.reads_images else {**_NO_TOKENS, **wanted, **padding_of(text, family)}
    return {**text, **tokens, **settings, **fresh_settings(model)}


def padding_of(config: Config, family: Family) -> Settings:
    """Return the token from whose number positions are counted (RoBERTa); nothing for others."""
    counts = "offset_positions" in family.readers
    return {"pad_token_id": config.get("pad_token_id", 1)} if counts else {}


def _read(config: Config, family: Family, model: ModelSpec) -> tuple[dict[str, Any], ModelSpec]:
    """Read settings as a model of the length of `model`, with its fields.

    Raises ValidationError if they are no model.
    """
    read = read_config(config, family).fields
    derived = ("hidden", "heads", "seq") if model.family == "resnet" else ("seq",)
    own = {} if model.reads_images else {name: getattr(model, name) for name in derived}
    limit = read.get("max_seq")
    if isinstance(limit, int) and "seq" in own:
        own["seq"] = min(own["seq"], limit)
    found = model_of({**own, **read})
    return fields_of(found), found


def model_of(fields: Mapping[str, Any]) -> ModelSpec:
    """Make a model of fields as a spec has them. Raises ValidationError as for a spec."""
    return ModelSpec.model_validate_json(json.dumps(fields), strict=True)


def fresh_settings(model: ModelSpec) -> Settings:
    """List the settings that a run sets itself when it starts from existing weights."""
    names, classes = family_by(model).dropouts, classes_of(model)
    labels: Settings = {} if classes is None else {"num_labels": classes}
    std: Settings = {} if model.init_std is None else {"initializer_range": model.init_std}
    return {**dict.fromkeys(names, model.dropout), **labels, **std}


def classes_of(model: ModelSpec) -> int | None:
    """Count the outputs of a classifier; None for a language model."""
    return model.vocab if model.reads_images else model.classes


# -- Compare a model with what a class computes, or with a `config.json` -------------------------


def differences(model: ModelSpec) -> Iterator[tuple[str, object, object]]:
    """Yield (field, value of the spec, value of the class) where they differ.

    The class is built from `settings_of`: what no setting can express shows as a difference. A
    counted model is what its class is.
    """
    family = family_by(model)
    if family.name == OTHER:
        return
    try:
        _, theirs = _read(settings_of(model), family, model)
    except ValidationError as error:
        yield "family", model.family, str(error.errors()[0]["msg"])
        return
    yield from compare(model, theirs)


def compare(model: ModelSpec, theirs: ModelSpec) -> Iterator[tuple[str, object, object]]:
    """Yield (field, ours, theirs) for each field of two models that differs, part by part."""
    ours, other = fields_of(model), fields_of(theirs)
    for part in _PARTS:
        if (part in ours) != (part in other):
            yield part, ours.pop(part, None), other.pop(part, None)
    for path in sorted({*_paths(ours), *_paths(other)}):
        if path.partition(".")[0] in _OF_A_RUN or (path == "vocab" and model.reads_images):
            continue
        if path == "image" and model.family == "resnet":
            continue  # it takes any
        a, b = value_at(ours, path), value_at(other, path)
        if path == "pattern":
            both = range(min(model.layers, theirs.layers))  # their number is a field of its own
            a, b = ([one.mixer(n) for n in both] for one in (model, theirs))
        same = a == b
        if isinstance(a, float) and isinstance(b, int | float):
            same = abs(a - b) <= 1e-6 * abs(b)  # JSON of fp32 numbers is rounded
        if not same and not (_plain(a) and _plain(b)):
            yield path, a, b


def _plain(value: object) -> bool:
    """Tell whether a value of a part says the same as its absence."""
    return value is None or value is False or value == () or (value == 1 and value is not True)


def _paths(fields: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{above}{name}.")
        else:
            yield above + name


def disagreements(model: ModelSpec, config: Config) -> list[str]:
    """Write one message per field in which spec and `config.json` differ; empty if none does.

    Classes of a classifier may differ, because its last layer is initialized again. So may dropout
    and the losses of a router, which a run chooses. A sequence may be shorter than the learned
    positions.
    """
    if model.counted is not None:
        same = config == model.config
        return [] if same else ["config.json is not the one that was counted"]
    family = family_of(config)
    if family is None:
        return [unknown_type(config)[0]]
    if family.name != model.family:
        return [f"family is {model.family} in the spec, the directory has a {family.name}"]
    reading = read_config(config, family)
    found = [f"{name} {why}" for name, why in reading.refused]
    try:
        fields, theirs = _read(config, family, model)
    except ValidationError as error:
        return [*found, *unusable(error, reading)]
    found += [
        f"{path} is {ours} in the spec and {other} in config.json"
        for path, ours, other in compare(model, theirs)
        if path not in _BESIDE
    ]
    limit = fields["max_seq"] if reading.fields.get("max_seq") is not None else None
    if isinstance(limit, int) and model.seq > limit and not model.reads_images:
        found.append(f"seq is {model.seq} in the spec, config.json has {limit} positions")
    return found


def unusable(error: ValidationError, reading: Reading) -> list[str]:
    """Say which values of a `config.json` make no model, by their names there."""
    parsed = Parsed(data=reading.fields)
    parsed.names = {tuple(path.split(".")): name for path, name in reading.names.items()}
    return [problem.message for problem in explain(error, ModelSpec, parsed)]


def unknown_note(model: ModelSpec) -> str | None:
    """Name what a model's `config.json` has that hpctrain does not know; None if nothing."""
    if model.counted is not None:
        return (
            f"hpctrain knows this {model.called} by a count alone: its time and the memory "
            "of its activations are an estimate of a dense model of that size"
        )
    if model.config is None:
        return None
    names = [name for name, _ in read_config(model.config, family_by(model)).unknown]
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (
        f"hpctrain does not know {', '.join(map(shorten, names[:_MOST_NAMES]))}{more} of the "
        "model's config.json: the class of transformers keeps them, and the plan does not count "
        "them"
    )
