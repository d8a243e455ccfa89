"""How near the planner's predictions are to published measurements.

    python bench/planner_accuracy.py --runs FILE.csv [--oom FILE.csv] [--json] [--split 0.6]
        [--quick]

Three views of the same rows. `product`: constants as `hpctrain plan` takes them, whoever measured.
`leave one source out`: the same, fitted without the source that is predicted, which is what the
user of a new cluster meets; a fit for each source, left out with --quick. The first keys of the
JSON (`all rows`, or with --split the rows that the constants were fitted to and the others) take
the software constants of each source: how well the formulas describe a cluster that is known.

Of each view: per source and overall, rows, median and 90th-percentile absolute error and bias of
the step time; rank correlation and regret of layouts that differ in nothing else; the same of
memory; the middle source (`macro`) and one figure per configuration (`cells`); how many rows lie
inside the 80 % intervals (`intervals`); errors and coverage once three rows of each source have
taught as own runs would (`after three own runs`: shown are calibration rows, predicted are the
validation rows); precision and recall of out-of-memory. Rows that cannot be
modelled are counted and named. Belongs here: the command. Does not belong here: the figures
themselves (`accuracy_figures`) or rows (`published`).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from bench.accuracy_figures import Figures, Report, oom_report, report_of  # noqa: E402
from bench.held_out import leave_one_source_out  # noqa: E402
from bench.interval_figures import memory_intervals, time_intervals  # noqa: E402
from bench.own_run_figures import after_own_runs  # noqa: E402
from bench.predictions import Predicted, predict_file  # noqa: E402

OWN = "software of each source"
PRODUCT = "product"
LEARNED = "after three own runs"
UNSEEN = "leave one source out"
RANKING = ("groups", "rank", "regret %", "worst regret %")


@dataclass(frozen=True)
class Views:
    """The same rows, predicted in several ways; `oom` are those that did not fit."""

    runs: dict[str, Predicted]
    oom: dict[str, Predicted]
    share: float | None

    def parts(self, view: str) -> dict[str, Predicted]:
        """The rows in the parts that constants were and were not fitted to."""
        runs, share = self.runs[view], self.share
        if share is None or view == UNSEEN:
            return {"all rows": runs}
        from bench.rows_split import in_calibration

        seen = runs.where(lambda row: in_calibration(row, share))
        unseen = runs.where(lambda row: not in_calibration(row, share))
        return {"calibration rows": seen, "validation rows (not fitted to)": unseen}

    def figures(self, view: str) -> dict[str, Figures]:
        return {title: report_of(part) for title, part in self.parts(view).items()}

    def after_own_runs(self, view: str) -> dict[str, Report]:
        """What three rows of a source teach about its others; with a split, about those unseen."""
        share = self.share
        if share is None:
            return after_own_runs(self.runs[view])
        from bench.rows_split import in_calibration

        return after_own_runs(self.runs[view], lambda row: in_calibration(row, share))


def views_of(runs: Path, oom: Path | None, share: float | None, quick: bool) -> Views:
    """Predict the rows of both files in all ways; without the minutes of fitting if `quick`."""
    predicted = {PRODUCT: predict_file(runs, product=True)}
    if not quick:
        predicted[UNSEEN] = leave_one_source_out(runs)
    predicted[OWN] = predict_file(runs)
    failed = {view: predict_file(oom, view == PRODUCT) for view in (PRODUCT, OWN)} if oom else {}
    return Views(predicted, failed, share)


def document(views: Views) -> dict[str, object]:
    """The figures as JSON: those of each source's software at the top, then one key a view."""
    figures = {view: views.figures(view) for view in views.runs}
    found: dict[str, object] = {title: part.figures() for title, part in figures[OWN].items()}
    for view in (PRODUCT, UNSEEN):
        if view in figures:
            found[view] = {title: part.figures() for title, part in figures[view].items()}
    wholes = {view: report_of(predicted).figures() for view, predicted in views.runs.items()}
    for key in ("macro", "cells", "memory"):
        found[key] = {view: whole[key] for view, whole in wholes.items()}
    found["regret"] = {view: regrets(whole["step time"]) for view, whole in wholes.items()}
    found["intervals"] = {
        view: {
            "step time": time_intervals(runs, view == UNSEEN).figures(),
            "memory": memory_intervals(runs, view == UNSEEN).figures(),
        }
        for view, runs in views.runs.items()
        if view != OWN
    }
    found[LEARNED] = {
        view: {title: report.figures() for title, report in views.after_own_runs(view).items()}
        for view in views.runs
        if view != OWN
    }
    found["not modelled"] = views.runs[OWN].refused
    found["assumed"] = views.runs[OWN].assumed_counts()
    if views.oom:
        classified = {
            view: oom_report(views.runs[view], failed).figures()
            for view, failed in views.oom.items()
        }
        found["out of memory"] = {**classified[OWN], PRODUCT: classified[PRODUCT]}
        found["out of memory, not modelled"] = views.oom[OWN].refused
    return found


def regrets(lines: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Ranking alone, of the sources that measured more than one layout of something."""
    return {
        source: {name: line[name] for name in RANKING if name in line}
        for source, line in lines.items()
        if line.get("groups")
    }


def main() -> None:
    options = _options()
    views = views_of(options.runs, options.oom, options.split, options.quick)
    if options.json:
        print(json.dumps(document(views), indent=1))
    else:
        _print(views)
    if options.rows:
        views.runs[OWN].table().to_csv(options.rows, index=False)
        print(f"wrote {options.rows}", file=sys.stderr)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, required=True, help="measured configurations (CSV)")
    parser.add_argument("--oom", type=Path, help="configurations reported as out of memory (CSV)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--quick", action="store_true", help="fit nothing: no leave one source out")
    parser.add_argument(
        "--split",
        type=float,
        help="report rows apart that calibrate_planner --share fits to, and those it does not see",
    )
    parser.add_argument("--rows", type=Path, help="write one line per row to this CSV")
    return parser.parse_args()


def _print(views: Views) -> None:
    for view in views.runs:
        for title, part in views.figures(view).items():
            print(f"\n{view}: {title}\n")
            print(part.text())
        if view != OWN:
            for intervals in (time_intervals, memory_intervals):
                print(f"\n{intervals(views.runs[view], view == UNSEEN).text()}")
            for title, report in views.after_own_runs(view).items():
                print(f"\n{view}, {LEARNED}: {title}\n\n{report.text()}")
    print(_refusals(views.runs[OWN]))
    for view, failed in views.oom.items():
        print(f"\n{view}\n")
        print(oom_report(views.runs[view], failed).text())
    if views.oom:
        print(_refusals(views.oom[OWN]))


def _refusals(predicted: Predicted) -> str:
    lines = [f"\n{len(predicted.refused)} of {predicted.count} rows not modelled"]
    lines += [f"  {reason}" for reason in predicted.refused]
    lines += [f"  complaint: {reason}" for reason in predicted.complaints]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
