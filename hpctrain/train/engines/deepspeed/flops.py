"""Count FLOPs module by module with DeepSpeed's profiler, for selected steps.

DeepSpeed's engine would time every step of such a run and synchronize with the GPU each time
(runtime/config.py: `wall_clock_breakdown` goes with `flops_profiler`). The profiler is therefore
called here directly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.profiling.flops_profiler import FlopsProfiler


@dataclass(frozen=True)
class FlopsCounter:
    """Counts the forward pass of the first microbatch of `steps`.

    `path_of` returns the file for a step; None on all ranks but one.
    """

    module: Any
    steps: tuple[int, ...]
    path_of: Callable[[int], Path] | None

    @contextlib.contextmanager
    def counting(self, step: int, microbatch: int) -> Iterator[None]:
        if self.path_of is None or microbatch > 0 or step not in self.steps:
            yield
            return
        profiler = FlopsProfiler(self.module)
        profiler.start_profile()
        yield
        profiler.stop_profile()
        profiler.print_model_profile(profile_step=step, output_file=str(self.path_of(step)))
        profiler.end_profile()
