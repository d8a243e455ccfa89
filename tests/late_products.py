"""Slow the matrix products of this process down by a fixed time each, as measured by its clock.

A process that another one stops and continues would be as slow as the machine's timers are exact:
on a quiet machine one product then takes longer than the whole check may. Belongs here: that, for
tests that need a slow rank without a slow machine. Nothing of it is in the package.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

# A product of the check takes a millisecond, and tens of them on a busy machine. Each round of the
# check times one late product, after another one that is not timed.
LATE_SECONDS = 2.0


@contextlib.contextmanager
def late_products() -> Iterator[None]:
    """Every product of matrices of this process begins `LATE_SECONDS` late, within the block."""
    real = torch.matmul

    def late(*given: Any, **keywords: Any) -> Any:
        time.sleep(LATE_SECONDS)
        return real(*given, **keywords)

    torch.matmul = late
    try:
        yield
    finally:
        torch.matmul = real
