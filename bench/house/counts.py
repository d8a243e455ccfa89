"""Counts over the files of a package: size, one-use functions, docstrings, names.

Each function takes what `read_package` returned and returns what it found, so that a number that
surprises can be looked at. Belongs here: what one walk over each syntax tree tells.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.house.sources import Function, Source

# Rooms in which an engine's name may stand as a string. `spec/engine.py` and the sections of the
# spec lie in spec/engines.
ENGINE_ROOMS = ("spec/engines", "engines", "train/engines")
# Named by the user and printed again; the choices of the spec's field `engine.name`.
ENGINES = frozenset({"megatron", "megatron-lm", "fsdp", "ddp", "deepspeed"})


@dataclass(frozen=True)
class Share:
    """`part` of `whole` functions."""

    part: int
    whole: int

    def __str__(self) -> str:
        share = self.part / self.whole if self.whole else 0.0
        return f"{self.part} of {self.whole} = {share:.1%}"


def is_below(path: Path, rooms: Iterable[str]) -> bool:
    """Tell whether a file lies in one of the given folders of the package."""
    return any(path.is_relative_to(room) for room in rooms)


def engine_literals(sources: Sequence[Source]) -> list[str]:
    """Find string literals that are the name of an engine, outside the rooms of the engines.

    A literal is counted where it equals the name: f-strings and longer texts are not looked into.
    Calibration data are YAML and never looked at.
    """
    return [
        f"{source.path}:{node.lineno} {node.value}"
        for source in sources
        if not is_below(source.path, ENGINE_ROOMS)
        for node in source.nodes()
        if isinstance(node, ast.Constant) and node.value in ENGINES
    ]


def functions(sources: Sequence[Source]) -> list[Function]:
    """List all functions and methods, nested ones included."""
    return [
        node
        for source in sources
        for node in source.nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def one_use_functions(sources: Sequence[Source]) -> list[str]:
    """Find private functions without decorators whose name occurs at most once in their file.

    Private means a leading underscore but not two; an occurrence is a name or an attribute.
    """
    found = []
    for source in sources:
        uses: Counter[str] = Counter()
        for node in source.nodes():
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
        for function in functions([source]):
            name = function.name
            is_private = name.startswith("_") and not name.startswith("__")
            if is_private and uses[name] <= 1 and not function.decorator_list:
                found.append(f"{source.path}:{function.lineno} {name}")
    return found


def one_use_share(sources: Sequence[Source]) -> Share:
    """Count the one-use private functions among all functions."""
    return Share(len(one_use_functions(sources)), len(functions(sources)))


def documented_share(sources: Sequence[Source]) -> Share:
    """Count docstrings of public functions: of a module, or methods of a public class."""
    public: list[Function] = []
    for source in sources:
        bodies = [source.tree.body]
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bodies.append(node.body)
        public += [
            node
            for body in bodies
            for node in body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
        ]
    return Share(sum(ast.get_docstring(node) is not None for node in public), len(public))


def repeated_classes(sources: Sequence[Source]) -> dict[str, list[str]]:
    """Find names that more than one class of the package has, and the files of each."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in source.nodes():
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(source.path))
    return {name: paths for name, paths in sorted(places.items()) if len(paths) > 1}


def line_count(sources: Sequence[Source]) -> int:
    """Count all lines of all files, blank ones and comments included."""
    return sum(len(source.text.splitlines()) for source in sources)
