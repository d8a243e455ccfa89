"""Command `calibrate`: what a cluster, its runs or a service measured corrects the planner."""

from __future__ import annotations

import sys
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.base.errors import UsageError
from hpctrain.base.units import short_bytes
from hpctrain.page.options import ProfileName, json_option
from hpctrain.page.output import json_out, line_width, say
from hpctrain.page.text import LINE_WIDTH, columns_text, grid, paragraph, shortened

if TYPE_CHECKING:
    from hpctrain.site.calibrate_runs import LearningResult
    from hpctrain.site.own_runs import EngineLearning
    from hpctrain.spec.calibration import SiteLearning


_NAMES = {
    "product_efficiency": "matrix products, of the 16-bit peak",
    "flash_efficiency": "fused attention, of the 16-bit peak",
    "memory_efficiency": "elementwise kernels, of the memory",
    "nvlink_bandwidth": "NVLink, per GPU",
    "network_bandwidth": "network, per GPU",
}
_NAME = 36
_FIGURES = (False, True, True, True)
_RATES = ("", "packaged", "measured", "ratio", "from")
_STEPS = ("step time", "packaged", "calibrated", "measured")
_FACTORS = ("over what is packaged", "factor", "before (68%)", "now (68%)")


@click.command()
@click.argument("results", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
@click.option(
    "--profile",
    "-p",
    type=ProfileName(),
    help="Profile of the cluster; default: the report's or the run's.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: PROFILE.calibration.yaml]",
)
@json_option
def calibrate(
    results: tuple[Path, ...], profile: str | None, output: Path | None, as_json: bool
) -> None:
    """Let the planner learn from what this cluster has measured.

    RESULTS are the directories of 1 to 10 own runs of an engine, or of a comparison: their step
    times and memory correct the planner's constants, and narrow its intervals
    (docs/certainty.md). Or one of: the report of `make gpu` (docs/gpu.md), the speed.jsonl of a
    run, the directory of a service that `serve test` has measured. The file is written beside
    the profile; deleting it undoes everything.

    \b
    Examples:
      hpctrain calibrate runs/gpt175b-1a2b runs/llama70b-3c4d -p sites/ours.yaml
      hpctrain calibrate runs/compare-llama7b-5e6f -p sites/ours.yaml
      hpctrain calibrate gpu-report.json
      hpctrain calibrate runs/chat70b-3c4d --profile sites/ours.yaml
    """
    from hpctrain.site.calibrate_runs import are_runs
    from hpctrain.site.calibrate_service import is_service_directory

    if are_runs(results):
        _from_runs(results, profile, output, as_json=as_json)
        return
    if len(results) > 1:
        others = ", ".join(f"`{one}`" for one in results if not are_runs([one]))
        raise UsageError(
            f"several results have to be runs that have trained, or comparisons: {others} "
            f"{'is' if ',' not in others else 'are'} not",
            "reports, speed.jsonl and services: one at a time",
        )
    if is_service_directory(results[0]):
        _from_service(results[0], profile, output, as_json=as_json)
    else:
        _from_rates(results[0], profile, output, as_json=as_json)


def _from_runs(
    results: tuple[Path, ...], profile: str | None, output: Path | None, *, as_json: bool
) -> None:
    """Learn from runs, and show what changes for them."""
    from hpctrain.site.calibrate_runs import calibrate_runs

    learned = calibrate_runs(results, profile, output)
    if as_json:
        json_out("learning", learned)
        return
    click.echo("\n".join(learning_lines(learned, line_width(sys.stdout))))
    say(f"Wrote {learned.path}: {learned.usage}")


def _from_service(result: Path, profile: str | None, output: Path | None, *, as_json: bool) -> None:
    """Fit the serving planner to a service's own measurements."""
    from hpctrain.site.calibrate_service import calibrate_service

    served = calibrate_service(result, profile, output)
    if as_json:
        json_out("service_calibration", served)
        return
    # Tabulate the factors of an engine, and the error with and without them
    measured = served.measured
    rows = [
        ("iterations without prompts", f"x {measured.decode_factor:.3f}"),
        ("what prompts add to iterations", f"x {measured.prompt_factor:.3f}"),
    ]
    if measured.request_seconds is not None:
        rows.append(("a request outside of iterations", f"{1e3 * measured.request_seconds:.1f} ms"))
    before, left = f"{served.error_before:.1%}", f"{measured.error:.1%}"
    rows.append(("typical error without the factors", before))
    rows.append(("error that plans keep room for", left))
    heading = f"{served.engine} on {served.gpu}: {served.answers:,} answers"
    click.echo("\n".join([heading, *grid(rows, [False, True])]))
    say(f"\nWrote {served.path}: {served.usage}")


def _from_rates(result: Path, profile: str | None, output: Path | None, *, as_json: bool) -> None:
    """Take rates that were measured one by one in place of the packaged ones."""
    from hpctrain.site.calibrate import calibrate as action

    done = action(result, profile, output)
    if as_json:
        json_out("calibration", done)
        return
    rates = []
    for figure in done.figures:
        is_rate = figure.name.endswith("_bandwidth")
        values = (
            f"{value / 1e9:.1f} GB/s" if is_rate else f"{value:.3f}"
            for value in (figure.packaged, figure.measured)
        )
        ratio = f"{figure.measured / figure.packaged:.2f}"
        rates.append(
            (_NAMES[figure.name], *values, ratio, figure.source.removeprefix("median of "))
        )
    click.echo("\n".join(columns_text(_RATES, rates, [False, True, True, True, False])))
    steps: list[tuple[str, ...]] = []
    unplanned: list[str] = []
    for step in done.steps:
        name = f"{step.name} ({step.gpus} GPU{'s' if step.gpus > 1 else ''})"
        seconds = (step.packaged_seconds, step.calibrated_seconds, step.measured_seconds)
        if None in seconds:
            unplanned += paragraph(f"{name}: cannot be planned: {step.problem}", hang=2)
        else:
            steps.append((shortened(name, _NAME), *(f"{one:.3f} s" for one in seconds)))
    if done.steps:
        click.echo("\n".join(["", *columns_text(_STEPS, steps, _FIGURES), *unplanned]))
    if done.site.learned:
        click.echo()
    for engine, learned in done.site.learned.items():
        click.echo(accuracy_line(engine, learned))
    for remark in done.remarks:
        click.echo("\n" + "\n".join(paragraph(remark)))
    say(f"\nWrote {done.path}: {done.usage}")


# -- Formats what a site's own runs have taught, in 80 columns ----------------------------------


def learning_lines(found: LearningResult, width: int = LINE_WIDTH) -> list[str]:
    """Format runs, multipliers, refusals and remarks of all engines."""
    lines = [line for engine in found.engines for line in (*_engine_lines(engine), "")]
    for mark, texts in (("left out  ", found.refused), ("mind      ", found.remarks)):
        for text in texts:
            lines += paragraph(text, mark, width=width)
    return [*lines, ""] if found.refused or found.remarks else lines


def _engine_lines(engine: EngineLearning) -> list[str]:
    """Tabulate measured, planned before and planned after of each run, and the multipliers."""
    from hpctrain.job.plan_text import MULTIPLIERS

    learned = engine.learned
    times = [
        (
            shortened(run.run, _NAME),
            f"{run.measured_seconds:.4g} s",
            *(
                f"{value:.4g} s {value / run.measured_seconds - 1:+.1%}"
                for value in (run.before_seconds, run.after_seconds)
            ),
        )
        for run in learned.runs
    ]
    sizes = [
        (
            shortened(run.run, _NAME),
            short_bytes(run.measured_bytes),
            *(
                f"{short_bytes(value)} {value / run.measured_bytes - 1:+.1%}"
                for value in (run.before_bytes, run.after_bytes)
                if value is not None
            ),
        )
        for run in learned.runs
        if run.measured_bytes is not None
    ]
    factors = [
        (
            MULTIPLIERS.get(one.name, one.name),
            f"{one.factor:.2f}x",
            _range(1.0, one.before),
            _range(one.factor, one.after),
        )
        for one in engine.multipliers
    ]
    heads = ("measured", "before", "after")
    lines = columns_text(("step time", *heads), times, _FIGURES)
    if sizes:
        lines += ["", *columns_text(("memory reserved by PyTorch", *heads), sizes, _FIGURES)]
    lines += ["", *columns_text(_FACTORS, factors, _FIGURES)]
    return [*lines, "", accuracy_line(engine.engine, learned)]


def accuracy_line(engine: str, learned: SiteLearning) -> str:
    """Format on how many runs an engine is calibrated, and how far the next one may be off."""
    count = len(learned.runs)
    runs = f"{count} run{'s' if count > 1 else ''}"
    return f"engine {engine}: calibrated on {runs}: ±{learned.error:.0%}"


def _range(factor: float, deviation: float) -> str:
    """Format the factors of two sites in three: `0.26-3.78x`, for a deviation may exceed 100 %."""
    return f"{factor * exp(-deviation):.2f}-{factor * exp(deviation):.2f}x"
