"""Read the Python files of a package, of this checkout or of an installed peer."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file; `name` is its dotted module, `path` is relative to the directory of the package."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def nodes(self) -> Iterator[ast.AST]:
        return ast.walk(self.tree)


def read_package(directory: Path) -> list[Source]:
    """Read all Python files below the directory of a package, in the order of their paths."""
    sources = []
    for path in sorted(directory.rglob("*.py")):
        inside = path.relative_to(directory)
        parts = [directory.name, *inside.with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        sources.append(Source(".".join(parts), inside, path.read_text(encoding="utf-8")))
    return sources


def installed(package: str) -> Path | None:
    """Find the directory of an installed package without importing it; None if there is none."""
    found = importlib.util.find_spec(package)
    places = found.submodule_search_locations if found is not None else None
    return Path(places[0]) if places else None


def imports(source: Source, modules: set[str], *, annotations: bool = True) -> set[str]:
    """List the modules of the same package that a file imports anywhere, in functions, too.

    `annotations`: also those that only a type checker imports.
    """
    found: set[str] = set()
    is_package = source.path.name == "__init__.py"
    unread: set[int] = set()
    if not annotations and "TYPE_CHECKING" in source.text:
        checked = filter(_only_for_types, source.nodes())
        unread = {id(node) for one in checked for node in ast.walk(one)}
    for node in source.nodes():
        if id(node) in unread:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = source.name.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, *filter(None, [base])])
            members = {f"{base}.{alias.name}" for alias in node.names} & modules
            names_only = any(f"{base}.{alias.name}" not in modules for alias in node.names)
            found |= members | ({base} & modules if names_only else set())
    return found - {source.name}


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
