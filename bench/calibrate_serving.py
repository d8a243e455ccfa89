"""Fit the constants of the serving planner to published measurements and write serving.yaml.

    python -m bench.calibrate_serving [--runs FILE.csv] [--write] [--rounds 20]
    python -m bench.calibrate_serving --without source|model|gpu|engine|fold [--write]

The second form fits once without each source (model, GPU, engine, quarter of the configurations)
and prints the errors of the rows that were left out beside those of the packaged constants: what
to expect of rows that nobody fitted. With --write it is each engine's `unseen_error`.

Belongs here: the fit. Does not belong here: which constants are free (`serving_constants`), rows
(`serving_rows`), predictions (`serving_predictions`). The residual of a row is the logarithm of
predicted over measured, with a Cauchy loss, so that rows whose configuration is not what they say
do not bend the constants; each (model, GPU, engine, precision) weighs as the square root of its
rows. Rows that several dumps repeat count once, and of many that are alike some are fitted.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from ruamel.yaml import YAML
from scipy.optimize import least_squares

from bench.serving_accuracy import default_table, figures_of, offline_rate
from bench.serving_constants import (
    ENGINE_FIXED,
    ENGINES,
    GPU_FIXED,
    GPUS,
    LIKE_ENGINE,
    LIKE_HOPPER,
    OWN_FIXED,
    FreeConstant,
    free_constants,
)
from bench.serving_predictions import (
    Prediction,
    RowGroup,
    grouped,
    latencies,
    predictions,
    read_cases,
    with_engines,
)
from bench.serving_rows import ServingCase, of_inference_x
from hpctrain.spec.calibration import ServingCalibration
from hpctrain.spec.files import packaged_json
from hpctrain.spec.loader import PACKAGED_SERVING, load_serving_calibration

# Relative errors at which a residual counts 1: TPOT, mean TTFT, its 99th percentile, throughput.
TOLERANCES = {"tpot": 0.06, "ttft_mean": 0.12, "ttft_p99": 0.2, "rate": 0.1}
STEP = 1e-4  # of a logarithm, for slopes
MOST_ALIKE = 30  # rows of one (model, GPU, engine, precision) that are fitted, spread evenly
FULL_WEIGHT = 20  # rows of one (model, GPU, engine, precision) from which on each weighs less
Sections = dict[str, dict[str, dict[str, Any]]]


def sections_of(free: Sequence[FreeConstant], values: np.ndarray) -> Sections:
    """All constants as the document's sections."""
    gpus: dict[str, dict[str, Any]] = {key: dict(GPU_FIXED) for key in (*GPUS, *LIKE_HOPPER)}
    engines: dict[str, dict[str, Any]] = {
        key: ENGINE_FIXED | OWN_FIXED.get(LIKE_ENGINE.get(key, key), {})
        for key in (*ENGINES, *LIKE_ENGINE)
    }
    sections: Sections = {"gpus": gpus, "engines": engines}
    for constant, value in zip(free, values, strict=True):
        for key in constant.keys:
            sections[constant.section][key][constant.field] = float(f"{value:.4g}")
    for entries in sections.values():
        for entry in entries.values():
            entry["provenance"] = "default: no open row depends on it"
    known = load_serving_calibration().engines
    for name, entry in sections["engines"].items():
        kept = known.get(name, known["other"])
        entry |= {"unseen_error": kept.unseen_error, "unseen_provenance": kept.unseen_provenance}
    return sections


def distinct(cases: Sequence[ServingCase]) -> list[ServingCase]:
    """Rows without those that another dump repeats."""
    seen, kept = set(), []
    for case in cases:
        row = case.row
        figures = (row.ttft_mean, row.tpot_mean, row.ttft_p99, row.request_rate, row.token_rate)
        key = (case.gpu.name, case.engine, row.weights, row.load_value, *figures)
        if key not in seen:
            seen.add(key)
            kept.append(case)
    return kept


def thinned(cases: Sequence[ServingCase]) -> list[ServingCase]:
    """Rows without most of those that are like many others, so that a fit takes a minute."""
    parts: dict[tuple[object, ...], list[ServingCase]] = {}
    for case in cases:
        parts.setdefault(_likeness(case), []).append(case)
    kept: list[ServingCase] = []
    for alike in parts.values():
        count = min(len(alike), MOST_ALIKE)
        kept += [alike[index * len(alike) // count] for index in range(count)]
    return kept


@dataclass
class ServingFit:
    """Groups of rows, and how the constants enter them."""

    groups: list[RowGroup]
    free: list[FreeConstant]

    def __post_init__(self) -> None:
        counts = Counter(_likeness(case) for group in self.groups for case in group.cases)
        self.parts = [_Part(group, self.free, counts) for group in self.groups]
        self.starts = np.log([constant.start for constant in self.free])
        self.weights = np.array([constant.weight for constant in self.free])

    def residuals(self, logarithms: np.ndarray) -> np.ndarray:
        rows = [part.residuals(np.exp(logarithms)) for part in self.parts]
        beliefs = np.clip(self.weights * (logarithms - self.starts), -8, 8)
        return np.concatenate([*rows, beliefs])

    def slopes(self, logarithms: np.ndarray) -> np.ndarray:
        """Differences of the residuals, of those parts only that a constant touches.

        All constants of a part are moved at once, each in a layer of its own.
        """
        blocks = []
        for part in self.parts:
            touched = np.flatnonzero([mask.any() for mask in part.masks])
            layers = np.tile(logarithms, (len(touched) + 1, 1))
            layers[np.arange(len(touched)), touched] += STEP
            found = part.residuals(np.exp(layers))
            block = np.zeros((found.shape[-1], len(self.free)))
            block[:, touched] = ((found[:-1] - found[-1]) / STEP).T
            blocks.append(block)
        return np.concatenate([*blocks, np.diag(self.weights)])


class _Part:
    """One group with the masks of its constants and its measurements."""

    def __init__(
        self, group: RowGroup, free: Sequence[FreeConstant], counts: Counter[tuple[object, ...]]
    ) -> None:
        self.group, self.free = group, free
        keys = {
            "gpus": np.array([case.gpu.generation for case in group.cases]),
            "engines": np.array([case.engine for case in group.cases]),
        }
        self.masks = [np.isin(keys[constant.section], constant.keys) for constant in free]
        many = [max(counts[_likeness(case)], FULL_WEIGHT / 2) for case in group.cases]
        self.weights = np.sqrt(FULL_WEIGHT / np.array(many))
        pools = [1.0 if case.prefill else case.pool.replicas for case in group.cases]
        self.pools = np.array(pools, dtype=float)
        rows = [case.row for case in group.cases]
        self.measured = {
            "tpot": _column([row.tpot_mean for row in rows]),
            "ttft_mean": _column([row.ttft_mean for row in rows]),
            "ttft_p99": _column([row.ttft_p99 for row in rows]),
            "rate": _column([offline_rate(row) for row in rows]),
        }

    def residuals(self, values: np.ndarray) -> np.ndarray:
        """Of all measurements, in the last dimension; `values` has constants in the last one."""
        priced = latencies(self.changed(values))
        shape = (*values.shape[:-1], len(self.pools))
        predicted = {
            "tpot": priced.tpot_mean,
            "ttft_mean": priced.ttft_mean,
            "ttft_p99": priced.ttft_p99,
            "rate": priced.request_rate * self.pools,
        }
        found = []
        for name, measured in self.measured.items():
            known = np.isfinite(measured)
            if known.any():
                priced_all = np.broadcast_to(np.asarray(predicted[name]), shape)
                ratio = np.log(priced_all[..., known] / measured[known])
                found.append(self.weights[known] * _cauchy(ratio / TOLERANCES[name]))
        return np.concatenate(found, axis=-1) if found else np.zeros((*shape[:-1], 0))

    def changed(self, values: np.ndarray) -> RowGroup:
        """The group with these values of the free constants."""
        records = {"gpus": self.group.replicas.gpu.shares, "engines": self.group.replicas.engine}
        shape = (*values.shape[:-1], len(self.pools))
        columns: dict[str, dict[str, np.ndarray]] = {"gpus": {}, "engines": {}}
        for index, (mask, constant) in enumerate(zip(self.masks, self.free, strict=True)):
            if mask.any():
                known = getattr(records[constant.section], constant.field)
                column = columns[constant.section].setdefault(
                    constant.field, np.array(np.broadcast_to(known, shape))
                )
                column[..., mask] = values[..., index, None]
        return with_engines(self.group, columns["engines"], columns["gpus"])


def _likeness(case: ServingCase) -> tuple[object, ...]:
    return case.row.model, case.gpu.name, case.engine, case.row.weights, case.prefill is not None


def _column(values: Sequence[float | None]) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def _cauchy(residuals: np.ndarray) -> np.ndarray:
    return np.asarray(np.sign(residuals) * np.sqrt(np.log1p(residuals**2)))


def packaged_values(free: Sequence[FreeConstant]) -> np.ndarray:
    """The constants of the packaged file, from which a fit goes on."""
    known = load_serving_calibration()
    sections = {"gpus": known.gpus, "engines": known.engines}
    entries = [sections[one.section][one.keys[0]] for one in free]
    return np.array([getattr(entry, one.field) for entry, one in zip(entries, free, strict=True)])


def fit(
    cases: Sequence[ServingCase],
    free: list[FreeConstant],
    rounds: int,
    start: np.ndarray | None = None,
) -> np.ndarray:
    """The values of the free constants, from `start`, else from where the table begins."""
    if start is None:
        start = np.array([constant.start for constant in free])
    base = ServingCalibration.model_validate(sections_of(free, start))
    parts: dict[tuple[str, str], list[ServingCase]] = {}
    for case in thinned(cases):
        parts.setdefault((case.engine, case.gpu.generation), []).append(case)
    groups = [group for members in parts.values() for group in grouped(members, base)]
    task = ServingFit(groups, free)
    low, high = (np.log([getattr(c, name) for c in free]) for name in ("low", "high"))
    solution = least_squares(
        task.residuals,
        np.clip(np.log(start), low + 1e-6, high - 1e-6),
        jac=task.slopes,
        bounds=(low, high),
        max_nfev=rounds,
        x_scale=0.3,
    )
    return np.asarray(np.exp(solution.x))


def _family(case: ServingCase) -> str:
    """The model; DeepSeek-R1 and V3, under whose names dumps repeat each other's rows, are one."""
    return case.row.model.split("/")[-1].replace("DeepSeek-R1", "DeepSeek-V3")


def _fold(case: ServingCase) -> int:
    """Which of a few parts a configuration is in, by a hash: all its loads together."""
    row, layout = case.row, case.pool.layout
    ran = (case.gpu.name, case.engine, row.weights, layout, case.drafted_tokens)
    configuration = (_family(case), *ran)
    return crc32(repr(configuration).encode()) % FOLDS


LEFT_OUT: dict[str, Callable[[ServingCase], str]] = {
    "source": lambda case: (
        "InferenceX (AIConfigurator's copies)" if of_inference_x(case.row) else case.row.source
    ),
    "model": lambda case: _family(case),
    "gpu": lambda case: case.gpu.name,
    "engine": lambda case: case.engine,
    "fold": lambda case: f"configurations {_fold(case) + 1} of {FOLDS}",
}
FEWEST_ROWS = 20  # of a part that is worth a fit without it
FOLDS = 3
NORMAL = 1.4826  # standard deviation of a normal distribution over its median size


def leave_out(cases: Sequence[ServingCase], kind: str, rounds: int) -> list[Prediction]:
    """Print the errors of each part under a fit without it, and under the packaged constants.

    Returns the predictions of all parts under the fits that have not seen them.
    """
    key, free = LEFT_OUT[kind], free_constants()
    unique, packaged = distinct(cases), load_serving_calibration()
    titles = [f"{title}: TPOT TTFT p99" for title in ("left out", "fitted to")]
    print(f"{kind:40s} {'rows':>5s}  {titles[0]:>26s}  {titles[1]:>26s}")
    unseen: list[Prediction] = []
    for part, count in Counter(map(key, unique)).most_common():
        if count < FEWEST_ROWS:
            continue
        others = [case for case in unique if key(case) != part]
        own = [case for case in cases if key(case) == part]
        without = predictions(own, _calibrated(free, fit(others, free, rounds)))
        unseen += without
        print(_line(part, without, predictions(own, packaged)), flush=True)
    print(_line("together", unseen, predictions([one.case for one in unseen], packaged)))
    return unseen


def _line(title: str, unseen: Sequence[Prediction], seen: Sequence[Prediction]) -> str:
    cells = [_cells(figures_of(rows)) for rows in (unseen, seen)]
    return f"{title[:40]:40s} {len(seen):5d}  {cells[0]:>26s}  {cells[1]:>26s}"


def _cells(figures: dict[str, Any]) -> str:
    names = ("tpot", "ttft_mean", "ttft_p99")
    values = [figures.get(f"{name}_median_error") for name in names]
    return " ".join("    -" if value is None else f"{100 * value:4.1f}%" for value in values)


def unseen_errors(unseen: Sequence[Prediction]) -> dict[str, float]:
    """Deviation of the logarithm of measured over predicted TPOT, by engine; `other`: of all.

    As 1.48 times the median of its size, which of normal errors is the standard deviation.
    """
    parts: dict[str, list[float]] = {"other": []}
    for one in unseen:
        if one.case.row.tpot_mean:
            error = abs(float(np.log(one.tpot_mean / one.case.row.tpot_mean)))
            parts["other"].append(error)
            parts.setdefault(one.case.engine, []).append(error)
    many = {name: errors for name, errors in parts.items() if len(errors) >= FEWEST_ROWS}
    return {name: NORMAL * float(np.median(errors)) for name, errors in many.items()}


def write_errors(unseen: Sequence[Prediction], kind: str) -> None:
    """Put what the fit has not seen into the packaged constants; all else stays."""
    errors = unseen_errors(unseen)
    counts = Counter(one.case.engine for one in unseen if one.case.row.tpot_mean)
    known = load_serving_calibration().model_dump(mode="json")
    for name, entry in known["engines"].items():
        own = name if name in errors else "other"
        rows = counts.total() if own == "other" else counts[name]
        entry["unseen_error"] = float(f"{errors[own]:.3g}")
        entry["unseen_provenance"] = (
            f"bench/calibrate_serving.py --without {kind} --write: {rows} rows"
            + (" of all engines" if own == "other" else "")
        )
    write(known)


def _calibrated(free: list[FreeConstant], values: np.ndarray) -> ServingCalibration:
    return ServingCalibration.model_validate(sections_of(free, values))


def with_provenance(sections: Sections, cases: Sequence[ServingCase]) -> Sections:
    """Each entry says how many rows of which sources its figures were fitted to."""
    keys = (("gpus", lambda case: case.gpu.generation), ("engines", lambda case: case.engine))
    for section, key in keys:
        for name, entry in sections[section].items():
            used = Counter(LEFT_OUT["source"](case) for case in cases if key(case) == name)
            if used:
                listed = ", ".join(f"{source} ({n})" for source, n in used.most_common(4))
                entry["provenance"] = f"bench/calibrate_serving.py: {listed}"
    return sections


HEADER = """\
# What GPUs and engines reach in inference; written by bench/calibrate_serving.py from published
# measurements. What each field means: hpctrain/spec/calibration.py. `gpus`: by catalogue
# name, else by generation, else `other`. `engines`: by name, with the year of those before 2025.
"""


def write(sections: Sections) -> None:
    """Replace the packaged file, after checking it against its schema."""
    checked = ServingCalibration.model_validate(sections).model_dump(mode="json")
    yaml = YAML()
    yaml.width = 110
    with open(PACKAGED_SERVING, "w", encoding="utf-8") as file:
        file.write(HEADER)
        yaml.dump(checked, file)
    PACKAGED_SERVING.with_suffix(".json").write_text(packaged_json(PACKAGED_SERVING))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, help="default: the open table")
    parser.add_argument("--rounds", type=int, default=20, help="evaluations of the fit")
    parser.add_argument("--without", choices=sorted(LEFT_OUT), help="leave out each in turn")
    parser.add_argument("--go-on", action="store_true", help="begin at the packaged constants")
    parser.add_argument("--write", action="store_true", help="into serving.yaml")
    options = parser.parse_args()
    cases, _ = read_cases(options.runs or default_table())
    if options.without:
        unseen = leave_out(cases, options.without, options.rounds)
        if options.write:
            write_errors(unseen, options.without)
        return
    unique, free = distinct(cases), free_constants()
    start = packaged_values(free) if options.go_on else None
    values = fit(unique, free, options.rounds, start)
    for constant, value in zip(free, values, strict=True):
        print(f"{constant.name[:60]:60s} {constant.start:10.4g} -> {value:10.4g}")
    fitted = f"{len(unique)} distinct rows of {len(cases)}, {len(thinned(unique))} of them fitted"
    print(f"{fitted}; median errors of all rows:")
    starts = np.array([constant.start for constant in free])
    for title, ones in (("before the fit", starts), ("after the fit", values)):
        figures = figures_of(predictions(cases, _calibrated(free, ones)))
        print(f"{title:20s} TPOT, TTFT, its p99: {_cells(figures)}")
    if options.write:
        write(with_provenance(sections_of(free, values), unique))


if __name__ == "__main__":
    main()
