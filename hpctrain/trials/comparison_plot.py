"""Draws a comparison: step times with their spread, memory against the GPU's, losses.

matplotlib is imported when a plot is drawn, and is not needed for anything else of the package.
Belongs here: drawing. Does not belong here: any figure that the tables do not have.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import UsageError
from hpctrain.trials.documents import Comparison, StepShares, TrialResult
from hpctrain.trials.judging import gpu_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30
_GREY, _WARNING = "#999999", "#b03030"
_PARTS = (("data", "#c9a227"), ("compute", "#3b6ea5"), ("update", "#6a994e"), ("other", "#bbbbbb"))


def can_plot() -> bool:
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_plot(path: Path) -> None:
    """Raise UsageError for a plot that could not be drawn at the end."""
    if not can_plot():
        raise UsageError("--plot needs matplotlib", hint="pip install 'hpctrain[plots]'")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--plot {path}: expected a name ending in .png, .svg or .pdf")


def draw(found: Comparison, path: Path) -> None:
    """Write the plot to `path`; matplotlib must be installed. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")  # a login node has no display
    from matplotlib.figure import Figure

    sized = found.record.kind == "sizes"
    panels = [_scaling, _memory] if sized else [_step_times, _memory]
    panels += [_shares] if any(_shares_of(trial) for trial in found.trials) and sized else []
    panels += [_losses] if any(trial.losses for trial in found.trials) else []
    columns = len(panels) if len(panels) < 4 else 2
    rows = -(-len(panels) // columns)
    height = rows * max(3.2, 1.6 + 0.32 * len(found.trials))
    figure = Figure(figsize=(4.8 * columns, height), layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(places, panels, strict=True):
        panel(axes, found)
        axes.spines[["top", "right"]].set_visible(False)
    origin = f"{found.record.steps} steps each" if found.measured else "predicted"
    title = f"{found.record.run_name} on {found.record.profile_name}, {origin}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)


def _bars(axes: Axes, found: Comparison) -> list[int]:
    """Label rows from top to bottom in the order of the table; failed trials are empty rows."""
    rows = list(range(len(found.trials)))
    axes.set_yticks(rows, [_label(trial, found) for trial in found.trials], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    for row, trial in zip(rows, found.trials, strict=True):
        if trial.step_seconds is None:
            axes.text(0, row, f" {trial.state.lower()}", va="center", fontsize=8, color=_GREY)
    return rows


def _label(trial: TrialResult, found: Comparison) -> str:
    chosen = trial.name == found.recommendation.choice
    name = gpu_count(trial.record.gpus) if found.record.kind == "sizes" else trial.name
    return f"{name} ✓" if chosen else name


def _colours(found: Comparison) -> list[str]:
    return [f"C{number % 10}" for number in range(len(found.trials))]


def _step_times(axes: Axes, found: Comparison) -> None:
    for row, trial, colour in zip(_bars(axes, found), found.trials, _colours(found), strict=True):
        if trial.measured is not None:
            spread = trial.measured.step_seconds
            around = [[spread.median - spread.p10], [spread.p90 - spread.median]]
            axes.barh(row, spread.median, color=colour, height=0.6, xerr=around, capsize=3)
        elif trial.step_seconds is not None and not found.measured:
            axes.barh(row, trial.step_seconds, color=colour, height=0.6)
    axes.set_xlabel("seconds a step")
    axes.set_title("Step time: median, p10 to p90" if found.measured else "Step time", fontsize=9)


def _memory(axes: Axes, found: Comparison) -> None:
    limit = found.record.gpu_memory_bytes / _GIB
    for row, trial, colour in zip(_bars(axes, found), found.trials, _colours(found), strict=True):
        prediction = trial.record.predicted
        if trial.peak_bytes is not None and (trial.measured or not found.measured):
            axes.barh(row, trial.peak_bytes / _GIB, color=colour, height=0.6)
        if prediction is not None and found.measured:
            axes.plot(prediction.peak_bytes / _GIB, row, marker="|", color="black", markersize=14)
    largest = max((trial.peak_bytes or 0) / _GIB for trial in found.trials)
    if largest > limit / 5:
        axes.axvline(limit, color=_WARNING, linewidth=1)
        axes.set_xlim(0, limit * 1.08)
    axes.set_xlabel(f"GiB of {limit:.4g}" + (";  | predicted" if found.measured else ""))
    axes.set_title("Peak memory of one GPU", fontsize=9)


def _losses(axes: Axes, found: Comparison) -> None:
    """Draw thinner curves on top, so that equal ones stay visible."""
    for number, (trial, colour) in enumerate(zip(found.trials, _colours(found), strict=True)):
        if trial.losses:
            steps, losses = zip(*trial.losses, strict=True)
            width = max(1.0, 6.5 - 2.2 * number)
            axes.plot(steps, losses, color=colour, linewidth=width, label=_label(trial, found))
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("step")
    axes.set_title("Loss", fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def _scaling(axes: Axes, found: Comparison) -> None:
    """Draw samples per second over GPUs, and linear scaling from the smallest size."""
    paced = [
        t for t in found.trials if t.samples_per_second and (t.succeeded or not found.measured)
    ]
    axes.set_xlabel("GPUs")
    axes.set_title("Samples a second", fontsize=9)
    if not paced:
        return
    gpus = [trial.record.gpus for trial in paced]
    first = paced[0].samples_per_second or 0.0
    axes.plot(gpus, [first * count / gpus[0] for count in gpus], "--", color=_GREY, label="linear")
    word = "measured" if found.measured else "predicted"
    axes.plot(gpus, [t.samples_per_second or 0.0 for t in paced], "o-", label=word)
    axes.set_xticks(gpus)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, frameon=False)


def _shares(axes: Axes, found: Comparison) -> None:
    """Draw the parts of the mean step as stacked bars."""
    rows = _bars(axes, found)
    pairs = [(row, _shares_of(trial)) for row, trial in zip(rows, found.trials, strict=True)]
    known = [(row, shares) for row, shares in pairs if shares is not None]
    left = [0.0] * len(known)
    for name, colour in _PARTS:
        widths = [getattr(shares, name) or 0.0 for _, shares in known]
        axes.barh([row for row, _ in known], widths, left=left, color=colour, label=name)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds a step")
    axes.set_title("Where the step goes", fontsize=9)
    axes.legend(fontsize=7, frameon=False)


def _shares_of(trial: TrialResult) -> StepShares | None:
    return trial.measured.shares if trial.measured else None
