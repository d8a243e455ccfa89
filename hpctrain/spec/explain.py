"""Translate validation errors of pydantic into problems with a position, a message and a hint.

Belongs here: one message per kind of error: the expected value, the actual one and a hint. Does
not belong here: rules (they are in `run` and `profile`) or printing. No text of pydantic reaches a
user.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from hpctrain.base.errors import Problem
from hpctrain.base.units import Duration
from hpctrain.spec.document import Contradiction, Contradictions
from hpctrain.spec.fields import (
    annotation_at,
    description,
    did_you_mean,
    field_types,
    is_model,
    literal_values,
    members,
    nearest,
    parent_model,
    section_of,
    split_branches,
    suggest_key,
)
from hpctrain.spec.positions import Parsed, Path, SourcePlace, dotted, shown_value
from hpctrain.spec.slurm_options import available_options, owned_options

_BOOLEAN_WORDS = {"on": "true", "yes": "true", "y": "true", "off": "false", "no": "false",
                  "n": "false"}  # fmt: skip

# pydantic error type -> what was expected
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "a smaller integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "`true` or `false`",
    "bool_parsing": "`true` or `false`",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}

# pydantic error type -> (words, key of the limit in the error's context)
_LIMITS = {
    "greater_than": ("must be above", "gt"),
    "greater_than_equal": ("must be at least", "ge"),
    "less_than": ("must be below", "lt"),
    "less_than_equal": ("must be at most", "le"),
    "multiple_of": ("must be a multiple of", "multiple_of"),
    "too_short": ("needs this many items at least:", "min_length"),
    "too_long": ("may have this many items at most:", "max_length"),
    "string_too_short": ("needs this many characters at least:", "min_length"),
    "string_too_long": ("may have this many characters at most:", "max_length"),
}

_PATTERNS = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$": (
        "expected a name of letters, digits, `.`, `_` and `-`, 63 characters at most, "
        "beginning with a letter or digit"
    ),
    r"^[A-Za-z_][A-Za-z0-9_]*$": "expected the name of a variable such as `NCCL_DEBUG`",
    r"^[A-Za-z_*?][A-Za-z0-9_*?]*$": (
        "expected the name of a variable, or a pattern of names such as `*_proxy`"
    ),
    r"^[a-z][A-Za-z0-9_-]*$": "expected an argument without dashes such as `attention-backend`",
    r"^=?[^\s,=^/]+(,[^\s,=^/]+)*$": (
        "expected the name of an interface, its beginning, `=NAME`, or several such as `ib0,eno1`"
    ),
    r"^[^/\\#?%:\x00-\x1f]+$": r"expected a name without any of `/\#?%:`",
    r"^[A-Za-z0-9][A-Za-z0-9._+-]*$": (
        "expected the type in Slurm's GRES alone, such as `a100_3g.20gb` of `gpu:a100_3g.20gb:2`"
    ),
    r"^[^\x00-\x1f]+$": "expected text of one line",
    r"^\d{1,9}(\.\d{1,9})?(,\d{1,9}(\.\d{1,9})?){2}$": "expected three shares such as `98,2,0`",
}


def explain(error: ValidationError, model: type[BaseModel], parsed: Parsed) -> list[Problem]:
    """List the problems of a document, one per position, without those already reported."""
    problems: dict[tuple[Path, str], Problem] = {}
    for raw in error.errors(include_url=False):
        path, branch = split_branches(model, raw["loc"])
        if _has_enough(dict(raw), path, parsed):
            continue
        if any(path[: len(broken)] == broken for broken in parsed.broken):
            continue
        union = None
        if branch:  # the union is where `loc` first has a part that is no level of the document
            levels = (split_branches(model, raw["loc"][:end]) for end in range(len(raw["loc"]) + 1))
            union = next((level for level, name in levels if name is not None), None)
        several = raw.get("ctx", {}).get("error")
        if isinstance(several, Contradictions):
            for one in several.found:
                problems[(one.path, raw["type"])] = _at(parsed, one.path, str(one), one.hint)
        elif union is None or _takes(branch, union, model, parsed):
            problems[(path, raw["type"])] = _problem(dict(raw), path, model, parsed)
        elif not _takes(None, union, model, parsed):
            value, annotation = _value_at(parsed.data, union), annotation_at(model, union)
            choices = [f"`{choice}`" for choice in literal_values(annotation)]
            for member in members(annotation):
                if is_model(member):
                    choices.insert(0, "a mapping")
                elif member in (bool, int, float, str):
                    kind = "string" if member is str else str(member.__name__)
                    choices.insert(0, _EXPECTED[f"{kind}_type"])
            message = f"expected {' or '.join(choices)}, got {_describe(value)}"
            hint = _value_hint("union", model, union, value)
            problems[(union, "union")] = _at(parsed, union, message, hint)
    return list(problems.values())


def _has_enough(raw: dict[str, Any], path: Path, parsed: Parsed) -> bool:
    """Whether a list counts as too short only because its items have problems of their own."""
    value = _value_at(parsed.data, path)
    return (
        raw["type"] == "too_short"
        and isinstance(value, list)
        and len(value) >= raw["ctx"]["min_length"]
    )


def _known_elsewhere(model: type[BaseModel], path: Path) -> str | None:
    from hpctrain.spec.profile import ClusterProfile

    here = known_elsewhere(path) if model is ClusterProfile else key_of_spec(model, path)
    return known_secret(path) or here


def _takes(branch: str | None, union: Path, model: type[BaseModel], parsed: Parsed) -> bool:
    """Whether the value is a mapping that this branch (None: any branch) accepts."""
    choices = members(annotation_at(model, union))
    names = [choice.__name__ for choice in choices if is_model(choice)]
    is_mapping = isinstance(_value_at(parsed.data, union), dict)
    return is_mapping and bool(names) and (branch is None or branch in names)


def _problem(raw: dict[str, Any], path: Path, model: type[BaseModel], parsed: Parsed) -> Problem:
    kind, context = raw["type"], raw.get("ctx", {})
    value = _value_at(parsed.data, path)
    if kind == "missing":
        section = parent_model(model, path)
        purpose = description(section, str(path[-1])) if section else None
        hint = f"{path[-1]}: {purpose}" if purpose else None
        return _at(parsed, path, "required, but missing", hint)
    if kind == "extra_forbidden":
        known = _known_elsewhere(model, path)
        return _at(parsed, path, "unknown key", known or suggest_key(model, path), key=True)
    if raw["loc"] and raw["loc"][-1] == "[key]":
        message = _PATTERNS.get(context.get("pattern", ""), "not a valid key")
        return _at(parsed, path, message, key=True)
    hints = _value_hint(kind, model, path, value), _known_elsewhere(model, path)
    # in place of a section, what is known of its fields says more than how one is written
    hint = next(filter(None, reversed(hints) if kind == "model_type" else hints), None)
    if kind == "value_error":
        if isinstance(wrong := context["error"], Contradiction):
            return _at(parsed, wrong.path, str(wrong), wrong.hint)
        hint = getattr(wrong, "hint", hint)
        # a contradiction within a section begins with its field, which may be read from elsewhere
        named = (*path, *str(wrong).partition(" ")[0].split("."))
        if named in parsed.names:
            return _at(parsed, named, str(wrong), hint)
        return _at(parsed, path, str(wrong), hint, key=isinstance(value, dict))
    expected = f"expected {_EXPECTED.get(kind, 'another value')}"
    if kind in _LIMITS:
        must, limit = _LIMITS[kind]
        if limit == "min_length" and context[limit] == 1:
            return _at(parsed, path, "must not be empty", hint)
        expected = f"{must} {context[limit]}"
    elif kind == "string_pattern_mismatch":
        expected = _PATTERNS.get(context["pattern"], "not in the expected form")
    elif kind == "literal_error":
        choices = [f"`{choice}`" for choice in literal_values(annotation_at(model, path))]
        expected = f"expected {' or '.join(choices) or 'another word'}"
    elif not path and kind in _EXPECTED:
        expected = "expected a mapping of `key: value` lines"
    return _at(parsed, path, f"{expected}, got {_describe(value)}", hint)


def _value_hint(kind: str, model: type[BaseModel], path: Path, value: object) -> str | None:
    annotation = annotation_at(model, path)
    if value is None and kind in _EXPECTED:
        return "give a value, or remove the key to get the default"
    if kind in ("bool_type", "bool_parsing") and str(value).lower() in _BOOLEAN_WORDS:
        return f"write `{_BOOLEAN_WORDS[str(value).lower()]}`: YAML 1.2 has only true and false"
    if kind in ("string_type", "string_pattern_mismatch") and isinstance(value, int | float):
        return f'put it in quotes: "{shown_value(value)}"'
    if Duration in members(annotation) and isinstance(value, int) and not isinstance(value, bool):
        return (
            f"a bare number is refused because Slurm reads minutes and most others seconds: "
            f"write `{value}s`, `{value}min` or `{value}h`"
        )
    choices = literal_values(annotation)
    if choices and isinstance(value, str):
        return did_you_mean(value, choices)
    if kind in ("tuple_type", "list_type") and isinstance(value, int | float | str):
        words = value.split() if isinstance(value, str) else []
        return f"write `[{', '.join(words) if len(words) > 1 else shown_value(value)}]`"
    section = path and kind in ("model_type", "model_attributes_type")
    if section and (short := _spelt_out(annotation, value)):
        return short
    numeric = kind in ("int_type", "int_parsing", "float_type", "float_parsing", "union")
    bare = value.replace("_", "").replace(",", "") if isinstance(value, str) else ""
    if numeric and bare.replace(".", "", 1).isdecimal():
        return "remove the quotes" if bare == value else f"write `{bare}`"
    return None


def _spelt_out(annotation: Any, value: object) -> str | None:
    """Write a value as the field of a section that may have it: `{step: 60}` for `60`."""
    section = section_of(annotation)
    for name, kind in field_types(section).items() if section else ():
        if type(value) in members(kind) or (
            isinstance(value, str) and value in literal_values(kind)
        ):
            return f"write `{{{name}: {shown_value(value)}}}`"  # type: ignore[arg-type]
    return None


def _value_at(data: Any, path: Path) -> Any:
    for part in path:
        if isinstance(data, dict):
            data = data.get(str(part))
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            return None
    return data


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    return f"`{shown_value(value)}`"  # type: ignore[arg-type]


def _at(
    parsed: Parsed, path: Path, message: str, hint: str | None = None, *, key: bool = False
) -> Problem:
    place = parsed.nearest_place(path, key=key) or SourcePlace("")
    name = parsed.names.get(path) or dotted(path)
    return place.problem(f"`{name}`: {message}" if path else message, hint)


# -- Hints for keys that people write and that stand elsewhere or have another name here --------


_IN_A_FILE = (
    "who knows it can write into your channel, and this file is copied into every run: put it into "
    "a file that only you may read (`chmod 600`), and name that: `{field}_file: PATH`"
)
# Of specs and profiles alike.
_SECRETS = {
    "notify.channels.url": _IN_A_FILE.format(field="url"),
    "notify.channels.token": _IN_A_FILE.format(field="token"),
}
_HINTS = {
    "template": "use `--template-dir` of `hpctrain submit` (docs/templates.md)",
    "slurm.extra_sbatch": "use `slurm.options.sbatch`",
    "slurm.extra_srun": "use `slurm.options.srun`",
    "slurm.partitions[].name": (
        "where the site chooses the partition: a name of yours, and `request: false`"
    ),
    "slurm.partitions[].gpu": "its type is `gpu: {type: NAME}`",
    "slurm.partitions[].nodes": "their number is `nodes: {count: NUMBER}`",
    "slurm.partitions[].gres": (
        "use `gpu.type` or `gpu.gres` of the partition with `slurm.gpu_request: gres-typed`, or "
        "`gpus-per-node-typed`"
    ),
    "software.prologue": "use `software.commands.task`",
    "software.setup": "commands stand in a shell file, whose path this is",
    "software.singularity": "use `software.container` with `launcher: singularity`",
    "software.staging": (
        "the directory is `software.scratch` with `scratch_capacity`; specs ask for copies with "
        "`data: {stage: true}`"
    ),
    "software.uenv": "use `software.container` with `launcher: uenv`",
    "limits.max_running": "use `limits.max_submit` for jobs, or `limits.grp_gpus` for GPUs at once",
}
# What to write in place of a field that a run spec has no more.
_GONE_HINTS = {"optimizer.distributed": "instead of `distributed: false` write `zero: 0`"}
# Names that people give the key of W&B. No document contains one.
_WANDB_KEYS = frozenset({"api_key", "apikey", "key", "key_file", "password", "secret", "token"})
_WANDB_HINT = (
    "no key stands in a spec: `wandb login` on the machine that uploads; for `mode: online` name "
    "WANDB_API_KEY in `environment.inherit`"
)


# Keys of the section `trainer` that people write beside it.
_OF_A_TRAINER = frozenset({"command", "script", "adapter", "done"})


def key_of_spec(model: type[BaseModel], path: Path) -> str | None:
    """Return what to do instead of writing a key into a spec; None if nothing is known of it."""
    from hpctrain.spec.run import RunSpec
    from hpctrain.spec.trainer import TrainerRunSpec

    key = str(path[0]) if len(path) == 1 else ""
    if model is TrainerRunSpec and key in RunSpec.model_fields:
        return f"`trainer` stands in place of `{key}`: give the one or the other"
    if model in (RunSpec, TrainerRunSpec) and key in _OF_A_TRAINER:
        return f"it belongs to a program of your own: `trainer: {{{key}: ...}}`"
    if model is RunSpec and nearest(key, ["trainer"], cutoff=0.8):
        return "did you mean `trainer`?"
    if path[:2] == ("tracking", "wandb") and str(path[-1]).lower() in _WANDB_KEYS:
        return _WANDB_HINT
    gone = _GONE_HINTS.get(".".join(str(part) for part in path))
    known = gone is not None or not path or key in RunSpec.model_fields or model is not RunSpec
    return gone if known else _name_elsewhere(path)


def _name_elsewhere(path: Path) -> str | None:
    """Return which field a name of Megatron-LM or of config.json is here; None for other names."""
    from hpctrain.spec.other_tools import table_of

    name = str(path[-1])
    for tool, key, whose in (
        ("megatron_lm", name.replace("_", "-"), "Megatron-LM's name"),
        ("nanotron", f"model.model_config.{name}", "the name in config.json"),
    ):
        table = table_of(tool)
        row = table.rows.get(key) if table is not None else None
        if row is not None and row.field and row.field.rpartition(".")[2] != name:
            return f"this is {whose} of `{row.field}`; `hpctrain init --from FILE` reads its files"
    return None


def known_secret(path: Path) -> str | None:
    """Return where a secret belongs that stands at `path`; None for any other key."""
    return _SECRETS.get(".".join(part for part in path if isinstance(part, str)))


def known_elsewhere(path: Path) -> str | None:
    """Return where the meaning of a profile's key stands; None if nothing is known of it.

    Any option of sbatch or srun below `slurm` is one of `slurm.options`, or has a field.
    """
    parts = [str(part) for part in path if isinstance(part, str)]
    key = ".".join(parts).replace("slurm.partitions.", "slurm.partitions[].")
    if key in _HINTS or len(parts) != 2 or parts[0] != "slurm":
        return _HINTS.get(key)
    name = parts[1].replace("_", "-")
    for command in ("sbatch", "srun"):
        if name in available_options(command):
            return f"use `slurm.options.{command}`, as `{name}: VALUE`"
    return owned_options("sbatch").get(name)
