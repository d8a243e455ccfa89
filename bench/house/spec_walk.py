"""Count the functions that receive the run spec between the submit command and the script.

A walk over the syntax trees, without types: it starts at all functions of `job/command.py` and
follows every mention of a function or class of the package (calls, callbacks, tables of
functions), by imports, by `self`, and by the annotations of parameters. Whoever is reached and has
a parameter annotated `RunSpec`, alone or in a union, receives the spec. A class with a field
annotated so carries it: its methods, and functions with a parameter of the class, are counted
apart. Mentions through values without annotation (a list of objects) are not followed, so the
figures are lower bounds; they are meant for comparing two states of this package.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench.house.sources import Function, Source

SPEC = "RunSpec"


@dataclass(frozen=True)
class SpecWalk:
    """Functions by `module:qualified name`."""

    receivers: frozenset[str]
    carried_to: frozenset[str]

    @property
    def files(self) -> int:
        return len({name.partition(":")[0] for name in self.receivers})


@dataclass
class _Definition:
    """A function, a class, or a value assigned at the top of a module."""

    name: str
    module: str
    node: ast.AST
    owner: str = ""  # of a method: the class, as `module:Class`


@dataclass
class _Index:
    """All definitions of a package, and what each module means by a name."""

    definitions: dict[str, _Definition] = field(default_factory=dict)
    scopes: dict[str, dict[str, str]] = field(default_factory=dict)


def walk_of_spec(sources: Sequence[Source], start: str = "job.command") -> SpecWalk:
    """Follow the spec from the functions of the module `start`, named without the package."""
    index = _index(sources)
    carriers = _carriers(index)
    package = sources[0].name.partition(".")[0]
    waiting = [name for name in index.definitions if name.startswith(f"{package}.{start}:")]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting.extend(_mentions(index, index.definitions[name]))
    receivers, carried = set(), set()
    for name in seen:
        definition = index.definitions[name]
        if isinstance(definition.node, Function):
            annotated = _annotated_classes(definition.node, index.scopes[definition.module])
            if any(kind.endswith(f":{SPEC}") for kind in annotated):
                receivers.add(name)
            elif definition.owner in carriers or carriers & annotated:
                carried.add(name)
    return SpecWalk(frozenset(receivers), frozenset(carried))


def _index(sources: Sequence[Source]) -> _Index:
    index = _Index()
    for source in sources:
        scope = index.scopes.setdefault(source.name, {})
        # Imports of the top, of functions and below TYPE_CHECKING alike; two functions of one
        # file hardly import two things under one name.
        for node in source.nodes():
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    scope[alias.asname or alias.name] = f"{node.module}:{alias.name}"
        for node in source.tree.body:
            names: list[str] = []
            if isinstance(node, Function | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names = [node.target.id]
            for name in names:
                full = f"{source.name}:{name}"
                scope[name] = full
                index.definitions[full] = _Definition(full, source.name, node)
            if isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, Function):
                        inner = f"{source.name}:{node.name}.{method.name}"
                        index.definitions[inner] = _Definition(
                            inner, source.name, method, f"{source.name}:{node.name}"
                        )
    return index


def _carriers(index: _Index) -> set[str]:
    """Find the classes with a field annotated with the spec."""
    return {
        definition.name
        for definition in index.definitions.values()
        if isinstance(definition.node, ast.ClassDef)
        for node in definition.node.body
        if isinstance(node, ast.AnnAssign) and SPEC in _words(node.annotation)
    }


def _words(annotation: ast.AST) -> set[str]:
    """Collect the names in an annotation, quoted ones included."""
    words: set[str] = set()
    for node in ast.walk(annotation):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= set(node.value.replace("|", " ").replace("[", " ").replace("]", " ").split())
    return words


def _annotated_classes(function: Function, scope: dict[str, str]) -> set[str]:
    """Resolve the classes that the annotations of a function's parameters mention."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    found: set[str] = set()
    for argument in every:
        if argument.annotation is not None:
            found |= {scope[word] for word in _words(argument.annotation) if word in scope}
    return found


def _mentions(index: _Index, definition: _Definition) -> Iterator[str]:
    """List the definitions that the body of one mentions; of a class, its own methods are not."""
    scope = index.scopes[definition.module]
    node = definition.node
    if isinstance(node, ast.ClassDef):
        # Making an object runs these two; its other methods are followed where they are called.
        for method in ("__init__", "__post_init__"):
            if f"{definition.name}.{method}" in index.definitions:
                yield f"{definition.name}.{method}"
        return
    kinds = {"self": {definition.owner}, "cls": {definition.owner}}
    if isinstance(node, Function):
        for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            if argument.annotation is not None:
                kinds[argument.arg] = {
                    scope[word] for word in _words(argument.annotation) if word in scope
                }
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call):
            made = inner.value.func
            if isinstance(made, ast.Name) and made.id in scope:
                for target in inner.targets:
                    if isinstance(target, ast.Name):
                        kinds.setdefault(target.id, {_made_by(index, scope[made.id])})
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
            meant = scope.get(inner.id, "")
            if meant in index.definitions and meant != definition.name:
                yield meant
        elif isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            yield from _attribute(index, scope, kinds, inner.value.id, inner.attr)


def _made_by(index: _Index, name: str) -> str:
    """Name the class of what a call returns: the class itself, or a function's annotation."""
    definition = index.definitions.get(name)
    if definition is not None and isinstance(definition.node, Function):
        scope, returned = index.scopes[definition.module], definition.node.returns
        words = _words(returned) if returned is not None else set()
        found = [scope[word] for word in sorted(words) if word in scope]
        return found[0] if found else ""
    return name


def _attribute(
    index: _Index, scope: dict[str, str], kinds: dict[str, set[str]], name: str, attribute: str
) -> Iterator[str]:
    """Resolve `name.attribute`: a member of an imported module, or a method of a known class."""
    module, _, member = scope.get(name, "").partition(":")
    candidates = {f"{module}.{member}:{attribute}", f"{scope.get(name, '')}.{attribute}"}
    candidates |= {f"{kind}.{attribute}" for kind in kinds.get(name, ()) if kind}
    yield from sorted(candidates & index.definitions.keys())
