"""Our predictions beside those of other planners, on the rows that they print themselves.

    python -m bench.peers --runs FILE.csv [--json]

Calculon (Isaev 2023) and SimuMax are not on a package index, so that their printed figures are
taken, row by row, from `peer_predictions.csv`; `SOURCES` says where they stand and what each has
seen. Measured are table 5 of Korthikanti 2022 (`korthikanti_2022.csv`, eight rows, Calculon's
own validation) and those rows of --runs that name a case of SimuMax.

Ours are three: `product`, the constants that `hpctrain plan` takes; `unseen`, the same fitted
without the source of the row; `own`, with software constants of that source. Belongs here: matching
rows, and the table. Does not belong here: predictions (`predictions`) and fits (`held_out`).
"""

from __future__ import annotations

import argparse
import csv
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from bench.accuracy_figures import Report, error_figures
from bench.held_out import unseen
from bench.predictions import Predicted, predict_file
from bench.published import PublishedRow, family_of, read_rows

FOLDER = Path(__file__).parent
KORTHIKANTI = FOLDER / "korthikanti_2022.csv"
PREDICTIONS = FOLDER / "peer_predictions.csv"
SOURCES = {
    "Calculon": "printed by `calculon llm-validation` of calculon-ai/calculon at caa4b11 "
    "(systems/a100_80g.json, which is tuned to these eight rows)",
    "SimuMax": "MooreThreads/SimuMax at 4dcaae5, docs/b200/b200_release_v1.2_summary.md, columns "
    "perf ms and perf alloc GiB (operators measured on the machine that ran the rows)",
}
OURS = ("product", "unseen", "own")


@dataclass(frozen=True)
class PeerFigure:
    """What another planner prints for one case; `gib` is empty where it prints no memory."""

    peer: str
    case: str
    seconds: float
    gib: float | None


def printed_figures(path: Path = PREDICTIONS) -> dict[str, PeerFigure]:
    """The figures of all peers by case."""
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return {
        line["case"]: PeerFigure(
            line["peer"],
            line["case"],
            float(line["seconds"]),
            float(line["gib"]) if line["gib"] else None,
        )
        for line in lines
    }


def case_of(row: PublishedRow) -> str | None:
    """The case that a row names behind its source."""
    found = re.search(r"\bcase (\S+)", row.source_url_or_repo_path)
    return found.group(1) if found else None


def compared(runs: Path) -> pd.DataFrame:
    """One line per row that a peer prints: measured, the peer's and ours."""
    known = printed_figures()
    tables = [table_of(KORTHIKANTI, known, others=runs), table_of(runs, known, others=runs)]
    return pd.concat(tables, ignore_index=True)


def table_of(path: Path, known: dict[str, PeerFigure], others: Path) -> pd.DataFrame:
    """The rows of one file that a peer prints; `unseen` is fitted to the rows of `others`."""
    views = {
        "product": predict_file(path, product=True),
        "unseen": unseen_rows(path, known, others),
        "own": predict_file(path),
    }
    lines: dict[int, dict[str, object]] = {}
    for name, predicted in views.items():
        for number, case in enumerate(predicted.cases):
            peer = known.get(case_of(case.row) or "")
            if peer is None:
                continue
            line = lines.setdefault(case.row.line, _facts(case.row, peer))
            line[f"{name} seconds"] = predicted.seconds[number]
            line[f"{name} gib"] = predicted.gibibytes[number]
    return pd.DataFrame(list(lines.values()))


def unseen_rows(path: Path, known: dict[str, PeerFigure], others: Path) -> Predicted:
    """The rows that a peer prints, on constants fitted to the rows of other families."""
    own = [row for row in read_rows(path) if case_of(row) in known]
    rest = [row for row in read_rows(others) if case_of(row) not in known]
    families = dict.fromkeys(family_of(row.source) for row in own)
    cases = [case for family in families for case in unseen(family, [*own, *rest])]
    return Predicted(cases, [], [])


def _facts(row: PublishedRow, peer: PeerFigure) -> dict[str, object]:
    return {
        "peer": peer.peer,
        "case": peer.case,
        "measured seconds": row.step_seconds,
        "measured gib": row.memory_gb,
        "peer seconds": peer.seconds,
        "peer gib": peer.gib,
    }


def report(table: pd.DataFrame, unit: str) -> Report:
    """Errors of each planner on the rows of each peer that all have; mean, as peers print it.

    `to the peer`: our mean error over the peer's on the same rows; below 1 ours is nearer.
    """
    lines: dict[str, dict[str, float]] = {}
    for peer, part in table.groupby("peer", sort=False):
        rows = part.dropna(subset=[f"{one} {unit}" for one in ("measured", "peer", *OURS)])
        if rows.empty:
            continue
        means = {}
        for planner in ("peer", *OURS):
            errors = (rows[f"{planner} {unit}"] / rows[f"measured {unit}"]).astype(float) - 1
            means[planner] = float(errors.abs().mean() * 100)
            title = f"{peer}: {peer if planner == 'peer' else f'ours, {planner}'}"
            lines[title] = {
                "mean %": means[planner],
                "to the peer": means[planner] / means["peer"],
                **error_figures(errors),
            }
    return Report("step time" if unit == "seconds" else "memory", lines)


def row_report(table: pd.DataFrame) -> Report:
    """Measured seconds and the error of each planner, row by row."""
    lines = {}
    for _, row in table.iterrows():
        errors = {
            f"{planner} %": 100 * (row[f"{planner} seconds"] / row["measured seconds"] - 1)
            for planner in ("peer", *OURS)
        }
        lines[f"{row.peer} {row.case}"] = {"measured s": row["measured seconds"], **errors}
    return Report("step time by row", lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, required=True, help="measured configurations (CSV)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    options = parser.parse_args()
    table = compared(options.runs)
    reports = [row_report(table), report(table, "seconds"), report(table, "gib")]
    if options.json:
        figures = {one.title: one.figures() for one in reports}
        print(json.dumps({"sources": SOURCES, **figures}, indent=1))
        return
    print("\n\n".join(one.text() for one in reports if one.lines))
    print("\nPrinted figures of others; nothing of theirs was run:")
    for peer, source in SOURCES.items():
        print(f"  {peer}: {source}")


if __name__ == "__main__":
    main()
