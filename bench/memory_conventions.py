"""What a source's memory figure counts, by the function that it read.

Belongs here: how to tell, from a row's own words or from what its source is known to call, and
what each kind includes. Does not belong here: the bytes of each kind (`predictions`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from bench.published import PublishedRow

# allocated: tensors alone, `torch.cuda.max_memory_allocated()`; reserved: with what the caching
# allocator holds beyond them, `max_memory_reserved()`; driver: with the CUDA context, libraries and
# NCCL's buffers too, what nvidia-smi shows of a process and what has to fit into the GPU
# (docs.pytorch.org/docs/stable/notes/cuda.html, memory management).
Kind = Literal["allocated", "reserved", "driver"]
Ranks = Literal["fullest", "last", "ends"]  # of which stage: any, the last, the first or the last


@dataclass(frozen=True)
class Convention:
    """One way to count; `pattern` is searched without regard to case, the first match counts."""

    pattern: str
    kind: Kind
    why: str
    ranks: Ranks = "fullest"


IN_WORDS = (
    Convention(r"nvidia-smi", "driver", "the row says so"),
    Convention(r"max_memory_allocated|max[ _-]allocated", "allocated", "the row says so"),
    Convention(r"memory_reserved|max[ _-](memory_)?res", "reserved", "the row says so"),
)
BY_SOURCE = (
    Convention(
        r"bloom",
        "driver",
        "bigscience train/tr11-176B-ml/chronicles-prequel.md: nvidia-smi on first and last node",
        "ends",
    ),
    Convention(
        r"megatron-lm ci",
        "allocated",
        "Megatron-LM training.py: mem-max-allocated-bytes is allocated_bytes.all.peak, last rank",
        "last",
    ),
    Convention(
        r"simumax",
        "allocated",
        "SimuMax docs/b200: real alloc GiB, report_memory's max allocated, most of all ranks",
    ),
    Convention(
        r"torchtitan",
        "reserved",
        "torchtitan components/metrics.py: memory is reserved_bytes.all.peak",
    ),
    Convention(
        r"dgxc.*memory|nemo.*memory log",
        "reserved",
        "NeMo megatron_gpt_model.py: peak_memory_usage is max_memory_reserved",
    ),
    Convention(
        r"zero.?bubble",
        "allocated",
        "not stated; sail-sg/zero-bubble-pipeline-parallelism zerobubble/runtime.py prints "
        "max_memory_allocated of each rank",
    ),
)
UNKNOWN = Convention(r"", "allocated", "nothing says which; taken as allocated")


def convention_of(row: PublishedRow) -> Convention:
    """How the row's memory is counted: by its own words, else by its source, as are the ranks."""
    known = _first(BY_SOURCE, row.source)
    said = _first(IN_WORDS, row.notes)
    if said is None:
        return known or UNKNOWN
    return replace(said, ranks=known.ranks) if known else said


def _first(table: tuple[Convention, ...], text: str) -> Convention | None:
    return next((c for c in table if re.search(c.pattern, text, re.IGNORECASE)), None)
