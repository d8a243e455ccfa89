"""Fit the prior of the multipliers, by which predictions become intervals; write uncertainty.yaml.

    python -m bench.fit_uncertainty --runs FILE.csv [--left-out FILE.npz] [--write]

Empirical Bayes: each source is one draw of the multipliers, and its rows are predicted with
constants that have not seen it. The deviations maximise the marginal likelihood of all rows
(Rasmussen and Williams 2006, eq. 5.8), with a weak belief about each. Belongs here: that fit. Does
not belong here: predictions without a source (`left_out`), the model (`hpctrain.plan.uncertainty`).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from ruamel.yaml import YAML
from scipy.optimize import minimize

from bench.cases import USUAL
from bench.left_out import LeftOut, left_out_rows, memory_rows, saved
from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.multipliers import CLASSES, MEMORY, alike
from hpctrain.plan.uncertainty.belief import FREEDOM, Observations, updated
from hpctrain.plan.uncertainty.intervals import COVERED, TIME_NAMES, noise_of, prior_of
from hpctrain.spec.calibration import Doubt, Uncertainty
from hpctrain.spec.files import packaged_json
from hpctrain.spec.loader import PACKAGED_UNCERTAINTY

# Deviations that are believed before any row, within the factors below.
BELIEVED = {
    "products": 0.08,
    "attention": 0.15,
    "elementwise": 0.15,
    "nvlink": 0.2,
    "network": 0.3,
    "launch": 0.5,
    "experts": 0.3,
    "everything": 0.1,
    "activations": 0.1,
    "allocator": 0.05,
    "outside": 0.3,
}
BELIEVED_CLASS, BELIEVED_NOISE, BELIEVED_CLASS_NOISE = 0.1, 0.05, 0.03
# Of what configurations that are alike share, and how many doublings apart those are.
BELIEVED_REST, BELIEVED_REACH = 0.08, 2.0
# Of networks without published rows, whose constants are InfiniBand's: cards and switches of half
# the rate, or twice, are nothing odd.
OTHER_NETWORK = 0.5
# Deviations of the logarithms of these beliefs: many sources have step times, few have memory.
FACTOR, FACTOR_MEMORY = np.log(3), np.log(1.5)
MOST_ROWS = 24.0  # more rows of one source count as so many: neighbours are no new evidence
ROUNDS = 4  # of weights for odd rows
SHOWN = (0, 1, 2, 3, 5, 10)  # rows of a source, by which `widening` is judged
FEW_DRAWS = 5
PAIRS_WITHIN = 400  # of layouts of one model that `layout_noise` is measured on, per source


@dataclass(frozen=True)
class Source:
    """The rows of one source."""

    errors: Floats
    effects: Floats
    classes: Floats
    places: Floats


def sources_of(rows: LeftOut, keys: tuple[str, ...] | None = None) -> list[Source]:
    """Split rows by their source, or by another key of each row."""
    keys = rows.sources if keys is None else keys
    names = np.array(keys)
    return [
        Source(rows.errors[own], rows.effects[own], rows.classes[own], rows.places[own])
        for own in (names == name for name in dict.fromkeys(keys))
    ]


@dataclass(frozen=True)
class Fit:
    """Logarithms of all deviations as one vector: of `names`, of noise, of the rest; its reach.

    Without `rest`, for memory, sources share nothing but multipliers.
    """

    names: tuple[str, ...]
    rest: bool

    @property
    def centre(self) -> Floats:
        """What is believed before any row."""
        found = [*(BELIEVED.get(name, BELIEVED_CLASS) for name in self.names), BELIEVED_NOISE]
        found += [BELIEVED_CLASS_NOISE for _ in CLASSES]
        return np.log([*found, *((BELIEVED_REST, BELIEVED_REACH) if self.rest else ())])

    def values(self, doubt: Doubt) -> Floats:
        """Turn a prior into the vector."""
        known = {**doubt.multipliers, **doubt.classes}
        found = [*(known[name] for name in self.names), doubt.noise]
        found += [doubt.class_noise[name] for name in CLASSES]
        return np.log([*found, *((doubt.rest, doubt.reach) if self.rest else ())])

    def doubt(self, values: Floats, classes: tuple[str, ...]) -> Doubt:
        """Turn the vector into a prior; `classes`: those of `names` that are classes."""
        known = [_rounded(value) for value in np.exp(values)]
        by_name, size = dict(zip(self.names, known, strict=False)), len(self.names)
        rest = {"rest": known[-2], "reach": known[-1]} if self.rest else {}
        return Doubt(
            multipliers={name: by_name[name] for name in self.names if name not in classes},
            classes={name: by_name[name] for name in classes},
            noise=known[size],
            class_noise=dict(zip(CLASSES, known[size + 1 :], strict=False)),
            layout_noise=known[size],
            **rest,
        )

    def loss(self, values: Floats, sources: list[Source], weights: list[Floats]) -> float:
        """Compute the negative logarithm of the marginal likelihood, and of the beliefs."""
        factor = FACTOR if self.rest else FACTOR_MEMORY
        total = 0.5 * float((((values - self.centre) / factor) ** 2).sum())
        for source, own in zip(sources, weights, strict=True):
            spread = self._covariance(source, values, own)
            lower = np.linalg.cholesky(spread)
            white = np.linalg.solve(lower, source.errors)
            loss = 0.5 * float(white @ white) + float(np.log(np.diag(lower)).sum())
            total += min(1.0, MOST_ROWS / len(source.errors)) * loss
        return total

    def _covariance(self, source: Source, values: Floats, weights: Floats) -> Floats:
        between, size = np.exp(2 * values[: len(self.names)]), len(self.names)
        noise = np.exp(2 * values[size])
        noise = noise + source.classes @ np.exp(2 * values[size + 1 : size + 1 + len(CLASSES)])
        found = (source.effects * between) @ source.effects.T + np.diag(noise / weights)
        if self.rest:
            shared = alike(source.places, source.places, float(np.exp(values[-1])))
            found = found + np.exp(2 * values[-2]) * shared
        return np.asarray(found)


def fitted_doubt(
    sources: list[Source],
    names: tuple[str, ...],
    classes: tuple[str, ...],
    near: Doubt | None = None,
    rest: bool = True,
) -> Doubt:
    """Fit the deviations of `names` and of `classes` between sources, the noise, and the rest.

    `names` belong to the columns of effects; `classes` to those of them that are classes. `near`:
    where to begin, if nearly the same has been fitted before.
    """
    fit = Fit(names, rest)
    doubt = fit.doubt(fit.centre, classes) if near is None else near
    values = fit.values(doubt)
    # odd rows count less from the start: else single ones make whole multipliers wide
    weights = [_weights(source, doubt, names) for source in sources]
    for _ in range(ROUNDS if near is None else 1):
        values = minimize(fit.loss, values, args=(sources, weights), method="L-BFGS-B").x
        doubt = fit.doubt(values, classes)
        weights = [_weights(source, doubt, names) for source in sources]
    return fit.doubt(values, classes)


def _weights(source: Source, doubt: Doubt, names: tuple[str, ...]) -> Floats:
    """Compute by how much less odd rows count: noise is Student's t."""
    noise = noise_of(doubt, source.classes)
    belief = updated(
        prior_of(doubt, names), Observations(source.errors, source.effects, noise, source.places)
    )
    left = source.errors - belief.shift(source.effects, source.places)
    square = (left**2 + belief.variance(source.effects, source.places)) / noise**2
    square = square / belief.noise_factor
    return np.asarray((FREEDOM + 1) / (FREEDOM + square) / belief.noise_factor)


def layout_noise(sources: list[Source], doubt: Doubt, names: tuple[str, ...]) -> float:
    """Measure the noise that layouts of one source do not share, from differences of pairs.

    Robust: the median absolute deviation of what the difference of effects does not explain.
    """
    known = {**doubt.multipliers, **doubt.classes}
    between = np.diag(np.square([known[name] for name in names]))
    random = np.random.default_rng(1)
    scales = []
    for source in sources:
        count = len(source.errors)
        if count < 3:
            continue
        first, second = random.integers(0, count, (2, PAIRS_WITHIN))
        apart = first != second
        first, second = first[apart], second[apart]
        difference = source.errors[first] - source.errors[second]
        effects = source.effects[first] - source.effects[second]
        near = np.abs(effects).sum(axis=1) <= np.quantile(np.abs(effects).sum(axis=1), 0.5)
        explained = np.einsum("ri,ij,rj->r", effects, between, effects)[near]
        square = difference[near] ** 2 - explained
        scales.append(float(np.median(np.maximum(square, 0.0)) / 0.455 / 2))
    return float(np.sqrt(np.median(scales))) if scales else doubt.noise


@dataclass(frozen=True)
class Hidden:
    """Rows that were predicted after so many others of their source had been seen, [rows].

    `before`: logarithm of measured over predicted without own runs, `after`: with them;
    `deviation`: what the belief expects of `after`.
    """

    before: Floats
    after: Floats
    deviation: Floats


def hidden(
    source: Source, doubt: Doubt, names: tuple[str, ...], count: int, draws: int, seed: int
) -> Hidden:
    """Show `count` rows of a source, predict the others; `draws` times, other rows each time."""
    size, random = len(source.errors), np.random.default_rng([seed, count])
    prior = prior_of(doubt, names)
    noise = noise_of(doubt, source.classes)
    parts = []
    for _ in range(draws if count else 1):
        order = random.permutation(size)
        shown, rest = order[:count], order[count:]
        if not len(rest):
            continue
        parts_shown = (source.errors, source.effects, noise, source.places)
        belief = updated(prior, Observations(*(part[shown] for part in parts_shown)))
        effects, places = source.effects[rest], source.places[rest]
        after = source.errors[rest] - belief.shift(effects, places)
        widening = doubt.learned_widening if count else doubt.widening
        deviation = widening * belief.deviation(effects, noise[rest], places)
        parts.append(np.stack([source.errors[rest], after, deviation]))
    joined = np.concatenate(parts, axis=1) if parts else np.zeros((3, 0))
    return Hidden(*joined)


def widened(sources: list[Source], doubt: Doubt, names: tuple[str, ...]) -> Doubt:
    """Set both factors so that as many hidden rows lie inside as promised, with and without runs.

    Half of the weight is shared by sources alike, half by rows: single large sources shall decide
    no more than single small ones.
    """
    plain = doubt.model_copy(update={"widening": 1.0, "learned_widening": 1.0})
    without = _widening(sources, plain, names, (0,))
    after = _widening(sources, plain, names, SHOWN[1:])
    return doubt.model_copy(update={"widening": without, "learned_widening": after})


def _widening(
    sources: list[Source], doubt: Doubt, names: tuple[str, ...], counts: tuple[int, ...]
) -> float:
    """Find the factor with which hidden rows lie inside, after so many own runs."""
    sizes, weights = [], []
    for count in counts:
        parts = [
            hidden(source, doubt, names, count, FEW_DRAWS, seed=0)
            for source in sources
            if len(source.errors) > count
        ]
        rows = sum(len(part.after) for part in parts)
        for part in parts:
            size = len(part.after)
            sizes.append(np.abs(part.after) / part.deviation)
            weights.append(np.full(size, 0.5 / (len(parts) * size) + 0.5 / rows))
    if not sizes:
        return 1.0
    size, weight = np.concatenate(sizes), np.concatenate(weights)
    order = np.argsort(size)
    reached = np.searchsorted(np.cumsum(weight[order]), COVERED * weight.sum())
    return _rounded(float(size[order][reached]) / NormalDist().inv_cdf((1 + COVERED) / 2))


def prior_from(
    sources: list[Source],
    names: tuple[str, ...],
    classes: tuple[str, ...],
    near: Doubt | None = None,
    rest: bool = True,
) -> Doubt:
    """Fit all of a prior to these sources; `near`: where to begin."""
    doubt = fitted_doubt(sources, names, classes, near, rest)
    own = _rounded(layout_noise(sources, doubt, names))
    return widened(sources, doubt.model_copy(update={"layout_noise": own}), names)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def text_of(title: str, doubt: Doubt, names: tuple[str, ...], sources: list[Source]) -> str:
    """Tabulate the deviations, and how many rows of each source lie inside before any own run."""
    lines = [title]
    lines += [f"  {name:14s} {value:6.3f}" for name, value in doubt.multipliers.items()]
    lines += [f"  all {name:10s} {value:6.3f}" for name, value in doubt.classes.items()]
    lines += [f"  noise          {doubt.noise:6.3f}"]
    lines += [f"  noise {name:8s} {value:6.3f}" for name, value in doubt.class_noise.items()]
    lines += [
        f"  layouts        {doubt.layout_noise:6.3f}",
        *([f"  alike, within {doubt.reach:.1f} doublings {doubt.rest:.3f}"] if doubt.rest else []),
        f"  widening       {doubt.widening:6.2f}",
        f"  with own runs  {doubt.learned_widening:6.2f}",
    ]
    edge = NormalDist().inv_cdf((1 + COVERED) / 2)
    covered = []
    for source in sources:
        rows = hidden(source, doubt, names, 0, 1, seed=0)
        covered.append((np.abs(rows.after) <= edge * rows.deviation, len(rows.after)))
    whole = np.concatenate([inside for inside, _ in covered]).mean()
    macro = np.mean([inside.mean() for inside, _ in covered])
    lines.append(
        f"  80 % intervals hold {whole:.1%} of all rows, {macro:.1%} in the mean of sources"
    )
    return "\n".join(lines)


def rows_of(runs: list[Path], file: Path | None) -> LeftOut:
    """Predict all rows without their sources, or read what an earlier call has kept in `file`."""
    if file is not None and file.exists():
        return saved(file)
    rows = left_out_rows(runs)
    if file is not None:
        rows.save(file)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, action="append", required=True)
    parser.add_argument("--left-out", type=Path, help="keep the predictions here, or read them")
    parser.add_argument("--write", action="store_true", help="write uncertainty.yaml")
    options = parser.parse_args()
    rows, memory = rows_of(options.runs, options.left_out), memory_rows(options.runs)
    sources, sized = sources_of(rows), sources_of(memory)
    time = prior_from(sources, TIME_NAMES, CLASSES)
    peak = prior_from(sized, MEMORY, (), rest=False)
    print(text_of("step time", time, TIME_NAMES, sources))
    print(text_of("memory", peak, MEMORY, sized))
    if options.write:
        count = f"{len(rows.sources)} step times of {len(sources)} sources"
        write(
            Uncertainty(
                time=time,
                memory=peak,
                measured_gpus=tuple(sorted(set(rows.gpus))),
                measured_fabrics=(USUAL,),
                other_network=OTHER_NETWORK,
                provenance=f"bench/fit_uncertainty.py: {count} and {len(memory.sources)} peaks of "
                f"{len(sized)}, each predicted without its source",
            )
        )


HEADER = """\
# How far the planner may be off on a site that it has not seen: deviations of logarithms, written
# by bench/fit_uncertainty.py. Fields: hpctrain/spec/calibration.py; how earned: docs/certainty.md.
"""


def write(found: Uncertainty) -> None:
    """Replace the packaged file."""
    yaml = YAML()
    yaml.width = 110
    with open(PACKAGED_UNCERTAINTY, "w", encoding="utf-8") as file:
        file.write(HEADER)
        yaml.dump(found.model_dump(mode="json"), file)
    PACKAGED_UNCERTAINTY.with_suffix(".json").write_text(packaged_json(PACKAGED_UNCERTAINTY))


if __name__ == "__main__":
    main()
