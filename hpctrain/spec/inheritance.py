"""Merge a profile with the one that it extends, and the parts of a partition with its cluster's.

Both happen to parsed text, before validation, so that every value keeps the place where a person
wrote it. Belongs here: the rules of merging. Does not belong here: finding and reading files (see
`loader`), any check of a value.
"""

from __future__ import annotations

from typing import Any

from hpctrain.spec.positions import Parsed, Path

# Parts of a partition that take what they leave out from the section of that name.
PARTITION_SECTIONS = ("nodes", "gpu", "nvlink", "network")
# What belongs to one type of GPU: another type does not inherit it.
_OF_ONE_GPU = frozenset({"memory", "peak", "memory_bandwidth", "model"})


def merge(child: Parsed, base: Parsed) -> Parsed:
    """Return `base` with the values of `child` in place of its own.

    Mappings are merged key by key, and lists of things with a `name` thing by thing; any other
    value of the child replaces the one of the base. `null` removes it, and `remove: true` beside
    nothing but the name such a thing. Problems are those of both.
    """
    merged = Parsed(problems=[*child.problems, *base.problems])
    _Merger(merged, child, base).merge((), (), ())
    return merged


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
