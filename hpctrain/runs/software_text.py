"""Formats the software and the GPUs that a launch has found on its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from hpctrain.records.software import SoftwareFacts, SoftwareRecord

_MOST_NODES = 4


def software_lines(records: Sequence[SoftwareRecord]) -> list[str]:
    """Format the facts of the newest launch, once for all nodes that have the same."""
    if not records:
        return []
    lines = [f"Software of launch {records[0].epoch}"]
    for record in records:
        if len(records) > 1:
            nodes = ", ".join(record.nodes[:_MOST_NODES])
            more = len(record.nodes) - _MOST_NODES
            lines.append(f"  on {nodes}" + (f" and {more} more" if more > 0 else ""))
        lines += [f"  {name:<19}{value}" for name, value in _facts(record.facts)]
    return lines


def _facts(facts: SoftwareFacts) -> Iterator[tuple[str, str]]:
    if facts.hpctrain is not None:
        code = f" ({facts.code}), kept with the run" if facts.code else ", as it is installed"
        yield "hpctrain", f"{facts.hpctrain}{code}"
    yield "python, torch", f"{facts.python}, {facts.torch}"
    if facts.cuda_build is not None:
        driver = f"driver {facts.driver or 'unknown'}"
        if facts.driver_cuda is not None:
            driver += f" (up to CUDA {facts.driver_cuda})"
        yield "CUDA", f"{facts.cuda_build}, {driver}, NCCL {facts.nccl}"
        gpus = [f"{count} x {name}" for name, count in Counter(facts.gpus).items()]
        yield "GPUs of a rank", ", ".join(gpus) or f"none: {facts.gpu_error}"
    if facts.megatron_core is not None:
        yield "megatron-core", facts.megatron_core
    if facts.cuda_build is not None:
        kernels = f", attention: {', '.join(facts.attention)}" if facts.attention else ""
        yield "TransformerEngine", f"{facts.transformer_engine}{kernels}"
        yield "Apex wgrad", str(facts.apex_wgrad)
        yield "triton, compiler", f"{facts.triton}, {facts.compiler or 'no compiler'}"
    yield "open files", f"{facts.open_files:,} at most"
    for remark in facts.remarks:
        yield "warning", remark
