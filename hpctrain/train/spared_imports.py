"""Spare a rank the import of packages that it does not need.

Packages import others only because they are installed, or for what a run does not do. Each costs
every rank processor time at its start, and a shared file system hundreds of look-ups. Belongs here:
how imports are left out. Does not belong here: which ones an engine can do without.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import cast


@contextmanager
def hidden(*names: str) -> Iterator[None]:
    """Have imports of these packages fail inside the block, unless they are imported already."""
    absent = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent, cast(ModuleType, None)))  # an ImportError each
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
