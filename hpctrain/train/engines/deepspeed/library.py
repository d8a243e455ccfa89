"""Import deepspeed with the settings that it needs before and right after the import.

Belongs here: settings of the library as a whole. Does not belong here: settings of a run (see
`hpctrain.engines.deepspeed`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from hpctrain.train.device import backend, on_cpu

if on_cpu():
    # accelerator/real_accelerator.py: otherwise it searches for one and prints the result
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import deepspeed.ops

# comm/torch.py, build_shm_op: on a CPU it would build an all-reduce over shared memory with a
# compiler, for two minutes; gloo does it. Set before the first query: a query for any operator
# tries out the compiler on all of them (ops/__init__.py).
deepspeed.ops.__compatible_ops__ = {}
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module=r"deepspeed\b.*")


def join(timeout: timedelta) -> None:
    """Set up DeepSpeed's communication over the existing groups of torch.distributed."""
    deepspeed.init_distributed(backend(), timeout=timeout, verbose=False)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what DeepSpeed prints to standard output, bypassing its logger."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def initialize(**keywords: Any) -> Any:
    """Call `deepspeed.initialize`; returns only the engine of its results."""
    with silence():
        return deepspeed.initialize(**keywords)[0]
