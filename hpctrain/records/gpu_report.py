"""The result of the rungs of `make gpu`: one JSON file with everything that was measured.

`hpctrain calibrate` reads it, and it is what a user sends back. Belongs here: the format, and
reading and writing it. Does not belong here: the rungs (`bench/gpu`), rates of one launch (see
`hpctrain.records.speed_checks`, whose records this file contains), what calibration makes of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hpctrain.base.durable import replace_text
from hpctrain.records.run_records import Record, RecordPart
from hpctrain.records.software import SoftwareFacts
from hpctrain.records.speed_checks import SpeedCheck

CheckOutcome = Literal["passed", "failed", "not_run"]


class RungCheck(RecordPart):
    """One check of a rung; `detail` has figures, or the reason why it failed or was not run."""

    name: str
    outcome: CheckOutcome
    detail: str = ""
    seconds: float = 0.0


class RungResult(RecordPart):
    """One rung. `emulated`: a CPU took the GPU's place, so it proves nothing about a GPU."""

    number: int
    name: str
    outcome: CheckOutcome
    time: float
    seconds: float
    reason: str = ""
    emulated: bool = False
    checks: tuple[RungCheck, ...] = ()


class KernelRates(RecordPart):
    """Rates of one GPU beside matrix products.

    `stream_bytes_per_second`: bytes read and written by an elementwise kernel. For fused causal
    attention, forward and backward, `attention_flops_per_second` counts 7 products of s x s x d for
    each head and sample, halved because of the causal mask (arXiv 2205.14135). `gpu` is the name of
    the driver, None for a CPU; `memory_bytes` is the GPU's memory.
    """

    gpu: str | None
    memory_bytes: int
    precision: Literal["bf16", "fp32"]
    stream_bytes_per_second: float | None = None
    attention_flops_per_second: float | None = None


class StepTime(RecordPart):
    """A job that was planned and trained.

    `spec` is the run spec as JSON, with the layout that was trained; with the profile of the report
    it gives the planned time again. `measured_seconds` is the median step after the warm-up,
    `stall_seconds` how long one save held training, `restart_seconds` from a failure to the first
    new step.
    """

    name: str
    spec: str
    gpus: int
    nodes: int
    planned_seconds: float
    measured_seconds: float
    mfu: float | None = None
    stall_seconds: float | None = None
    restart_seconds: float | None = None


class GpuReport(Record):
    """Everything that the rungs have found on one cluster; rungs of several calls add up.

    `kind` tells this file apart from a line of `speed.jsonl`. `software` has the facts of one rank
    for each distinct environment. Names of nodes are keyed hashes unless the user kept them.
    """

    kind: Literal["hpctrain-gpu-report"]
    hpctrain: str
    profile: str | None = None
    names_kept: bool = False
    rungs: tuple[RungResult, ...] = ()
    software: tuple[SoftwareFacts, ...] = ()
    speed: tuple[SpeedCheck, ...] = ()
    kernels: tuple[KernelRates, ...] = ()
    steps: tuple[StepTime, ...] = ()


def write_gpu_report(path: Path, text: str) -> None:
    """Replace the file at once, readable by its owner only until the owner sends it."""
    replace_text(path, text)
