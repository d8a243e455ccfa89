"""Merge a profile with the one that it extends, and the parts of a partition with its cluster's.

Both happen to parsed text, before validation, so that every value keeps the place where a person
wrote it. Belongs here: the rules of merging. Does not belong here: finding and reading files (see
`loader`), any check of a value.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

from hpctrain.spec.positions import Parsed, Path, SourcePlace, parse_yaml, shorten

# Parts of a partition that take what they leave out from the section of that name.
PARTITION_SECTIONS = ("nodes", "gpu", "nvlink", "network")
# What an adapter says of itself, which no run has.
_OF_AN_ADAPTER = frozenset({"title", "commands", "checked", "sources"})
# What belongs to one type of GPU: another type does not inherit it.
_OF_ONE_GPU = frozenset({"memory", "peak", "memory_bandwidth", "model", "gres"})


def merge(child: Parsed, base: Parsed) -> Parsed:
    """Return `base` with the values of `child` in place of its own.

    Mappings are merged key by key, and lists of things with a `name` thing by thing; any other
    value of the child replaces the one of the base. `null` removes it, and `remove: true` beside
    nothing but the name such a thing. Problems are those of both.
    """
    merged = Parsed(problems=[*child.problems, *base.problems])
    _Merger(merged, child, base).merge((), (), ())
    return merged


def merged(layers: Sequence[Parsed]) -> Parsed:
    """Merge a profile with those that it extends, each with the next one."""
    result = layers[-1]
    for child in reversed(layers[:-1]):
        result = merge(child, result)
    return result


def fill_in_adapter(parsed: Parsed, name: str, adapter: Parsed) -> None:
    """Put what an adapter knows under the `trainer` of a spec, and its name there as `framework`.

    Values of the spec win; what the adapter says of itself stays out.
    """
    known = adapter.data if isinstance(adapter.data, dict) else {}
    own = {key: value for key, value in known.items() if key not in _OF_AN_ADAPTER}
    base = replace(
        adapter,
        data={"trainer": own},
        keys={("trainer", *path): place for path, place in adapter.keys.items()},
        values={("trainer", *path): place for path, place in adapter.values.items()},
        broken={("trainer", *path) for path in adapter.broken},
    )
    both = merge(parsed, base)
    at = ("trainer", "adapter")
    del both.data["trainer"]["adapter"]
    both.data["trainer"]["framework"] = name
    place = both.values.pop(at)
    both.values["trainer", "framework"] = both.keys["trainer", "framework"] = place
    both.keys.pop(at, None)
    vars(parsed).update(vars(both))


def single_values(parsed: Parsed) -> list[Path]:
    """List the paths of all values but sections, and but the `name` of a thing, which joins lists.

    A list of things without names is one value.
    """

    def below(value: Any, path: Path) -> Iterator[Path]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from below(inner, (*path, key))
        elif _is_named(value):
            for index, item in enumerate(value):
                named = {key: inner for key, inner in item.items() if key != "name"}
                yield from below(named, (*path, index))
        else:
            yield path

    return list(below(parsed.data, ()))


def removable(parsed: Parsed) -> list[Path]:
    """List what a person may take out of a document: values, then inner and outer sections."""
    values = single_values(parsed)
    sections = {path[:end] for path in values for end in range(1, len(path))}
    inner_first = sorted(sections, key=len, reverse=True)
    return [*values, *(path for path in inner_first if isinstance(path[-1], str))]


def without(parsed: Parsed, path: Path) -> Parsed:
    """Return the document without the value at a path."""
    data = copy.deepcopy(parsed.data)
    del _value(data, path[:-1])[path[-1]]
    return replace(parsed, data=data)


def complete_partitions(parsed: Parsed) -> None:
    """Put what the parts of partitions leave out into them, from the sections of the cluster.

    A partition with another type of GPU inherits no figures of the first one, and none inherits
    `network.islands`, which are all nodes of the cluster.
    """
    data = parsed.data if isinstance(parsed.data, dict) else {}
    slurm = data.get("slurm")
    partitions = slurm.get("partitions") if isinstance(slurm, dict) else None
    for index, partition in enumerate(partitions if isinstance(partitions, list) else []):
        for section in PARTITION_SECTIONS:
            own = partition.get(section) if isinstance(partition, dict) else None
            given = data.get(section)
            if not isinstance(own, dict) or not isinstance(given, dict):
                continue
            skipped = frozenset({"islands"}) if section == "network" else frozenset()
            if section == "gpu" and own.get("type", given.get("type")) != given.get("type"):
                skipped = _OF_ONE_GPU
            place = ("slurm", "partitions", index, section)
            merged = Parsed()
            merger = _Merger(merged, parsed, parsed, skipped=skipped)
            merger.merge(place, place, (section,))
            parsed.keys |= merged.keys
            parsed.values |= merged.values
            parsed.broken |= {path for path in merged.broken if path[: len(place)] == place}
            partition[section] = merged.data


class _Merger:
    """Copies values and their places from two parsed documents into a third one."""

    def __init__(
        self, out: Parsed, child: Parsed, base: Parsed, *, skipped: frozenset[str] = frozenset()
    ) -> None:
        self.out, self.child, self.base, self.skipped = out, child, base, skipped

    def merge(self, at: Path, child_at: Path, base_at: Path) -> None:
        """Merge the values at two paths into the document's, and make it the result."""
        child, base = _value(self.child.data, child_at), _value(self.base.data, base_at)
        if isinstance(base, dict):
            base = {key: value for key, value in base.items() if key not in self.skipped}
        self.out.data = self._merged(child, base, at, child_at, base_at)

    def _merged(self, child: Any, base: Any, at: Path, child_at: Path, base_at: Path) -> Any:
        if isinstance(child, dict) and isinstance(base, dict):
            self._note(self.child, child_at, at)
            result: dict[str, Any] = {}
            for key in dict.fromkeys((*base, *child)):
                below = ((*at, key), (*child_at, key), (*base_at, key))
                if key not in child:
                    result[key] = self._copy(base[key], self.base, below[2], below[0])
                elif key not in base:
                    result[key] = self._copy(child[key], self.child, below[1], below[0])
                elif child[key] is not None or below[1] in self.child.broken:
                    result[key] = self._merged(child[key], base[key], *below)
            return result
        if _is_named(child) and _is_named(base):
            self._note(self.child, child_at, at)
            return self._merged_items(child, base, at, child_at, base_at)
        return self._copy(child, self.child, child_at, at)

    def _merged_items(
        self, child: list[Any], base: list[Any], at: Path, child_at: Path, base_at: Path
    ) -> list[Any]:
        own = {item["name"]: index for index, item in enumerate(child)}
        result: list[Any] = []
        for index, item in enumerate(base):
            place, base_place = (*at, len(result)), (*base_at, index)
            if item["name"] in own:
                child_place = (*child_at, own.pop(item["name"]))
                mine = _value(self.child.data, child_place)
                if mine == {"name": item["name"], "remove": True}:
                    continue
                result.append(self._merged(mine, item, place, child_place, base_place))
            else:
                result.append(self._copy(item, self.base, base_place, place))
        for index in sorted(own.values()):
            place = (*at, len(result))
            result.append(self._copy(child[index], self.child, (*child_at, index), place))
        return result

    def _copy(self, value: Any, source: Parsed, source_at: Path, at: Path) -> Any:
        self._note(source, source_at, at)
        if isinstance(value, dict):
            return {
                key: self._copy(below, source, (*source_at, key), (*at, key))
                for key, below in value.items()
            }
        if isinstance(value, list):
            return [
                self._copy(below, source, (*source_at, index), (*at, index))
                for index, below in enumerate(value)
            ]
        return value

    def _note(self, source: Parsed, source_at: Path, at: Path) -> None:
        if source_at in source.keys:
            self.out.keys[at] = source.keys[source_at]
        if source_at in source.values:
            self.out.values[at] = source.values[source_at]
        if source_at in source.broken:
            self.out.broken.add(at)


def _value(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


def _is_named(value: Any) -> bool:
    """Tell whether it is a list of mappings whose names are texts that differ."""
    if not isinstance(value, list) or not value:
        return False
    names = [item.get("name") if isinstance(item, dict) else None for item in value]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


# -- Apply `--set parallel.tp=8` to a parsed document, before it is validated -------------------


OPTION = "--set"
_PATH = re.compile(r"[^\s.\[\]=]+(?:\[\d{1,4}\])*(?:\.[^\s.\[\]=]+(?:\[\d{1,4}\])*)*")
_PART = re.compile(r"[^.\[\]]+|\[\d+\]")


class OptionText(str):
    """One `PATH=VALUE` of another option than `--set`, which messages have to name."""

    option: str

    def __new__(cls, text: str, option: str) -> Self:
        """Take the text and the name of its option."""
        self = super().__new__(cls, text)
        self.option = option
        return self


def apply_overrides(parsed: Parsed, overrides: Sequence[str]) -> None:
    """Put each `PATH=VALUE` into the document; errors are appended to `parsed.problems`."""
    for text in overrides:
        place = option_place(text)
        name, equals, value_text = text.partition("=")
        if not equals or not _PATH.fullmatch(name):
            hint = f"for example {_option(text)} parallel.tp=8"
            parsed.problems.append(place.problem("expected PATH=VALUE", hint))
            continue
        read = parse_yaml(value_text, place.file) if value_text.strip() else Parsed()
        if read.problems:
            problem = read.problems[0]
            parsed.problems.append(place.problem(problem.message, problem.hint))
        elif isinstance(read.data, dict) and read.data:  # `{}` resets a section to its defaults
            hint = "set each key on its own, and quote text that contains `: `"
            parsed.problems.append(place.problem("expected one value, got a mapping", hint))
        else:
            parts = _PART.findall(name)
            path = tuple(int(part[1:-1]) if part.startswith("[") else part for part in parts)
            _set_value(parsed, path, read.data, place)


def option_place(text: str) -> SourcePlace:
    """Return where an override stands: on the command line, without what may be secret."""
    return SourcePlace(f"{_option(text)} {shorten(_without_secrets(text))}")


def _option(text: str) -> str:
    return text.option if isinstance(text, OptionText) else OPTION


def _set_value(parsed: Parsed, path: Path, value: Any, place: SourcePlace) -> None:
    """Set the value at `path`, and drop positions and pending problems of what it replaces."""
    if not isinstance(parsed.data, dict):
        return  # the file itself is no mapping, which is reported anyway
    here: Any = parsed.data
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        where = path[: depth + 1]
        if isinstance(here, list) and not (isinstance(part, int) and part < len(here)):
            message = f"`{part}` is no item of a list of {len(here)}"
            parsed.problems.append(place.problem(message, "items are counted from [0]"))
            return
        known = here.get(part) if isinstance(here, dict) else here[part]
        if last or not isinstance(known, dict | list):
            # also turns `parallel: auto` into a mapping when one of its keys is set
            for places in (parsed.keys, parsed.values):
                for below in [below for below in places if below[: depth + 1] == where]:
                    del places[below]
            parsed.broken = {path for path in parsed.broken if path[: depth + 1] != where}
            here[part] = value if last else {}
            parsed.keys[where] = parsed.values[where] = place
        here = here[part]


def _without_secrets(text: str) -> str:
    """Hide the values of variables, which may be secrets (see `job_text`), in messages."""
    path, equals, _ = text.partition("=")
    return f"{path}=..." if equals and path.strip().startswith("environment") else text
