"""Changing a module of somebody else's program right after the program itself has imported it.

Nothing is imported earlier than without us: the order of imports belongs to the program. Belongs
here: when. Does not belong here: what is changed (see `measuring`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

Change = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: it lets a module's own loader work, and then the change."""

    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = self._changes.get(fullname)
        if change is None:
            return None
        spec = self._found_by_others(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec

    def _found_by_others(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> importlib.machinery.ModuleSpec | None:
        """By the finders behind this one, of which another one may change the same module."""
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


@contextmanager
def changed_on_import(changes: Mapping[str, Change]) -> Iterator[None]:
    """Inside the block `changes` are made to modules by name: now, or once they are imported."""
    for name, change in changes.items():
        if name in sys.modules:
            change(sys.modules[name])
    finder = _Finder(changes)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
