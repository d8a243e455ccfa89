"""Formats the history of a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.page.text import facts, paragraph
from hpctrain.records.software import SoftwareFacts, SoftwareRecord
from hpctrain.records.speed_checks import SpeedCheck
from hpctrain.runs.describe import AttemptStory, RunStory
from hpctrain.runs.evaluation_text import evaluation_lines
from hpctrain.runs.notify_text import notice_lines

# Columns before the texts of an attempt.
_TEXT = 12


def story_lines(story: RunStory) -> list[str]:
    """Format attempts in order, each with its launches, then requests and checkpoints."""
    lines = [f"Run        {story.run_id}"]
    if story.state is not None:
        lines.append(f"State      {story.state}")
    if story.reason:
        lines += _wrapped("Reason     ", story.reason)
    lines.append(f"Directory  {story.directory}")
    for number, attempt in enumerate(story.attempts, 1):
        lines += ["", *_attempt_lines(number, attempt)]
    if story.asked:
        lines += ["", "Requests"]
    for asked in story.asked:
        why = f": {asked.reason}" if asked.reason else ""
        who = asked.user or "somebody"
        lines += _wrapped(f"  {_clock(asked.asked_time)}  ", f"{asked.action} by {who}{why}")
        if asked.answer is None or asked.answer_seconds is None:
            lines.append("    not followed yet")
        else:
            lines += _wrapped(f"    {short_duration(asked.answer_seconds)} later  ", asked.answer)
    lines += ["", "Checkpoints"]
    for checkpoint in story.checkpoints:
        size = "-" if checkpoint.total_bytes is None else short_bytes(checkpoint.total_bytes)
        lines.append(f"  step {checkpoint.step:,}   {size}   {checkpoint.problem or 'good'}")
    if not story.checkpoints:
        lines.append("  none")
    if story.notices:
        lines += ["", *notice_lines(story.notices)]
    if story.evaluations:
        lines += ["", "Evaluations", *evaluation_lines(story.evaluations)]
    if story.software:
        lines += ["", *software_lines(story.software)]
    if story.software_changes:
        lines += ["", "Software has changed"]
    for change in story.software_changes:
        lines.append(f"  with launch {change.epoch}")
        lines += [f"    {text}" for text in change.changes]
    if story.speed is not None:
        lines += ["", *speed_lines(story.speed)]
    if story.tracking:
        lines += ["", "Curves", *(f"  {command}" for command in story.tracking)]
    return lines


def _attempt_lines(number: int, attempt: AttemptStory) -> list[str]:
    job = f"job {attempt.job_id}, restart {attempt.restart_count}"
    lines = [f"Attempt {number}  {_clock(attempt.start_time)}   {job}   nodes {attempt.nodes}"]
    lines += facts(("  placed", attempt.placement), margin=_TEXT)
    for line in attempt.placement_details:
        lines += _detail(line)
    for launch in attempt.launches:
        steps = f"from step {launch.resume_step}"
        if launch.last_step is not None:
            steps += f" to {launch.last_step}, newest checkpoint {launch.checkpoint_step or 'none'}"
        seconds = "" if launch.seconds is None else f"   {short_duration(launch.seconds)}"
        lines.append(f"  launch {launch.epoch}  {steps}{seconds}")
        if launch.cause:
            lines += facts(("  ended", f"{launch.cause}: {launch.reason}"), margin=_TEXT)
        for line in launch.evidence:
            lines += _detail(line)
    then = attempt.action and f"{attempt.action}: {attempt.reason}"
    return lines + facts(
        ("  signals", ", ".join(attempt.signals)),
        ("  stopped", attempt.stop_time),
        ("  tracking", attempt.tracking_failure),
        ("  metrics", attempt.metrics_failure),
        ("  then", then),
        margin=_TEXT,
    )


def _detail(text: str) -> list[str]:
    return paragraph(text, f"{'':{_TEXT}}| ", hang=_TEXT + 2)


def _wrapped(first: str, text: str) -> list[str]:
    return paragraph(text, first, hang=len(first))


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


# -- Formats the software and the GPUs that a launch has found on its nodes ---------------------


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


# -- Formats the check of GPUs and links before training, in lines of at most 80 columns --------


_COLUMN = 20


def speed_lines(check: SpeedCheck) -> list[str]:
    """Format the measurements of one launch: medians and extremes, then what is slow."""
    nodes = len(set(check.nodes))
    second = ", in two rounds" if check.rounds > 1 else ""
    lines = [
        f"Speed before launch {check.epoch}: {len(check.nodes)} ranks on {nodes} "
        f"node{'s' * (nodes != 1)}, measured in {check.seconds:.0f} s{second}"
    ]
    named = ((f"  {name}", value) for name, value in _measurements(check))
    return lines + facts(*named, margin=_COLUMN)


def _measurements(check: SpeedCheck) -> Iterator[tuple[str, str]]:
    if check.gpu is not None:
        yield "GPU", check.gpu
    size = "x".join(map(str, check.product_mnk))
    flops = _spread(check.product_flops_per_second, 1e12, "TFLOP/s")
    yield "matrix products", f"{flops}{_planned(check.expected_flops_per_second, 1e12, 'TFLOP/s')}"
    yield "", f"{check.precision}, {size}"
    if any(check.copy_bytes_per_second):
        yield "copies in memory", _spread(check.copy_bytes_per_second, 1e9, "GB/s")
    if any(check.clock_hz):
        highest = max((clock or 0.0 for clock in check.highest_clock_hz), default=0.0)
        most = f" of {highest / 1e6:,.0f} MHz" if highest else ""
        yield "SM clock", f"{_spread(check.clock_hz, 1e6, 'MHz')}{most}"
    slowdowns = Counter(words for words in check.slowdowns if words)
    if slowdowns:
        yield "held down by", _counts(slowdowns)
    free = [bytes_ for bytes_ in check.free_memory_bytes if bytes_ is not None]
    if free:
        yield "free memory", f"{short_bytes(min(free))} at least"
    networks = Counter(found for found in check.networks if found)
    if networks:
        yield "network of NCCL", _counts(networks)
    for axis in check.axes:
        rates = _spread(axis.bus_bytes_per_second, 1e9, "GB/s")
        yield (
            f"axis {axis.axis} {axis.ranks_per_group}",
            f"{rates}{_planned(axis.expected_bytes_per_second, 1e9, 'GB/s')}",
        )
        yield "", f"{axis.operation} of {short_bytes(axis.message_bytes)}"
    for words in [part.message for part in check.slow] or ["nothing"]:
        yield "slow", words
    for skipped in check.skipped:
        yield "not measured", skipped
    if check.leaves:
        yield "then", "the launch ended, so that these nodes are replaced"


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{words}: {n} rank{'s' * (n != 1)}" for words, n in found.items())


def _spread(values: Sequence[float | None], unit: float, name: str) -> str:
    known = [value / unit for value in values if value is not None]
    if not known:
        return "unknown"
    return f"{_number(median(known))} {name}, lowest {_number(min(known))} {name}"


def _planned(expected: float | None, unit: float, name: str) -> str:
    return "" if expected is None else f", the plan has {_number(expected / unit)} {name}"


def _number(value: float) -> str:
    """Format three digits, or all digits of a whole part that has more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
