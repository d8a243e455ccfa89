"""Make megatron-core write its dataset index files atomically.

megatron-core caches indexes with `numpy.save`, which writes in place, and takes any existing file
for a complete one (gpt_dataset.py, blended_dataset.py). A launch that ends while writing would
leave a file that no later launch can read. Does not belong here: the content of an index.
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
    """Within the block, make `numpy.save` to a path replace the file atomically."""
    save = np.save

    @functools.wraps(save)
    def save_completely(file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike):
            save(file, *args, **kwargs)
            return
        path = Path(f"{os.fspath(file).removesuffix('.npy')}.npy")  # as numpy.save names it
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.npy")
        try:
            save(unfinished, *args, **kwargs)
            os.replace(unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    np.save = save_completely
    try:
        yield
    finally:
        np.save = save
