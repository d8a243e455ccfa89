"""Counts over the files of a package: size, one-use functions, docstrings, names.

Each function takes what `read_package` returned and returns what it found, so that a number that
surprises can be looked at. Belongs here: what one walk over each syntax tree tells.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from bench.house.sources import Function, Source, imports

# Rooms in which an engine's name may stand as a string. `spec/engine.py` and the sections of the
# spec lie in spec/engines.
ENGINE_ROOMS = ("spec/engines", "engines", "train/engines")
# Named by the user and printed again; the choices of the spec's field `engine.name`.
ENGINES = frozenset({"megatron", "megatron-lm", "fsdp", "ddp", "deepspeed"})
_NO_MODULES = ("__init__.py", "__main__.py")


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


def one_use_functions(sources: Sequence[Source], max_lines: int | None = None) -> list[str]:
    """Find private functions without decorators whose name occurs at most once in their file.

    Private means a leading underscore but not two; an occurrence is a name or an attribute. With
    `max_lines` only functions of so few lines that are called where they are named: one that is
    handed on as a value is not counted.
    """
    found = []
    for source in sources:
        uses: Counter[str] = Counter()
        called = set()
        for node in source.nodes():
            if isinstance(node, ast.Name | ast.Attribute):
                uses[_name(node)] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called.add(_name(node.func))
        for function in functions([source]):
            name = function.name
            is_private = name.startswith("_") and not name.startswith("__")
            if not is_private or uses[name] > 1 or function.decorator_list:
                continue
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if max_lines is None or (lines <= max_lines and name in called):
                found.append(f"{source.path}:{function.lineno} {name}")
    return found


def _name(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


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


def mirrored_classes(sources: Sequence[Source]) -> list[str]:
    """Find pairs of classes with at least five annotated fields of the same names.

    One of them may be the other, written again at the border of a room.
    """
    classes = [
        (f"{source.path}:{node.name}", fields)
        for source in sources
        for node in source.nodes()
        if isinstance(node, ast.ClassDef) and len(fields := _fields(node)) >= 5
    ]
    return [
        f"{one} ~ {other}: {len(shared)}"
        for (one, of_one), (other, of_other) in combinations(classes, 2)
        if len(shared := of_one & of_other) >= 5
    ]


def _fields(node: ast.ClassDef) -> set[str]:
    return {
        field.target.id
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def copied_fields(sources: Sequence[Source]) -> list[str]:
    """Find lines that hand a field on under its own name: `steps=plan.steps,`."""
    copying = re.compile(r"\s*(\w+)=[\w.]+\.\1,?")
    return [
        f"{source.path}:{number}"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if copying.fullmatch(line)
    ]


def small_modules_of_one(sources: Sequence[Source]) -> list[str]:
    """Find modules of at most 150 lines that one other module of their room imports, and no more.

    A program (`__main__`), and what stands as text somewhere, such as a command, is not counted.
    """
    modules = {source.name for source in sources}
    importers: dict[str, set[str]] = {}
    for source in sources:
        for name in imports(source, modules):
            importers.setdefault(name, set()).add(source.name)
    return [
        f"{source.path} <- {importer}"
        for source in sources
        if len(source.text.splitlines()) <= 150 and source.path.name not in _NO_MODULES
        for importer in importers.get(source.name, ())
        if len(importers[source.name]) == 1
        and importer.rpartition(".")[0] == source.name.rpartition(".")[0]
    ]


def line_count(sources: Sequence[Source]) -> int:
    """Count all lines of all files, blank ones and comments included."""
    return sum(len(source.text.splitlines()) for source in sources)
