"""How near the planner's predictions are to published measurements.

    python bench/planner_accuracy.py --runs FILE.csv [--oom FILE.csv] [--json] [--split 0.6]

Per source and overall: rows, median and 90th-percentile absolute error and bias of the step time,
rank correlation of layouts within groups of the same model, GPUs and batch, regret of the layout
that the planner would choose against the best measured one; the same of memory; precision and
recall of out-of-memory. Rows that cannot be modelled are counted and named. Belongs here: the
command. Does not belong here: the figures themselves (`accuracy_figures`) or rows (`published`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.accuracy_figures import oom_report, report_of  # noqa: E402
from bench.predictions import Predicted, predict_file  # noqa: E402


def main() -> None:
    options = _options()
    runs = predict_file(options.runs)
    oom = predict_file(options.oom) if options.oom else None
    parts = _parts(runs, options.split)
    if options.json:
        print(json.dumps(_document(parts, runs, oom), indent=1))
        return
    for title, chosen in parts.items():
        print(f"\n{title}\n")
        print(report_of(chosen).text())
    print(_refusals(runs))
    if oom is not None:
        print("\nout of memory\n")
        print(oom_report(runs, oom).text())
        print(_refusals(oom))
    if options.rows:
        _write_rows(options.rows, runs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, required=True, help="measured configurations (CSV)")
    parser.add_argument("--oom", type=Path, help="configurations reported as out of memory (CSV)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument(
        "--split",
        type=float,
        help="report rows apart that calibrate_planner --share fits to, and those it does not see",
    )
    parser.add_argument("--rows", type=Path, help="write one line per row to this CSV")
    return parser.parse_args()


def _parts(runs: Predicted, share: float | None) -> dict[str, Predicted]:
    if share is None:
        return {"all rows": runs}
    from bench.rows_split import in_calibration

    return {
        "calibration rows": runs.where(lambda row: in_calibration(row, share)),
        "validation rows (not fitted to)": runs.where(lambda row: not in_calibration(row, share)),
    }


def _document(
    parts: dict[str, Predicted], runs: Predicted, oom: Predicted | None
) -> dict[str, object]:
    document: dict[str, object] = {
        title: report_of(part).figures() for title, part in parts.items()
    }
    document["not modelled"] = runs.refused
    document["assumed"] = runs.assumed_counts()
    if oom is not None:
        document["out of memory"] = oom_report(runs, oom).figures()
        document["out of memory, not modelled"] = oom.refused
    return document


def _refusals(predicted: Predicted) -> str:
    lines = [f"\n{len(predicted.refused)} of {predicted.count} rows not modelled"]
    lines += [f"  {reason}" for reason in predicted.refused]
    lines += [f"  complaint: {reason}" for reason in predicted.complaints]
    return "\n".join(lines)


def _write_rows(path: Path, runs: Predicted) -> None:
    runs.table().to_csv(path, index=False)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
