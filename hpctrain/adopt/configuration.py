"""Make a spec of another tool's configuration, and say of every name what became of it.

Belongs here: what a row of `hpctrain.spec.other_tools` does with a value, what follows from several
names, and the spec as YAML. Does not belong here: those tables and reading files, scripts with a
trainer of their own (`adoption`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpctrain.adopt.draft import tree_of
from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.site.profile_text import Stated, profile_text
from hpctrain.spec.batch import BatchSizes, batch_sizes
from hpctrain.spec.engines.registry import DEFAULT_ENGINE, ENGINES, abilities_of
from hpctrain.spec.fields import annotation_at, members
from hpctrain.spec.loader import load_presets
from hpctrain.spec.other_tools import (
    Configuration,
    NamedValue,
    NameRow,
    ToolTable,
    recognised,
    table_of,
    tools,
)
from hpctrain.spec.run import RunSpec

Outcome = Literal["spec", "no field", "dropped"]
_NODE_GPUS = 8
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][+-]?\d+)?")
_PARALLEL = ("parallel.tp", "parallel.pp", "parallel.cp")
_UNKNOWN = "hpctrain does not know this name"


@dataclass(frozen=True)
class BroughtName:
    """A name of a configuration and what became of it. `field`: dotted path in the spec."""

    line: int
    name: str
    value: str
    outcome: Outcome
    field: str | None
    reason: str


@dataclass(frozen=True)
class Brought:
    """A configuration as a spec."""

    tool: str
    name: str
    names: tuple[BroughtName, ...]
    text: str

    def count(self, outcome: Outcome) -> int:
        return sum(one.outcome == outcome for one in self.names)


class _NoMeaningError(Exception):
    """Why a value cannot be taken."""


@dataclass
class _Bringing:
    """The state of reading one configuration. `fields`: path -> (value, the name behind it)."""

    configuration: Configuration
    table: ToolTable
    gpus: int | None
    has_weights: Callable[[str], bool | None]
    values: dict[str, NamedValue] = field(default_factory=dict)
    fields: dict[str, tuple[Any, str]] = field(default_factory=dict)
    names: dict[int, BroughtName] = field(default_factory=dict)

    # -- values of other names -------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """Return the value of a name with what it refers to put in; None where there is none."""
        found = self.values.get(name)
        return None if found is None else self.known(found.value, found.name)

    def known(self, value: Any, name: str) -> Any:
        """Put in what `${...}` of Hydra refers to. Raises _NoMeaningError if that is not known."""
        for _ in range(8):
            if not isinstance(value, str) or "$" not in value:
                break
            inner = re.search(r"\$\{([^${}]*)\}", value)
            if inner is None:
                break
            put = self._referred(inner[1], name)
            if put is None:
                break
            value = put if inner[0] == value else value.replace(inner[0], str(put))
        if isinstance(value, str) and ("$" in value or value == "???"):
            raise _NoMeaningError(f"its value is not known here: `{value}`")
        return value

    def _referred(self, text: str, name: str) -> Any:
        operation, colon, rest = text.partition(":")
        if colon:
            parts = [number_of(part.strip()) for part in rest.split(",")]
            numbers = [one for one in parts if one is not None]
            if len(numbers) < len(parts):
                return None
            if operation == "divide_floor":
                return int(numbers[0] // numbers[1]) if len(numbers) == 2 and numbers[1] else None
            if operation == "multiply":
                return math.prod(numbers)
            return sum(numbers) if operation == "sum" else None
        path = text
        if text.startswith("."):
            plain = text.lstrip(".")
            path = ".".join([*name.split(".")[: len(plain) - len(text)], plain])
        for candidate in (path, path.partition(".")[2]):
            if candidate in self.values and candidate != name:
                return self.values[candidate].value
        return None

    def number(self, name: str) -> float | None:
        """Return the number behind a name, or one that follows from several (`@...`)."""
        if name == "@dp":
            return max(1, self.all_gpus // self.model_gpus)
        if name == "@decay_steps":
            steps = [self.fields.get(one) for one in ("schedule.decay_steps", "budget.steps")]
            given = next((one[0] for one in steps if one is not None), None)
            if given is None and (samples := self.number("train-samples")) is not None:
                given = samples / (self.number("global-batch-size") or math.inf)
                given = self.growing.steps_for(round(samples)) if self.growing else given
            return given
        return number_of(self.value(name))

    @property
    def growing(self) -> BatchSizes | None:
        """The batches of the steps; None where all are the same, or one is not known."""
        paths = ("global", "ramp_up.start", "ramp_up.increment", "ramp_up.samples")
        given = [self.fields.get(f"batch.{path}", (None,))[0] for path in paths]
        numbers = [one for one in given if isinstance(one, int) and one > 0]
        if len(numbers) < len(paths):
            return None
        size, start, increment, samples = numbers
        if size <= start or (size - start) % increment:
            return None
        return batch_sizes(size, (start, increment, samples))

    @property
    def model_gpus(self) -> int:
        """GPUs that share one copy of the model."""
        return math.prod(int(self.fields[one][0]) for one in _PARALLEL if one in self.fields)

    @property
    def all_gpus(self) -> int:
        given = self.gpus or (self.fields.get("resources.gpus") or (None,))[0]
        if isinstance(given, int) and given > 0:
            return given
        return math.lcm(self.model_gpus, _NODE_GPUS)

    # -- rows ------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read all names: first how many GPUs there are, then the others in the table's order."""
        for one in self.configuration.values:
            self.values[self.table.key(one.name)] = one
        first = ("resources.gpus", *_PARALLEL)
        rows = self.table.rows.items()
        for name, row in sorted(rows, key=lambda item: item[1].field not in first):
            if name in self.values:
                self._row(name, row)
        for one in self.configuration.values:
            if id(one) not in self.names:
                self._other(one)

    def say(self, one: NamedValue, outcome: Outcome, reason: str, path: str | None = None) -> None:
        value = " ".join(map(str, one.value)) if isinstance(one.value, list) else one.value
        shown = "" if value is True else json.dumps(value) if not isinstance(value, str) else value
        self.names[id(one)] = BroughtName(one.line, one.name, shown, outcome, path, reason)

    def _row(self, name: str, row: NameRow) -> None:
        one = self.values[name]
        if one.value is None or (row.reason is None and one.value in row.same):
            self.say(one, "dropped", "it says nothing" if one.value is None else "as without it")
            return
        if one.value == "auto" and "auto" not in row.values and row.field != "batch.micro":
            self.say(one, "dropped", "whoever reads the file fills it in")
            return
        if row.field is None:
            same = one.value in row.same or one.value is False
            reason = "as without it" if same else row.reason or ""
            self.say(one, "dropped", reason)
            return
        try:
            found = list(self._found(name, row))
        except _NoMeaningError as error:
            self.say(one, "no field", str(error))
            return
        except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError):
            self.say(one, "no field", f"`{one.value}` is not understood")
            return
        if not found:
            self.say(one, "dropped", "as without it")
            return
        for path in row.without:
            self.fields.pop(path, None)
        for path, value in row.also.items():
            self.fields.setdefault(path, (value, one.name))
        for path, value in found:
            self.fields[path] = (value, one.name)
        path, value = found[0]
        if isinstance(value, list | tuple):
            texts = [each["path"] if isinstance(each, dict) else str(each) for each in value]
            more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
            value = ", ".join(texts[:3]) + more
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        self.say(one, "spec", shown, path if not path.startswith("@") else None)

    def _found(self, name: str, row: NameRow) -> Iterator[tuple[str, Any]]:
        """Yield the fields that a name sets, and their values."""
        value, path = self.value(name), row.field or ""
        if row.reader is not None:
            yield from _READERS[row.reader](self, path, value)
            return
        key = str(value).lower() if isinstance(value, bool) else str(value)
        if row.values:
            if key not in row.values:
                if value is False:
                    return
                known = ", ".join(row.values)
                raise _NoMeaningError(f"`{value}` has no counterpart, there are {known}")
            value = row.values[key]
            if value == "@tp":  # with one rank there is no sequence to divide
                value = int((self.fields.get("parallel.tp") or (1,))[0]) > 1
        elif row.times or row.per:
            value = number_of(value)
        elif path and not path.startswith("@"):
            value = _typed(path, value)
        factors = [(one, self.number(one), False) for one in row.times]
        factors += [(one, self.number(one), True) for one in row.per]
        for other, factor, divides in factors:
            if factor is None and (other.startswith("@") or divides):
                raise _NoMeaningError(f"it needs {other.lstrip('@').replace('_', ' ')}")
            if factor is None:
                continue
            from_samples = divides or other == "@decay_steps"
            if self.growing is None or not from_samples or path == "schedule.wsd_decay_steps":
                value = value / factor if divides else value * factor
                continue
            samples = value if divides else value * self.growing.samples_after(round(factor))
            value = self.growing.steps_for(round(samples))
        if factors:
            value = _typed(path, value, rounded=True)
        if row.whole and not (isinstance(value, int | float) and value == int(value) and value > 0):
            return
        yield path, value

    def _other(self, one: NamedValue) -> None:
        """Say what a name without a row is."""
        key = self.table.key(one.name)
        later = self.values.get(key)
        if key in self.table.rows and later is not None and later is not one:
            self.say(one, "dropped", f"line {later.line} has it again, and that counts")
            return
        empty = one.value is None or one.value == [] or one.value == {} or one.value == ""
        dropped = self.table.reason(key, "dropped")
        missing = self.table.reason(key, "no_field")
        if empty or one.value in self.table.same.get(key, ()):
            self.say(one, "dropped", "it says nothing" if empty else "as without it")
        elif one.value is False:
            self.say(one, "dropped", "it is off")
        elif dropped is not None:
            self.say(one, "dropped", dropped)
        else:
            self.say(one, "no field", missing or _UNKNOWN)


def number_of(value: Any) -> float | None:
    """Return the number that a value is, also as text; None for any other."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    text = str(value).strip()
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text.replace("_", ""))
    return int(number) if number.is_integer() and "." not in text and "e" not in text else number


def _typed(path: str, value: Any, *, rounded: bool = False) -> Any:
    """Convert a value to the type of a field. Raises _NoMeaningError if it is of another kind."""
    kinds = members(annotation_at(RunSpec, tuple(path.split("."))))
    number = number_of(value)
    if isinstance(value, bool) or value is None:
        return value
    if int in kinds and number is not None and (rounded or float(number).is_integer()):
        return max(0, round(number))
    if int in kinds and float not in kinds and number is not None:
        raise _NoMeaningError(f"`{value}` is no whole number")
    if float in kinds and number is not None:
        return float(number)
    if path == "budget.tokens" and number is not None:
        return round(number)
    if (int in kinds or float in kinds) and str not in kinds and number is None:
        words = [str(word) for kind in kinds for word in getattr(kind, "__args__", ())]
        if str(value) not in words:
            raise _NoMeaningError(f"`{value}` is no number")
    if bool in kinds and str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if isinstance(value, list):
        raise _NoMeaningError("it has several values")
    return str(value) if str in kinds and not isinstance(value, str) else value


# -- Readers of what one row cannot say -----------------------------------------------------------


Found = Iterator[tuple[str, Any]]


def _blend(_: _Bringing, path: str, value: Any) -> Found:
    """Prefixes, or weights and prefixes by turns."""
    words = [str(one) for one in (value if isinstance(value, list) else [value])]
    if any("$" in word or word == "MOCK" for word in words):
        raise _NoMeaningError(f"its value is not known here: `{' '.join(words[:2])}`")
    sources: list[dict[str, Any]] = []
    weight: float | None = None
    for word in words:
        number = number_of(word)
        if number is not None:
            weight = float(number)
        else:
            sources.append({"path": word, **({} if weight is None else {"weight": weight})})
            weight = None
    if not sources or weight is not None:
        raise _NoMeaningError("a weight without a path")
    yield path, [{"path": sources[0]["path"]}] if len(sources) == 1 else sources


def _of_muon(state: _Bringing, path: str, value: Any) -> Found:
    if (state.fields.get("optimizer.kind") or ("",))[0] != "muon":
        raise _NoMeaningError("without `optimizer: muon` it has no effect")
    yield path, _typed(path, value)


def _numbers(_: _Bringing, path: str, value: Any) -> Found:
    words = value if isinstance(value, list) else re.findall(r"\d+", str(value))
    yield path, tuple(int(one) for one in words)


def _tokenizer(_: _Bringing, path: str, value: Any) -> Found:
    if not str(value).endswith(".json"):
        raise _NoMeaningError("hpctrain reads a tokenizer.json, and tokens that were made with it")
    yield path, str(value)


def _window(_: _Bringing, path: str, value: Any) -> Found:
    """(left, right) of flash attention: tokens to the left, without the token itself."""
    words = value if isinstance(value, list) else re.findall(r"-?\d+", str(value))
    left = int(words[0])
    if left >= 0:
        yield path, left + 1 if len(words) > 1 else left


def _words(_: _Bringing, path: str, value: Any) -> Found:
    yield path, [str(one) for one in (value if isinstance(value, list) else [value])]


def _betas(_: _Bringing, path: str, value: Any) -> Found:
    first, second = value
    yield path, _typed(path, first)
    yield "optimizer.beta2", _typed("optimizer.beta2", second)


def _ramp_up(_: _Bringing, path: str, value: Any) -> Found:
    for name, word in zip(("start", "increment", "samples"), value, strict=True):
        field = path.replace("start", name)
        yield field, _typed(field, word)


def _minutes(_: _Bringing, path: str, value: Any) -> Found:
    yield path, f"{int(value)}min"


def _seconds(_: _Bringing, path: str, value: Any) -> Found:
    yield path, f"{int(value)}s"


def _layer_frequency(state: _Bringing, path: str, value: Any) -> Found:
    """A number, or a list as Python writes it: dense layers first, or every so many."""
    text = "".join(map(str, value)) if isinstance(value, list) else str(value)
    if re.fullmatch(r"\d+", text):
        yield "model.moe.every", int(text)
        return
    if not re.fullmatch(r"[\[\]()01,*+\d ]+", text):
        raise _NoMeaningError(f"`{text}` is no pattern of layers")
    layers: list[int] = []
    for part in re.findall(r"\(?\[([01, ]+)\]\)?(?:\*(\d+))?", text.strip("()")) or []:
        layers += [int(one) for one in part[0].split(",") if one.strip()] * int(part[1] or 1)
    dense = layers.index(1) if 1 in layers else len(layers)
    rest = layers[dense:]
    if all(rest):
        yield path, dense
        return
    every = dense + 1
    if all(bool(one) == ((number + 1) % every == 0) for number, one in enumerate(layers)):
        yield "model.moe.every", every
        return
    raise _NoMeaningError("experts are in the last of every so many layers, or behind dense ones")


_LETTERS = {"M": "mamba", "*": "full", "-": "mlp", "E": "moe"}


def _hybrid_pattern(_: _Bringing, path: str, value: Any) -> Found:
    letters = str(value).partition("/")[0].replace("|", "")
    if not letters or set(letters) - _LETTERS.keys():
        raise _NoMeaningError(f"`{value}` has layers that hpctrain does not know")
    mixers = [_LETTERS[letter] for letter in letters]
    yield path, mixers
    yield "model.layers", len(mixers)
    yield "model.single_blocks", True


def _virtual_stages(state: _Bringing, path: str, value: Any) -> Found:
    layers = state.fields["model.layers"][0]
    pp = (state.fields.get("parallel.pp") or (1,))[0]
    yield path, layers // (pp * int(value))


def _every_layer(_: _Bringing, path: str, value: Any) -> Found:
    every = int(value)
    yield path, [*[False] * (every - 1), True]


def _directory(_: _Bringing, path: str, value: Any) -> Found:
    text = str(value)
    yield path, text if "/" in text and "$" not in text else True


def _run_name(_: _Bringing, path: str, value: Any) -> Found:
    yield path, re.sub(r"[^A-Za-z0-9._-]", "-", str(value)).strip("-.")[:63]


def _targets(_: _Bringing, path: str, value: Any) -> Found:
    names = [one.strip() for one in value.split(",")] if isinstance(value, str) else list(value)
    if any(re.search(r"[^\w.]|^model\.", str(one)) for one in names):
        raise _NoMeaningError("`lora.targets` has names of layers, no patterns")
    yield path, "all" if names in (["all"], ["all-linear"]) else [str(one) for one in names]


def _stage_in_name(_: _Bringing, path: str, value: Any) -> Found:
    """The stage that a file of DeepSpeed is named after."""
    stage = re.search(r"(?:zero_?-?|z)([0-3])", str(value).rpartition("/")[2])
    yield (path, int(stage[1])) if stage is not None else ("@stage", str(value))


def _published(state: _Bringing, path: str, value: Any) -> Found:
    """A directory with a config.json, else a name of the Hub: a preset, or a question."""
    name = str(value)
    has_weights = state.has_weights(name)
    if has_weights is not None:
        yield "model.config", f"{name}/config.json"
        if has_weights:
            yield "model.pretrained", name
        return
    plain = re.sub(r"meta-|-hf$|-v[\d.]+$", "", name.rpartition("/")[2].lower())
    if plain in {one.name for one in load_presets().presets}:
        yield "model.preset", plain
        return
    yield "model.config", Ask(f"the directory of {name} with its config.json and weights")


def _flavor(state: _Bringing, path: str, value: Any) -> Found:
    """The size of torchtitan's model; its sizes are those that were published."""
    name = str(state.value("model.name") or "")
    plain = {"llama3": "llama-3", "llama2": "llama-2"}.get(name, name)
    preset = f"{plain}-{str(value).lower()}"
    if preset in {one.name for one in load_presets().presets}:
        yield "model.preset", preset
        return
    yield "model.config", Ask(f"a config.json of {name} {value}, or its sizes")


def _shards(state: _Bringing, path: str, value: Any) -> Found:
    """-1: as many as there are; 1 without copies of others: none."""
    number = int(value)
    if number > 1:
        copies = number_of(state.value("parallelism.data_parallel_replicate_degree")) or 1
        yield "resources.gpus", int(number * copies * state.model_gpus)
        if copies > 1:
            yield "optimizer.shard_gpus", number


def _decay_type(state: _Bringing, path: str, value: Any) -> Found:
    """The shape of the decay, of a whole run or of its last part."""
    if "schedule.wsd_decay_steps" in state.fields:
        style = {"sqrt": "minus_sqrt"}.get(str(value), str(value))
        yield "schedule.wsd_style", style
    elif value in ("cosine", "linear"):
        yield "schedule.style", value
    else:
        raise _NoMeaningError(f"`{value}` is no shape of a whole decay")


def _decay_from_warmup(state: _Bringing, path: str, value: Any) -> Found:
    """Nanotron counts the decay from the end of the warm-up, hpctrain from the first step."""
    warmup = (state.fields.get("schedule.warmup_steps") or (0,))[0]
    style = (state.fields.get("schedule.style") or ("",))[0]
    yield (
        "schedule.wsd_decay_steps" if style == "wsd" else path,
        int(value) + (0 if style == "wsd" else warmup),
    )


def _decay_start(state: _Bringing, path: str, value: Any) -> Found:
    """A decay that begins after the warm-up has ended: constant until then."""
    warmup = (state.fields.get("schedule.warmup_steps") or (0,))[0]
    if int(value) <= warmup:
        return
    length = state.fields["schedule.decay_steps"][0] - warmup
    shape = (state.fields.get("schedule.style") or ("linear",))[0]
    del state.fields["schedule.decay_steps"]
    yield path, length
    yield "schedule.style", "wsd"
    yield "schedule.wsd_style", "minus_sqrt" if shape == "wsd" else shape


_READERS: Mapping[str, Callable[[_Bringing, str, Any], Found]] = {
    "betas": _betas,
    "blend": _blend,
    "decay_from_warmup": _decay_from_warmup,
    "decay_start": _decay_start,
    "decay_type": _decay_type,
    "directory": _directory,
    "every_layer": _every_layer,
    "flavor": _flavor,
    "hybrid_pattern": _hybrid_pattern,
    "layer_frequency": _layer_frequency,
    "minutes": _minutes,
    "numbers": _numbers,
    "of_muon": _of_muon,
    "published": _published,
    "ramp_up": _ramp_up,
    "run_name": _run_name,
    "seconds": _seconds,
    "stage_in_name": _stage_in_name,
    "shards": _shards,
    "targets": _targets,
    "tokenizer": _tokenizer,
    "virtual_stages": _virtual_stages,
    "window": _window,
    "words": _words,
}


# -- The spec -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A value that the configuration does not have, and the question for it."""

    question: str
    value: Any = "ASK"


_SECTIONS = (
    *("name", "model", "lora", "data", "batch", "budget", "precision", "optimizer", "schedule"),
    *("parallel", "recompute", "recompute_modules", "checkpoint", "evaluation", "engine"),
    *("resources", "logging", "tracking", "seed"),
)
_NEEDED = {
    "model.layers": Ask("the number of layers"),
    "model.hidden": Ask("the hidden size"),
    "model.heads": Ask("the number of attention heads"),
    "model.vocab": Ask("the vocabulary of the tokenizer, before padding"),
    "model.seq": Ask("tokens of a sample"),
    "batch.global": Ask("samples of a step, over all GPUs"),
    "optimizer.lr": Ask("the peak of the learning rate"),
}
# A part without this field has no effect there, or is not one.
_PARTS = {
    "model.moe": "experts",
    "model.mla": "kv_rank",
    "model.mamba": "heads",
    "model.rope.scaling": "kind",
    "lora": "rank",
    "tracking.wandb": "project",
}


def bring(
    text: str,
    file: Path,
    *,
    gpus: int | None = None,
    name: str | None = None,
    has_weights: Callable[[str], bool | None] = lambda _: None,
) -> Brought:
    """Make a spec of a configuration. Raises InvalidInputError for a file of no known tool.

    `has_weights`: of a directory whether weights are beside its config.json; None without one.
    """
    found = recognised(text, str(file))
    table = None if found is None else table_of(found.tool.name)
    if found is None or table is None:
        known = [one.title for one in tools() if table_of(one.name) is not None]
        what, hint = "no configuration that hpctrain knows", f"known: {', '.join(known)}"
        if found is not None:
            what, hint = f"this is {found.tool.title}", found.tool.hint or hint
        raise InvalidInputError([Problem(what, str(file), 1, 1, hint)])
    state = _Bringing(found, table, gpus, has_weights)
    state.read()
    of_file = re.sub(r"[^A-Za-z0-9._-]", "-", file.stem).strip("-._")[:40]
    fields = _completed(state, name or of_file or "brought")
    names = tuple(sorted(state.names.values(), key=lambda one: one.line))
    run = str(fields["name"][0])
    return Brought(found.tool.title, run, names, _spec_text(fields, found, file, names))


Fields = dict[str, tuple[Any, str]]


def _given(fields: Mapping[str, tuple[Any, str]], path: str, other: Any = None) -> Any:
    return fields.get(path, (other, ""))[0]


def _completed(state: _Bringing, name: str) -> Fields:
    """Add what a spec needs and what the tool does by itself; remove what has no effect."""
    title, fields = state.configuration.tool.title, dict(state.fields)
    fields = {path: value for path, value in fields.items() if not path.startswith("@")}
    for path, value in state.table.defaults.items():
        fields.setdefault(path, (value, f"{title}'s default"))
    for part, first in _PARTS.items():
        if f"{part}.{first}" not in fields:
            for path in [path for path in fields if path.startswith(f"{part}.")]:
                del fields[path]

    def given(path: str, other: Any = None) -> Any:
        return _given(fields, path, other)

    fields.setdefault("name", (name, "the name of the file"))
    named = given("model.preset") or given("model.config")
    if named:
        for path in ("model.family", "model.tied", "model.max_seq"):
            if fields.get(path, ("", ""))[1].endswith("default") or path == "model.max_seq":
                fields.pop(path, None)
    else:
        _complete_model(state, fields)
    if "batch.global" not in fields and isinstance(given("batch.micro"), int):
        state.fields = fields
        count = given("batch.micro") * int(state.number("@dp") or 1)
        fields["batch.global"] = (count, "one microbatch on each GPU that has other samples")
    for path, asked in _NEEDED.items():
        if not (path.startswith("model.") and named and path != "model.seq"):
            fields.setdefault(path, (asked, ""))
    if isinstance(given("model.preset"), str) and isinstance(given("model.seq"), Ask):
        del fields["model.seq"]
    if given("model.max_seq") == given("model.seq"):
        fields.pop("model.max_seq", None)
    if not {"budget.steps", "budget.tokens"} & fields.keys():
        fields["budget.steps"] = (Ask("optimizer steps of the run"), "")
    if "data.sources" in fields:
        fields.pop("data.made_up", None)
    else:
        asked = Ask("prefixes of .bin and .idx as `sources` in place of this", value=True)
        fields.setdefault("data.made_up", (asked, ""))
        fields.pop("data.split", None)
    if {"data.documents", "data.mask_document_ends"} & fields.keys():
        fields["data.document_end"] = (Ask("the token that ends a document"), "")
    if "checkpoint.every_steps" not in fields:
        fields["checkpoint.every"] = ("30min", "a proposal")
    if not given("evaluation.every_steps") or given("evaluation.batches", 1) < 1:
        for path in [path for path in fields if path.startswith("evaluation.")]:
            del fields[path]
    if not isinstance(given("logging.every_steps", 1), int) or given("logging.every_steps", 1) < 1:
        del fields["logging.every_steps"]
    _complete_layout(state, fields)
    return fields


def _complete_model(state: _Bringing, fields: Fields) -> None:
    hidden, title = _given(fields, "model.hidden"), state.configuration.tool.title
    gated = _given(fields, "model.activation") == "swiglu"
    if gated and "model.ffn" not in fields and isinstance(hidden, int) and title == "Megatron-LM":
        # arguments.py: int((4 * hidden_size * 2 / 3) / 64) * 64
        size = int((4 * hidden * 2 / 3) / 64) * 64
        fields["model.ffn"] = (size, "Megatron-LM's choice with --swiglu")
    if "model.moe.experts" in fields:
        fields.setdefault("model.moe.top_k", (2, f"{title}'s default"))
        wide = 4 * hidden if isinstance(hidden, int) else Ask("the MLP size of an expert")
        fields.setdefault("model.moe.ffn", (_given(fields, "model.ffn", wide), "a layer's MLP"))
    if "model.mla.kv_rank" in fields:
        fields.pop("model.kv_heads", None)
        fields.pop("model.head_dim", None)


def _complete_layout(state: _Bringing, fields: Fields) -> None:
    """Keep a layout that divides the GPUs, and name an engine that has it."""
    state.fields = fields
    source = "--gpus" if state.gpus else fields.get("resources.gpus", ("", ""))[1]
    gpus = state.all_gpus
    together = state.model_gpus
    if "model.moe.experts" in fields:  # experts are spread over data-parallel ranks
        spread = ("parallel.pp", "parallel.ep", "parallel.etp")
        together = math.lcm(together, math.prod(_given(fields, one, 1) for one in spread))
    if gpus % together:
        gpus, source = math.lcm(gpus, together), ""
    asked = Ask("all GPUs of the run", value=gpus)
    fields["resources.gpus"] = (gpus if source else asked, source)
    alone = {one for one in (*_PARALLEL, "parallel.ep") if _given(fields, one, 1) == 1}
    if "parallel.tp" in alone:
        fields.pop("parallel.sequence_parallel", None)
    if "parallel.pp" in alone:
        fields.pop("parallel.vpp", None)
    if "model.moe.experts" not in fields and not fields.keys() & {"model.preset", "model.config"}:
        fields.pop("parallel.ep", None)
        fields.pop("parallel.etp", None)
    engine = abilities_of(_given(fields, "engine.name", state.table.engine))
    if {*_PARALLEL, "parallel.ep"} - alone - {f"parallel.{one}" for one in engine.trained_axes}:
        engine = abilities_of(DEFAULT_ENGINE)
    if not engine.shards_over_part:
        fields.pop("optimizer.shard_gpus", None)
    if engine.name != DEFAULT_ENGINE:
        title = state.configuration.tool.title
        fields["engine.name"] = (engine.name, f"it does most of what {title} does")
    settings = {one for other in ENGINES.values() for one in other.settings} - {*engine.settings}
    for path in [path for path in fields if path.split(".")[1:2] and path.startswith("engine.")]:
        if path.split(".")[1] in settings:
            del fields[path]


def _spec_text(
    fields: Mapping[str, tuple[Any, str]],
    found: Configuration,
    file: Path,
    names: tuple[BroughtName, ...],
) -> str:
    lines = {one.name: one.line for one in names}
    stated: dict[str, Any] = {}

    def rank(path: str) -> int:
        section = path.partition(".")[0]
        return _SECTIONS.index(section) if section in _SECTIONS else len(_SECTIONS)

    for path in sorted(fields, key=rank):
        value, source = fields[path]
        if source in lines:
            source = f"{source}, line {lines[source]}"
        if isinstance(value, Ask):
            stated[path] = Stated(value.value, value.question, is_ask=True)
        elif path == "data.sources" and not isinstance(value, str):
            stated[path] = [
                {key: Stated(one[key], source if key == "path" else "") for key in one}
                for one in value
            ]
        elif isinstance(value, list | tuple) and not all(isinstance(one, str) for one in value):
            stated[path] = Stated(tuple(value), source)
        else:
            stated[path] = Stated(tuple(value) if isinstance(value, list) else value, source)
    lost = [one for one in names if one.outcome == "no field"]
    head = [
        f"Made of {file.name}, a configuration of {found.tool.title}, by `hpctrain init --from`.",
        "What became of each line: that command again. Fields: `hpctrain explain FIELD`.",
    ]
    if lost:
        text = ", ".join(f"{one.name} (line {one.line})" for one in lost)
        head.append(f"No field has: {text}.")
    return profile_text(tree_of(stated), head)
