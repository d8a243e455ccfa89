"""List the keys of a document class and their types, and find the nearest to a misspelt name.

Belongs here: walking the pydantic classes. Does not belong here: messages (see `explain`) or any
particular field.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from hpctrain.spec.positions import Path, dotted

_MAX_HINTS = 3


def field_types(model: type[BaseModel]) -> dict[str, Any]:
    """Map each key as written in YAML to its annotation."""
    return {field.alias or name: field.annotation for name, field in model.model_fields.items()}


def description(model: type[BaseModel], key: str) -> str | None:
    """Return the description of a key, or the first docstring line of the section it holds."""
    for name, field in model.model_fields.items():
        if (field.alias or name) == key:
            if field.description:
                return field.description
            section = section_of(field.annotation)
            return (section.__doc__ or "").splitlines()[0] if section else None
    return None


def members(annotation: Any) -> tuple[Any, ...]:
    """List the alternatives of a union without None; one element for any other annotation."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for part in get_args(annotation) if part is not type(None))
    return (annotation,)


def is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Find the document class inside an annotation, also inside a union or a tuple."""
    for member in members(annotation):
        if is_model(member):
            return member  # type: ignore[no-any-return]
        if get_origin(member) is tuple and is_model(get_args(member)[0]):
            return get_args(member)[0]  # type: ignore[no-any-return]
    return None


def split_branches(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[Path, str | None]:
    """Split pydantic's `loc` into the path in the document and the failing union member, if any.

    pydantic puts the name of a union member into `loc` ("ParallelSpec", "int"); the document has
    no such level. A class with validators is `function-after[_check(), Name]` there.
    """
    path: list[str | int] = []
    branch: str | None = None
    here: Any = model
    parts = list(loc)
    while parts:
        if parts[0] == "[key]":
            break
        choices = members(here)
        if len(choices) > 1:
            label = str(parts.pop(0))
            branch, here = label, None
            for choice in choices:
                name = getattr(choice, "__name__", "")
                if name and (label == name or label.endswith(f" {name}]")):
                    branch, here = name, choice
                    break
            continue
        path.append(parts.pop(0))
        here = _child(choices[0], path[-1])
    return tuple(path), branch


def annotation_at(model: type[BaseModel], path: Path) -> Any:
    """Find the annotation of the value at `path`; None for a key that does not exist."""
    here: Any = model
    for part in path:
        children = (_child(choice, part) for choice in members(here))
        here = next((child for child in children if child is not None), None)
        if here is None:
            return None
    return here


def parent_model(model: type[BaseModel], path: Path) -> type[BaseModel] | None:
    """Find the document class that has the last key of `path`."""
    here = annotation_at(model, path[:-1])
    return next((member for member in members(here) if is_model(member)), None)


def _child(annotation: Any, part: str | int) -> Any:
    if is_model(annotation):
        return field_types(annotation).get(str(part))
    if get_origin(annotation) is tuple and isinstance(part, int):
        return get_args(annotation)[0]
    if get_origin(annotation) is dict:
        return get_args(annotation)[1]
    return None


def known_paths(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Yield every key of a document as a dotted path; list items as `partitions[].name`."""
    for key, annotation in field_types(model).items():
        path = f"{above}.{key}" if above else key
        yield path
        section = section_of(annotation)
        if section is not None:
            is_list = any(get_origin(member) is tuple for member in members(annotation))
            yield from known_paths(section, path + ("[]" if is_list else ""))


def suggest_key(model: type[BaseModel], path: Path) -> str:
    """Write the hint for an unknown key: look in its section, in other sections, then anywhere."""
    key = str(path[-1])
    section = parent_model(model, path)
    here = list(field_types(section)) if section else []
    above = dotted(path[:-1]) + "." if len(path) > 1 else ""
    elsewhere = {known: known.rsplit(".", 1)[-1] for known in known_paths(model)}
    exact = [known for known, last in elsewhere.items() if last == key]
    near = nearest(key, here)
    if near and difflib.SequenceMatcher(None, key.lower(), near[0].lower()).ratio() >= 0.8:
        return _did_you_mean([above + near[0]])
    if exact:
        return _did_you_mean(exact)
    if near:
        return _did_you_mean([above + name for name in near])
    far = nearest(key, set(elsewhere.values()), cutoff=0.75)
    if far:
        return _did_you_mean([known for known, last in elsewhere.items() if last in far])
    return f"known here: {', '.join(sorted(here))}"


def nearest(word: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """List the most similar names, best first, ignoring case."""
    folded = {name.lower(): name for name in sorted(names)}
    found = difflib.get_close_matches(word.lower(), folded, n=_MAX_HINTS, cutoff=cutoff)
    return [folded[name] for name in found]


def did_you_mean(word: str, names: Iterable[str]) -> str | None:
    """Write `did you mean `x`?`; None when no name is similar."""
    found = nearest(word, names)
    return _did_you_mean(found) if found else None


def literal_values(annotation: Any) -> tuple[str, ...]:
    """List the values of a Literal or of an open set of names; empty for anything else."""
    found: list[str] = []
    for member in members(annotation):
        if get_origin(member) is Literal:
            found += map(str, get_args(member))
        elif hasattr(member, "known_words"):
            found += member.known_words()
    return tuple(found)


def _did_you_mean(names: list[str]) -> str:
    return "did you mean " + " or ".join(f"`{name}`" for name in names[:_MAX_HINTS]) + "?"
