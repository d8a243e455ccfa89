"""Command `calibrate`: what a cluster or a service measured becomes the planner's constants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpctrain.cli.options import ProfileName, json_option
from hpctrain.cli.output import json_out, paragraph, say

if TYPE_CHECKING:
    from hpctrain.actions.calibrate import CalibratedFigure, CalibratedStep
    from hpctrain.actions.calibrate_service import ServiceCalibrationResult

_NAMES = {
    "product_efficiency": "matrix products, of the 16-bit peak",
    "flash_efficiency": "fused attention, of the 16-bit peak",
    "memory_efficiency": "elementwise kernels, of the memory",
    "nvlink_bandwidth": "NVLink, per GPU",
    "network_bandwidth": "network, per GPU",
}


@click.command()
@click.argument("result", type=click.Path(path_type=Path, exists=True))
@click.option(
    "--profile", "-p", type=ProfileName(), help="Profile of the cluster; default: the report's."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: PROFILE.calibration.yaml]",
)
@json_option
def calibrate(result: Path, profile: str | None, output: Path | None, as_json: bool) -> None:
    """Turn measurements of a cluster into constants of the planner.

    RESULT is the report of `make gpu` (docs/gpu.md), a run directory whose launches have
    measured their GPUs and links, or the directory of a service that `serve test` has measured.
    Name the written file in `calibration` of the profile.

    \b
    Examples:
      hpctrain calibrate gpu-report.json
      hpctrain calibrate runs/gpt175b-1a2b --profile sites/ours.yaml
      hpctrain calibrate runs/chat70b-3c4d --profile sites/ours.yaml
    """
    from hpctrain.actions.calibrate import calibrate as action
    from hpctrain.actions.calibrate_service import calibrate_service, is_service_directory

    if is_service_directory(result):
        served = calibrate_service(result, profile, output)
        if as_json:
            json_out("service_calibration", served)
            return
        for line in _service_lines(served):
            click.echo(line)
        say(f"\nWrote {served.path}. In the profile: `calibration: {Path(served.path).name}`")
        return
    done = action(result, profile, output)
    if as_json:
        json_out("calibration", done)
        return
    click.echo(f"{'':37}{'packaged':>12}{'measured':>12}{'ratio':>7}  from")
    for figure in done.figures:
        click.echo(_figure_line(figure))
    if done.steps:
        click.echo(f"\n{'step time':37}{'packaged':>12}{'calibrated':>12}{'measured':>12}")
    for step in done.steps:
        click.echo(_step_line(step))
    for remark in done.remarks:
        click.echo("\n" + "\n".join(paragraph(remark, "", hang=0)))
    say(f"\nWrote {done.path}. In the profile: `calibration: {Path(done.path).name}`")


def _service_lines(found: ServiceCalibrationResult) -> list[str]:
    """Tabulate the factors of an engine, and the error with and without them."""
    measured = found.measured
    rows = [
        ("iterations without prompts", f"x {measured.decode_factor:.3f}"),
        ("what prompts add to iterations", f"x {measured.prompt_factor:.3f}"),
    ]
    if measured.request_seconds is not None:
        rows.append(("a request outside of iterations", f"{1e3 * measured.request_seconds:.1f} ms"))
    before, left = f"{found.error_before:.1%}", f"{measured.error:.1%}"
    rows.append(("typical error without the factors", before))
    rows.append(("error that plans keep room for", left))
    heading = f"{found.engine} on {found.gpu}: {found.answers:,} answers"
    return [heading, *(f"{name:37}{value:>12}" for name, value in rows)]


def _figure_line(figure: CalibratedFigure) -> str:
    is_rate = figure.name.endswith("_bandwidth")
    values = [
        f"{value / 1e9:.1f} GB/s" if is_rate else f"{value:.3f}"
        for value in (figure.packaged, figure.measured)
    ]
    ratio = figure.measured / figure.packaged
    count = figure.source.removeprefix("median of ")
    return f"{_NAMES[figure.name]:37}{values[0]:>12}{values[1]:>12}{ratio:7.2f}  {count}"


def _step_line(step: CalibratedStep) -> str:
    name = f"{step.name} ({step.gpus} GPU{'s' if step.gpus > 1 else ''})"[:36]
    if step.packaged_seconds is None or step.calibrated_seconds is None:
        return f"{name:37}cannot be planned: {step.problem}"[:80]
    times = (step.packaged_seconds, step.calibrated_seconds, step.measured_seconds)
    return f"{name:37}" + "".join(f"{f'{seconds:.3f} s':>12}" for seconds in times)
