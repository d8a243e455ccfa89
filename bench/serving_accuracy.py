"""How near the serving planner's latencies are to published measurements.

    python bench/serving_accuracy.py [--runs FILE.csv] [--json] [--worst 20]

In all and by source, engine and GPU: rows, median and 90th-percentile absolute error and bias of
TPOT, of the mean and the 99th percentile of TTFT and of the throughput of offline runs; runs that
the planner would have refused as out of memory; rows that say too little, with the reason. Without
--runs it reads `published_inference.csv` of the data directory beside the repository.

Belongs here: the command and the figures. Does not belong here: rows (`serving_rows`), predictions
(`serving_predictions`), the fit (`calibrate_serving`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from bench.serving_predictions import Prediction, predictions, read_cases  # noqa: E402
from bench.serving_rows import ServingRow  # noqa: E402

DATA = ("../shared/data", "../../shared/data")
TABLE = "published_inference.csv"

# Name of a figure -> (predicted, measured) of a row; None where the source does not say.
Pair = Callable[[Prediction], tuple[float, float | None]]
FIGURES: dict[str, Pair] = {
    "tpot": lambda one: (one.tpot_mean, one.case.row.tpot_mean),
    "ttft_mean": lambda one: (one.ttft_mean, one.case.row.ttft_mean),
    "ttft_p99": lambda one: (one.ttft_p99, one.case.row.ttft_p99),
    "offline_throughput": lambda one: (one.request_rate, offline_rate(one.case.row)),
}


def offline_rate(row: ServingRow) -> float | None:
    """Requests per second of an offline run, from tokens per second where it prints those."""
    if row.load_kind != "offline":
        return None
    if row.request_rate:
        return row.request_rate
    return row.token_rate / row.output_tokens if row.token_rate and row.output_tokens else None


def figures_of(rows: Sequence[Prediction]) -> dict[str, object]:
    """All figures of some rows."""
    found: dict[str, object] = {"rows": len(rows)}
    for name, pair in FIGURES.items():
        both = [pair(one) for one in rows]
        known = [(predicted, measured) for predicted, measured in both if measured]
        found[f"{name}_rows"] = len(known)
        if not known:
            continue
        predicted, measured = np.array(known, dtype=float).T
        error = np.abs(predicted / measured - 1)
        found[f"{name}_median_error"] = _rounded(np.median(error))
        found[f"{name}_p90_error"] = _rounded(np.percentile(error, 90))
        found[f"{name}_bias"] = _rounded(np.exp(np.median(np.log(predicted / measured))) - 1)
    found["refused_as_oom"] = sum(not one.fits for one in rows)
    return found


def _rounded(value: float) -> float:
    return round(float(value), 4)


GROUPS: dict[str, Callable[[Prediction], str]] = {
    "by_source": lambda one: one.case.row.source,
    "by_engine": lambda one: one.case.engine,
    "by_gpu": lambda one: one.case.gpu.name,
    "by_model": lambda one: one.case.row.model,
    "by_serving": lambda one: "separate pools" if one.case.prefill else "one pool",
}


def document(
    rows: Sequence[Prediction], refused: Sequence[tuple[ServingRow, str]]
) -> dict[str, object]:
    """The report as JSON."""
    found: dict[str, object] = {"all": figures_of(rows)}
    for name, key in GROUPS.items():
        parts: dict[str, list[Prediction]] = {}
        for one in rows:
            parts.setdefault(key(one), []).append(one)
        found[name] = {part: figures_of(members) for part, members in sorted(parts.items())}
    found["refused"] = [
        {"row": row.line, "source": row.source, "reason": reason} for row, reason in refused
    ]
    return found


def text(rows: Sequence[Prediction], refused: Sequence[tuple[ServingRow, str]]) -> str:
    """The report as tables."""
    lines = []
    head = (
        f"{'':46s} {'rows':>5s} {'TPOT':>7s} {'TTFT':>7s} {'p99':>7s} {'offline':>8s} {'OOM':>4s}"
    )
    report = document(rows, refused)
    for title, parts in (("all", {"all": report["all"]}), *((n, report[n]) for n in GROUPS)):
        lines += ["", f"{title}: median absolute error", "", head]
        assert isinstance(parts, dict)
        for name, figures in parts.items():
            cells = [
                f"{100 * figures[key]:6.1f}%" if key in figures else f"{'-':>7s}"
                for key in (f"{figure}_median_error" for figure in FIGURES)
            ]
            joined = " ".join(cells)
            lines.append(
                f"{name[:46]:46s} {figures['rows']:5d} {joined} {figures['refused_as_oom']:4d}"
            )
    lines += ["", f"{len(refused)} rows are not priced:"]
    for reason, count in Counter(reason for _, reason in refused).most_common():
        lines.append(f"  {count:4d}  {reason}")
    return "\n".join(lines)


def worst(rows: Sequence[Prediction], count: int) -> str:
    """The rows with the largest error of TPOT."""

    def error(one: Prediction) -> float:
        measured = one.case.row.tpot_mean
        return abs(float(np.log(one.tpot_mean / measured))) if measured else 0.0

    lines = []
    for one in sorted(rows, key=error, reverse=True)[:count]:
        row = one.case.row
        lines.append(
            f"line {row.line}: {row.model} {one.case.gpu.name} {one.case.engine} {row.tp} "
            f"{row.load_kind} {row.load_value}: TPOT {1e3 * one.tpot_mean:.1f} ms, measured "
            f"{1e3 * (row.tpot_mean or 0):.1f} ms"
        )
    return "\n".join(lines)


def default_table() -> Path:
    """The open table beside the repository. Exits with a message where there is none."""
    for place in DATA:
        path = (ROOT / place / TABLE).resolve()
        if path.exists():
            return path
    sys.exit(f"no {TABLE} in {' or '.join(DATA)}: name one with --runs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, help=f"default: {TABLE} of the data directory")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worst", type=int, default=0, help="list so many rows")
    options = parser.parse_args()
    begin = time.monotonic()
    cases, refused = read_cases(options.runs or default_table())
    read = time.monotonic()
    rows = predictions(cases)
    seconds = {"reading": _rounded(read - begin), "predicting": _rounded(time.monotonic() - read)}
    if options.json:
        print(json.dumps({**document(rows, refused), "seconds": seconds}, indent=1))
        return
    print(text(rows, refused))
    print(f"\n{seconds['reading']:.1f} s to read, {seconds['predicting']:.1f} s to predict")
    if options.worst:
        print(f"\nlargest errors of TPOT\n\n{worst(rows, options.worst)}")


if __name__ == "__main__":
    main()
