"""Plots of predicted against measured for docs/planner.md.

    python -m bench.planner_plots --runs FILE.csv [--split 0.7] [--out docs/images]

Belongs here: drawing. Does not belong here: predictions (`predictions`) or figures
(`accuracy_figures`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd

from bench.predictions import predict_file
from bench.rows_split import in_calibration

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FAMILIES = {
    # first word of a source: colour that stays apart without red and green together
    "Megatron-Bridge": "#E69F00",
    "dgxc-benchmarking": "#0072B2",
    "BLOOM": "#009E73",
    "MosaicML": "#CC79A7",
    "Aleph": "#56B4E9",
    "Zero-Bubble": "#D55E00",
    "SimuMax": "#000000",
    "": "#888888",
}


def family(source: str) -> str:
    return next((name for name in FAMILIES if name and source.startswith(name)), "")


def scatter(axes: Axes, table: pd.DataFrame, measured: str, predicted: str, unit: str) -> None:
    """Measured against predicted on logarithmic axes; hollow: rows not fitted to."""
    low = float(min(table[measured].min(), table[predicted].min())) * 0.8
    high = float(max(table[measured].max(), table[predicted].max())) * 1.25
    line = np.array([low, high])
    axes.fill_between(line, line * 0.85, line * 1.15, color="#eeeeee", label="±15 %")
    axes.plot(line, line, color="#999999", linewidth=0.8)
    present = set(table.family)
    for name, colour in FAMILIES.items():
        if name not in present:
            continue
        for fitted, fill in ((True, colour), (False, "none")):
            part = table[(table.family == name) & (table.fitted == fitted)]
            axes.scatter(
                part[measured],
                part[predicted],
                s=14,
                facecolors=fill,
                edgecolors=colour,
                linewidths=0.8,
                label=(name or "other") if fitted else None,
            )
    axes.scatter(
        [], [], s=14, facecolors="none", edgecolors="#444444", label="hollow: not fitted to"
    )
    scale = "log" if high / low > 20 else "linear"
    axes.set(xscale=scale, yscale=scale, xlim=(low, high), ylim=(low, high))
    axes.set_xlabel(f"measured, {unit}")
    axes.set_ylabel(f"predicted, {unit}")
    axes.legend(fontsize=7, frameon=False, loc="upper left")


def errors(axes: Axes, table: pd.DataFrame) -> None:
    """Spread of the relative error per source, in percent."""
    sources = list(dict.fromkeys(table.source))
    values = [
        100 * (part.predicted_seconds / part.measured_seconds - 1)
        for part in (table[table.source == source] for source in sources)
    ]
    axes.boxplot(values, orientation="horizontal", whis=(5, 95), showfliers=True, widths=0.6)
    axes.set_yticks(range(1, len(sources) + 1), [s[:34] for s in sources], fontsize=7)
    axes.invert_yaxis()
    axes.axvspan(-15, 15, color="#eeeeee")
    axes.axvline(0, color="#999999", linewidth=0.8)
    axes.set_xlabel("error of the step time, %\n(box: quartiles, whiskers: 5-95 %)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--split", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    predicted = predict_file(options.runs)
    table = predicted.table()
    table["family"] = [family(source) for source in table.source]
    table["fitted"] = [in_calibration(c.row, options.split) for c in predicted.cases]
    timed = table[table.measured_seconds.notna()]
    draw(
        options.out / "planner-time.png",
        (5.2, 5.0),
        lambda axes: scatter(axes, timed, "measured_seconds", "predicted_seconds", "s per step"),
    )
    sized = table[table.measured_gib.notna()]
    draw(
        options.out / "planner-memory.png",
        (5.2, 5.0),
        lambda axes: scatter(axes, sized, "measured_gib", "predicted_gib", "GiB per GPU"),
    )
    draw(options.out / "planner-errors.png", (6.4, 6.0), lambda axes: errors(axes, timed))


def draw(path: Path, size: tuple[float, float], content) -> None:  # type: ignore[no-untyped-def]
    """One picture."""
    figure, axes = plt.subplots(figsize=size, dpi=110, layout="constrained")
    content(axes)
    figure.savefig(path)
    plt.close(figure)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
