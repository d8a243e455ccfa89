"""A plan in words and columns."""

from __future__ import annotations

from hpctrain.plan.documents import MemoryBreakdown, Plan
from hpctrain.units import short_bytes

_COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "communication")


def plan_lines(plan: Plan) -> list[str]:
    """The summary that `plan` and `submit` show."""
    batch, peak = plan.batch, plan.memory[plan.peak_stage]
    return [
        f"Plan      {plan.run_name} -> {plan.profile_name} ({_nodes(plan)} x "
        f"{plan.nodes.gpus_per_node} GPUs)   engine {plan.engine}   "
        f"{_short_count(plan.parameters)} parameters",
        f"Layout    {plan.layout}   ({_spans(plan)})",
        f"Batch     {batch.global_batch:,} = micro {batch.micro_batch} x accumulation "
        f"{batch.accumulation} x dp {plan.layout.dp}   {batch.tokens_per_step:,} tokens per step",
        f"Memory    {short_bytes(peak.total_bytes)} of {short_bytes(plan.gpu_memory_bytes)} a GPU "
        f"in stage {plan.peak_stage}   ({_largest(peak)})",
        f"Budget    {batch.train_steps:,} steps = "
        f"{batch.train_steps * batch.tokens_per_step:,} tokens   recompute {plan.recompute}, "
        f"{plan.precision}",
    ]


def _short_count(count: int) -> str:
    """Four digits: 174.6B, 940.8K."""
    for suffix, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.4g}{suffix}"
    return str(count)


def _nodes(plan: Plan) -> str:
    count = plan.nodes.nodes
    return f"{count} node" if count == 1 else f"{count} nodes"


def _spans(plan: Plan) -> str:
    shown = [p for p in plan.placements if p.size > 1]
    return ", ".join(f"{p.axis} {p.span}" for p in shown) or "one GPU"


def _largest(memory: MemoryBreakdown) -> str:
    sizes = {name: getattr(memory, f"{name}_bytes") for name in _COMPONENTS}
    ordered = sorted(sizes.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {short_bytes(size)}" for name, size in ordered if size)


def stage_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of the table of stages; memory in GiB."""
    headers = ["STAGE", "LAYERS", "PARAMETERS", *(n.upper() for n in _COMPONENTS), "TOTAL GiB"]
    rows = []
    for stage, memory in zip(plan.stages, plan.memory, strict=True):
        layers = "+".join(str(count) for count in stage.chunk_layers)
        extras = ("embedding" if stage.embedding else "", "loss" if stage.loss else "")
        layers = " ".join(part for part in (layers, *extras) if part)
        sizes = [getattr(memory, f"{name}_bytes") / 2**30 for name in _COMPONENTS]
        total = memory.total_bytes / 2**30
        rows.append(
            [str(stage.index), layers, f"{stage.parameters_per_gpu:,}"]
            + [f"{size:.2f}" for size in (*sizes, total)]
        )
    return headers, rows
