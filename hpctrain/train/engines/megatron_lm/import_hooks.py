"""Patch a module of an external program right after the program itself has imported it.

Nothing is imported earlier than without the patch: the order of imports belongs to the program.
Belongs here: when a patch is applied. Does not belong here: what it changes (see `step_timing`,
`stop_hooks`).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

Patch = Callable[[ModuleType], None]


class _PatchingFinder(importlib.abc.MetaPathFinder):
    """Adds a patch to the loader that another finder has found for a module."""

    def __init__(self, patches: Mapping[str, Patch]) -> None:
        self._patches = patches

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        # The finders behind this one; another of this class among them may patch the same module.
        finders = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(fullname, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            patch(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]
        return spec


@contextmanager
def patch_on_import(patches: Mapping[str, Patch]) -> Iterator[None]:
    """Apply `patches`, keyed by module name, inside the block: now, or on the module's import."""
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
    finder = _PatchingFinder(patches)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
