"""How near the planner is once it has seen three rows of a source, as `hpctrain calibrate` would.

Belongs here: for each source, and for each of its GPUs, errors and coverage of the rows that were
kept for validation after three others have taught. Does not belong here: the same without
having seen a source at all, prior included (`learning_curve`), the update
(`hpctrain.plan.uncertainty`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from bench.accuracy_figures import Report
from bench.left_out import known_gpus, row_places
from bench.predictions import Predicted
from bench.published import PublishedRow
from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.multipliers import classes_of
from hpctrain.plan.uncertainty.belief import Observations, updated
from hpctrain.plan.uncertainty.intervals import (
    COVERED,
    TIME_NAMES,
    noise_of,
    prior_of,
    time_effects,
)
from hpctrain.spec.calibration import Doubt
from hpctrain.spec.loader import load_uncertainty

SHOWN = 3
FEWEST = 6  # rows of a source, below which three of them are half of what there is
DRAWS = 10
SEED = 3
_EDGE = NormalDist().inv_cdf((1 + COVERED) / 2)


@dataclass(frozen=True)
class _Rows:
    """What calibrating needs of rows: logarithms of measured over predicted, and their effects."""

    errors: Floats
    effects: Floats
    noise: Floats
    places: Floats

    def at(self, rows: Floats) -> Observations:
        parts = (self.errors, self.effects, self.noise, self.places)
        return Observations(*(part[rows] for part in parts))


def after_own_runs(
    predicted: Predicted, may_be_shown: Callable[[PublishedRow], bool] | None = None
) -> dict[str, Report]:
    """Show three rows of each source, predict others; by source, and by each GPU of a source.

    `may_be_shown`: rows to calibrate with, of which three are drawn ten times; the others are
    predicted; `without %` is their median error before. Without it any three are shown, and all
    others predicted. A source may have rows of five kinds of GPU; runs that `calibrate` takes are
    of one.
    """
    timed = predicted.where(lambda row: row.step_seconds is not None)
    cases, doubt = timed.cases, load_uncertainty().time
    if not cases:
        return {}
    known = known_gpus(cases)
    measured = np.array([case.row.step_seconds for case in cases], dtype=float)
    rows = _Rows(
        errors=np.log(measured / timed.seconds),
        effects=time_effects(timed.case, known),
        noise=noise_of(doubt, classes_of(timed.case, known)),
        places=row_places(timed.case),
    )
    teaches = np.array([may_be_shown is None or may_be_shown(case.row) for case in cases])
    tested = ~teaches if may_be_shown else teaches
    titles = {
        "each source one site": [case.row.source for case in cases],
        "each GPU of a source a site": [f"{case.row.source}, {case.gpu.name}" for case in cases],
    }
    found = {}
    for title, keys in titles.items():
        sites = {key: np.flatnonzero(np.array(keys) == key) for key in dict.fromkeys(keys)}
        found[title] = _report(title, rows, sites, (teaches, tested), doubt)
    return found


def _report(
    title: str,
    rows: _Rows,
    sites: dict[str, Floats],
    parts: tuple[Floats, Floats],
    doubt: Doubt,
) -> Report:
    teaches, tested = parts
    lines, pooled = {}, []
    for site, own in sites.items():
        shown, rest = own[teaches[own]], own[tested[own]]
        if len(own) < FEWEST or len(shown) < SHOWN or not len(rest):
            continue
        errors, inside = _after(rows, shown, rest, doubt)
        before = np.expm1(-rows.errors[rest])
        lines[site] = _line(len(rest), before, errors, inside)
        pooled.append((before, errors, inside))
    if lines:
        macro = {
            name: float(np.median([line[name] for line in lines.values()]))
            for name in ("without %", "median %", "p90 %")
        }
        covered = float(np.mean([line["inside %"] for line in lines.values()]))
        count = sum(int(line["rows"]) for line in lines.values())
        whole = [np.concatenate(part) for part in zip(*pooled, strict=True)]
        lines["middle of the above"] = {**macro, "inside %": covered}
        lines["all"] = _line(count, *whole)
    return Report(title, lines)


def _after(rows: _Rows, shown: Floats, rest: Floats, doubt: Doubt) -> tuple[Floats, Floats]:
    """Compute relative errors, and whether each lies inside its interval: [draws x rows]."""
    random = np.random.default_rng(SEED)
    prior, errors, inside = prior_of(doubt, TIME_NAMES), [], []
    for _ in range(DRAWS):
        three = random.choice(shown, SHOWN, replace=False)
        left = np.setdiff1d(rest, three)
        belief, others = updated(prior, rows.at(three)), rows.at(left)
        after = others.errors - belief.shift(others.effects, others.places)
        deviation = belief.deviation(others.effects, others.noise, others.places)
        errors.append(np.expm1(-after))
        inside.append(np.abs(after) <= _EDGE * doubt.learned_widening * deviation)
    return np.concatenate(errors), np.concatenate(inside)


def _line(count: int, before: Floats, errors: Floats, inside: Floats) -> dict[str, float]:
    return {
        "rows": count,
        "without %": 100 * float(np.median(np.abs(before))),
        "median %": 100 * float(np.median(np.abs(errors))),
        "p90 %": 100 * float(np.quantile(np.abs(errors), 0.9)),
        "bias %": 100 * float(np.median(errors)),
        "inside %": 100 * float(np.mean(inside)),
    }
