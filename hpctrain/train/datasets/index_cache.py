"""Index files of datasets that are written whole or not at all.

megatron-core keeps its indexes in the cache by `numpy.save`, which writes in place, and takes a
file that exists for a complete one (gpt_dataset.py, blended_dataset.py). A launch that is ended
while it writes them would leave a file that no later launch can read. Belongs here: that
replacement. Does not belong here: what is in an index.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def complete_files() -> Iterator[None]:
    """Inside the block `numpy.save` to a path replaces the file once it is complete."""
    save = np.save

    @functools.wraps(save)
    def save_completely(file: Any, *given: Any, **keywords: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, *given, **keywords)
            return
        path = Path(f"{os.fspath(file).removesuffix('.npy')}.npy")  # as numpy.save names it
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.npy")
        try:
            save(unfinished, *given, **keywords)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    np.save = save_completely
    try:
        yield
    finally:
        np.save = save
