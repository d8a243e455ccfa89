"""Formats a plan as sentences and columns, wrapped at a width that the caller knows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import floor, log10
from typing import TYPE_CHECKING

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.job.render.continuation import continuation_line, continuation_problems
from hpctrain.page.text import LINE_WIDTH, paragraph
from hpctrain.plan.documents import Certainty, Plan, Prediction, Stage
from hpctrain.plan.forecast.options import days, days_range, money_range
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.plan.mesh.candidate import recompute_words

if TYPE_CHECKING:
    from hpctrain.job.advice import Advice
    from hpctrain.job.plan import Option
    from hpctrain.plan.job import TrainingJob

_COLUMNS = {  # of the stages: header -> its parts of `MemoryBreakdown`
    "WEIGHT": ("weights",),
    "GRAD": ("gradients",),
    "OPTIM": ("optimizer",),
    "ACTIV": ("activations",),
    "BUFFER": ("logits", "buffers"),
    "RESERV": ("reserved",),
}
_SURE, _LIKELY = 0.9, 0.5  # probabilities of fitting, and the words for them
_INDENT = 10
_TIE = "\N{NO-BREAK SPACE}"  # textwrap breaks at ASCII white space only
_TIED = re.compile(r"(?<=\d) (?=(?:%|d|h|min|s|ms|[KMGT]iB|B|GPUs?|x|nodes?)\b|%)|(?<=·) ")
_AXIS = re.compile(r"\b(tp|pp|vpp|cp|ep|dp|micro|recompute|stage|zero|order) (?=\S)")


def plan_lines(plan: Plan, width: int = LINE_WIDTH) -> list[str]:
    """Format the summary that `plan` and `submit` show."""
    batch, learned = plan.batch, plan.learned_parameters
    learning = "" if learned is None else f", {short_count(learned)} of them learn"
    spans = ", ".join(f"{p.axis} {p.span}" for p in plan.placements if p.size > 1) or "one GPU"
    order = plan.layout.order
    spans = spans if order == DEFAULT_ORDER else f"{spans}; order {order}"
    peak = plan.memory[plan.peak_stage]
    sizes = {name.removesuffix("_bytes"): size for name, size in peak.model_dump().items()}
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {short_bytes(size)}" for name, size in ordered if size)
    return [
        *entry(
            "Plan",
            f"{plan.run_name} -> {plan.profile_name} ({plan.nodes}), engine {plan.engine}, "
            f"{short_count(plan.parameters)} parameters{learning}",
            width,
        ),
        *entry("Layout", f"{plan.layout} ({spans})", width),
        *entry(
            "Batch",
            f"{batch.global_batch:,} = micro {batch.micro_batch} x accumulation "
            f"{batch.accumulation} x dp {plan.layout.dp}, {per_step(plan):,} {plan.unit} a step",
            width,
        ),
        *entry(
            "Memory",
            f"{short_bytes(peak.total_bytes)}{_memory_range(plan)} of "
            f"{short_bytes(plan.gpu_memory_bytes)} a GPU in stage {plan.peak_stage} ({parts})",
            width,
        ),
        *(_step_lines(plan, plan.prediction, width) if plan.prediction else []),
        *entry("Run", _run(plan), width),
    ]


def answer_lines(
    option: Option,
    advice: Sequence[Advice] | None,
    ready: str | None = None,
    width: int = LINE_WIDTH,
) -> list[str]:
    """Answer first what everybody asks: does it fit, how long, how dear, is it the best?

    `advice` is None where nothing else was looked at, `ready` where it was not asked whether the
    run could be submitted.
    """
    plan, forecast = option.plan, option.forecast
    assert plan is not None
    peak = plan.memory[plan.peak_stage].total_bytes
    free = 1 - peak / plan.gpu_memory_bytes
    lines = entry("Fits", f"{_fits(plan)}{percent(free)} free", width)
    last = [*(entry("Ready", ready, width) if ready else []), ""]
    if forecast is None:
        unknown = option.remark or "unknown: the profile does not have the speed of its GPUs"
        return [*lines, *entry("Takes", unknown, width), *last]
    training = days(forecast.times.training_seconds)
    mean = days(forecast.times.total_seconds)
    took = days_range(forecast)
    average = "" if took == mean else f", {mean} on average"
    lines += entry("Takes", f"{took}{average}; {training} of it training", width)
    hours = f"{forecast.gpu_hours:,.0f} GPU-hours"
    money = money_range(forecast)
    lines += entry("Costs", hours if money is None else f"{money}; {hours} on average", width)
    for number, one in enumerate(advice or ()):
        how = f": `{one.command}`" if one.command else ""
        lines += entry("" if number else "Better", f"{one.sentence}{how}", width)
    if advice is not None and not advice:
        lines += entry("Better", "nothing found by other layouts or by fewer nodes", width)
    return [*lines, *last]


def continuation_lines(job: TrainingJob, width: int = LINE_WIDTH) -> list[str]:
    """Describe how the run continues after an attempt that ends early, and what prevents it."""
    lines = entry("Continues", continuation_line(job.profile, job.partition), width)
    for problem in continuation_problems(job.profile, job.partition):
        lines.extend(entry("", problem, width))
    return lines


def entry(label: str, text: str, width: int = LINE_WIDTH) -> list[str]:
    """Wrap a labelled paragraph; numbers stay with their unit, names of axes with their size."""
    return wrapped(text, f"{label:<{_INDENT}}", " " * _INDENT, width)


def wrapped(text: str, first: str, later: str, width: int = LINE_WIDTH) -> list[str]:
    """Wrap a text into lines of at most `width` columns that begin with `first` and `later`."""
    tied = _AXIS.sub(rf"\1{_TIE}", _TIED.sub(_TIE, text))
    return [
        line.replace(_TIE, " ") for line in paragraph(tied, first, hang=len(later), width=width)
    ]


def short_count(count: int) -> str:
    """Format with four digits: 174.6B, 940.8K."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.4g}{suffix}"
    return str(count)


def per_step(plan: Plan) -> int:
    """Count the tokens of one step, or its images."""
    batch = plan.batch
    return batch.global_batch if plan.unit == "images" else batch.tokens_per_step


def _step_lines(plan: Plan, prediction: Prediction, width: int) -> list[str]:
    """Format seconds, shares of the peak rate, and the parts of a step, the largest first."""
    seconds = prediction.parts.total_seconds
    rates = f"MFU {percent(prediction.mfu)}, HFU {percent(prediction.hfu)}"
    rate = per_step(plan) / (seconds * plan.layout.world_size)
    speed = f"{rate:,.0f} {plan.unit}/s a GPU"
    parts = sorted(prediction.parts.model_dump().items(), key=lambda part: -part[1])
    shares = [
        f"{name.removesuffix('_seconds').replace('_', ' ')} {percent(part / seconds)}"
        for name, part in parts
        if part >= 0.001 * seconds
    ]
    return [
        *entry(
            "Step", f"{seconds_text(seconds)} a step{_step_range(plan)}, {rates}, {speed}", width
        ),
        *entry("", ", ".join(shares), width),
        *(_site_lines(plan.certainty, width) if plan.certainty else []),
    ]


def _site_lines(certainty: Certainty, width: int) -> list[str]:
    """Say which figures are the site's own: a plan never uses them silently."""
    rates = ", ".join(certainty.measured)
    measured = f"on this cluster, in place of packaged rates: {rates}"
    return [
        *(entry("Measured", measured, width) if rates else []),
        *(entry("Learned", f"from {certainty.calibrated}", width) if certainty.calibrated else []),
    ]


def _fits(plan: Plan) -> str:
    """Format `yes, with 98%: 61.2 GiB of 79.2 GiB a GPU, `; `likely` below 90 %."""
    sure = plan.certainty
    peak = plan.memory[plan.peak_stage].total_bytes
    level = f"{short_bytes(peak)} of {short_bytes(plan.gpu_memory_bytes)} a GPU"
    if sure is None:
        return f"yes: {level} at most, "
    odds = sure.fit_probability
    word = "yes" if odds >= _SURE else "likely" if odds >= _LIKELY else "unlikely"
    return f"{word} ({_odds(odds)}): {level}{_memory_range(plan)}, "


def _odds(probability: float) -> str:
    """Format a probability without a claim of being sure: `97%`, `above 99%`."""
    return "above 99%" if probability > 0.99 else f"{probability:.0%}"


def _step_range(plan: Plan) -> str:
    """Format ` (80%: 31.2-37.5)`, in the digits of the prediction."""
    sure = plan.certainty
    if sure is None or sure.low_step_seconds is None or sure.high_step_seconds is None:
        return " predicted"
    return f" ({step_range(sure.low_step_seconds, sure.high_step_seconds)})"


def step_range(low: float, high: float) -> str:
    """Format `80%: 31.2-37.5`, `80%: 0.512-0.604`."""
    if high >= 1000:
        return f"80%: {short_duration(low)}-{short_duration(high)}"
    digits = max(0, 2 - floor(log10(low)))  # three that say something
    return f"80%: {low:.{digits}f}-{high:.{digits}f}"


def _memory_range(plan: Plan) -> str:
    """Format ` (80%: 55.1-63.0)`, in the unit of the prediction."""
    sure = plan.certainty
    if sure is None:
        return ""
    low, high = short_bytes(sure.low_peak_bytes), short_bytes(sure.high_peak_bytes)
    if low.split()[-1] == high.split()[-1]:
        low, high = low.split()[0], high.split()[0]
    return f" (80%: {low}-{high})"


def percent(share: float) -> str:
    """`54.8%`"""
    return f"{share:.1%}"


def seconds_text(seconds: float) -> str:
    """Format with three or four digits, so that layouts differ: `33.98 s`, `0.512 s`."""
    if seconds >= 1000:
        return short_duration(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.3g} s"


def _run(plan: Plan) -> str:
    batch = plan.batch
    whole = batch.train_steps * per_step(plan)
    parts = [f"{batch.train_steps:,} steps = {whole:,} {plan.unit}"]
    if plan.prediction is not None:
        hours = f"{plan.prediction.gpu_hours:,.0f} GPU-hours of training"
        parts.append(f"{short_duration(86400 * plan.prediction.days)}, {hours}")
    modules = plan.recompute_modules or ("core_attn",)
    again = recompute_words(plan.recompute, modules, plan.recompute_layers)
    how = [f"recompute {again}", plan.precision]
    how += [f"ZeRO {plan.zero}"] if plan.zero > 1 else []
    how += [f"shards of {plan.shard_gpus} GPUs"] if plan.shard_gpus else []
    how += [f"offload to {plan.offload}"] if plan.offload != "none" else []
    away = plan.activation_offload_layers
    how += [f"activations of {away} layers on the host"] if away else []
    return f"{', '.join(parts)}; {', '.join(how)}"


def stage_rows(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """Tabulate the stages; memory in GiB, the last column the sum of those before it."""
    headers = ["STAGE", "LAYERS", "PARAMS", *_COLUMNS, "GiB"]
    rows: list[list[str]] = []
    for stage, memory in zip(plan.stages, plan.memory, strict=True):
        sizes = [
            round(sum(getattr(memory, f"{name}_bytes") for name in names) / 2**30, 2)
            for names in _COLUMNS.values()
        ]
        rows.append(
            [str(stage.index), _layers(stage), short_count(stage.parameters_per_gpu)]
            + [f"{size:.2f}" for size in (*sizes, sum(sizes))]
        )
    return headers, rows


def _layers(stage: Stage) -> str:
    """Format `12`, `3x4` for three chunks of four layers, or `3+4+4`, and the model's ends."""
    chunks = stage.chunk_layers
    alike = len(set(chunks)) == 1
    text = "+".join(map(str, chunks))
    if len(chunks) > 1 and alike:
        text = f"{len(chunks)}x{chunks[0]}"
    ends = ("emb" if stage.embedding else "", "loss" if stage.loss else "")
    return " ".join(part for part in (text, *ends) if part)
