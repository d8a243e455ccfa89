"""How few own runs teach the planner: hide a source, show some of its rows, predict the others.

    python -m bench.learning_curve --runs FILE.csv [--left-out FILE.npz] [--plot FILE.png]

For each source: constants and prior without it; then k of its rows calibrate as `hpctrain
calibrate` would, several times with other rows, and the rest is predicted. Median and p90 of the
error are over rows, each source the same; so is the share of rows inside the 80 % intervals. Once
with each source as one site, though some have rows of five kinds of GPU, and once with each of
its GPUs as a site: `hpctrain calibrate` takes runs of one.
Belongs here: that proof. Does not belong here: the prior (`fit_uncertainty`), the update
(`hpctrain.plan.uncertainty`).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from bench.fit_uncertainty import Hidden, hidden, prior_from, rows_of, sources_of
from bench.left_out import LeftOut
from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.multipliers import CLASSES
from hpctrain.plan.uncertainty.intervals import COVERED, TIME_NAMES
from hpctrain.spec.calibration import Doubt

COUNTS = (0, 1, 2, 3, 5, 10)
DRAWS = 20
SEED = 17
FEWEST_LEFT = 3  # rows that a source must have beside those that are shown
_ERRORS = {"p90": "nine of ten below", "width": "interval, ±", "median": "median"}
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "learning-curve.png"


@dataclass(frozen=True)
class Point:
    """What `count` shown rows give: errors in percent, and the share inside the intervals.

    `without`: the median error of the same rows without own runs; `width`: the median half-width
    of the intervals, in percent.
    """

    count: int
    sources: int
    without: float
    median: float
    p90: float
    covered: float
    rows_covered: float
    width: float


def priors(rows: LeftOut) -> dict[str, Doubt]:
    """Fit a prior for each source to the rows of all others."""
    sources, names = sources_of(rows), tuple(dict.fromkeys(rows.sources))
    whole = prior_from(sources, TIME_NAMES, CLASSES)
    return {
        name: prior_from(
            [other for other in sources if other is not own], TIME_NAMES, CLASSES, whole
        )
        for name, own in zip(names, sources, strict=True)
    }


def curve(rows: LeftOut, known: Mapping[str, Doubt], by_gpu: bool = False) -> list[Point]:
    """Compute the curve over all sources that have enough rows, as far as any has.

    `known`: the prior of each. `by_gpu`: a source that has measured on several kinds of GPU is as
    many clusters, as it is for `hpctrain calibrate`.
    """
    pairs = tuple(zip(rows.sources, rows.gpus if by_gpu else rows.sources, strict=True))
    keys = tuple(f"{source}, {gpu}" for source, gpu in pairs)
    doubts = {key: known[source] for key, (source, _) in zip(keys, pairs, strict=True)}
    sites = list(zip(sources_of(rows, keys), doubts.values(), strict=True))
    points = []
    for count in COUNTS:
        enough = [site for site in sites if len(site[0].errors) >= count + FEWEST_LEFT]
        parts = [hidden(own, doubt, TIME_NAMES, count, DRAWS, SEED) for own, doubt in enough]
        points += [_point(count, parts)] if parts else []
    return points


def _point(count: int, parts: list[Hidden]) -> Point:
    weights = np.concatenate([np.full(len(one.after), 1 / len(one.after)) for one in parts])
    before, after, deviation = (
        np.concatenate([getattr(one, name) for one in parts])
        for name in ("before", "after", "deviation")
    )
    edge = NormalDist().inv_cdf((1 + COVERED) / 2)
    inside = np.abs(after) <= edge * deviation
    return Point(
        count=count,
        sources=len(parts),
        without=100 * weighted_quantile(_relative(before), weights, 0.5),
        median=100 * weighted_quantile(_relative(after), weights, 0.5),
        p90=100 * weighted_quantile(_relative(after), weights, 0.9),
        covered=100 * float(np.average(inside, weights=weights)),
        rows_covered=100 * float(inside.mean()),
        width=100 * weighted_quantile(np.expm1(edge * deviation), weights, 0.5),
    )


def _relative(logs: Floats) -> Floats:
    """Turn logarithms of measured over predicted into errors relative to measured."""
    return np.asarray(np.abs(np.exp(-logs) - 1))


def weighted_quantile(values: Floats, weights: Floats, share: float) -> float:
    """Return the smallest value that `share` of the weight does not exceed."""
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, share * reached[-1])])


def table(points: list[Point]) -> str:
    """Format the curve."""
    head = "own runs  sources  without %  median %   p90 %  interval +-%  inside 80 %  of rows"
    lines = [
        f"{one.count:8d} {one.sources:8d} {one.without:10.2f} {one.median:9.2f} {one.p90:7.2f} "
        f"{one.width:13.1f} {one.covered:12.1f} {one.rows_covered:8.1f}"
        for one in points
    ]
    return "\n".join([head, *lines])


def draw(sources: list[Point], apart: list[Point], file: Path) -> None:
    """Draw errors and coverage against the number of own runs, solid with GPUs `apart`."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for points, style in ((apart, "o-"), (sources, "o:")):
        counts = [one.count for one in points]
        for (name, label), colour in zip(_ERRORS.items(), ("C0", "C1", "C2"), strict=True):
            shown = label if points is apart else None
            figures = [getattr(one, name) for one in points]
            left.plot(counts, figures, style, color=colour, markersize=4, label=shown)
        figures = [one.covered for one in points]
        which = "GPUs of a source apart" if points is apart else "each source one site"
        right.plot(counts, figures, style, color="C0", markersize=4, label=which)
    left.axhline(4, color="grey", linewidth=0.8)
    highest = max(one.p90 for one in (*sources, *apart))
    left.set(xlabel="own runs shown", ylabel="error of the other rows, %", ylim=(0, 1.5 * highest))
    right.axhspan(75, 85, color="grey", alpha=0.15)
    right.set(xlabel="own runs shown", ylabel="inside the 80 % interval, %", ylim=(50, 100))
    for axes in (left, right):
        axes.legend(frameon=False, loc="upper right")
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, action="append", required=True)
    parser.add_argument("--left-out", type=Path, help="keep the predictions here, or read them")
    parser.add_argument("--plot", type=Path, nargs="?", const=PICTURE, help="draw a picture")
    options = parser.parse_args()
    rows = rows_of(options.runs, options.left_out)
    known = priors(rows)
    points = curve(rows, known)
    print("each source one site", table(points), sep="\n")
    apart = curve(rows, known, by_gpu=True)
    print("\neach source's GPUs apart", table(apart), sep="\n")
    if options.plot:
        draw(points, apart, options.plot)


if __name__ == "__main__":
    main()
