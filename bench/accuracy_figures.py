"""Statistics of predicted against measured.

Belongs here: errors, rank correlation, regret, precision and recall, and their table. Does not
belong here: predictions (`predictions`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.predictions import GIB, Predicted
from bench.published import PublishedRow, facts_of

# What layouts have to share to be compared: one source and block of trials, one model, machine,
# batch and software. The planner chooses among layouts, not among kernels or frameworks.
MACHINE = ["framework", "model", "shape", "gpu", "gpus", "global_batch", "seq_len", "precision"]
GROUP = ["source", "date", *MACHINE, "kernels"]
# One configuration, whenever it was measured: releases and repeated trials are rows of one cell.
CELL = ["family", *MACHINE, "kernels", "layout"]


@dataclass(frozen=True)
class Report:
    """A table of figures per source, with a line for all; `columns` name the figures."""

    title: str
    lines: dict[str, dict[str, float]]

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            name: {key: round(float(v), 4) for key, v in line.items() if not np.isnan(v)}
            for name, line in self.lines.items()
        }

    def text(self) -> str:
        names = list(dict.fromkeys(key for line in self.lines.values() for key in line))
        width = max(map(len, [self.title, *self.lines]))
        head = f"{self.title:{width}s} " + " ".join(f"{name:>9s}" for name in names)
        rows = [
            f"{name:{width}s} " + " ".join(_cell(line.get(key)) for key in names)
            for name, line in self.lines.items()
        ]
        return "\n".join([head, *rows])


@dataclass(frozen=True)
class Figures:
    """Step time and memory of the same rows; what `parts` are called is their key in the JSON."""

    parts: dict[str, Report]

    def text(self) -> str:
        return "\n\n".join(part.text() for part in self.parts.values())

    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        return {name: part.figures() for name, part in self.parts.items()}


def _cell(value: float | None) -> str:
    if value is None or np.isnan(value):
        return f"{'-':>9s}"
    return f"{value:9.0f}" if float(value).is_integer() else f"{value:9.2f}"


def report_of(predicted: Predicted) -> Figures:
    """The figures of measured rows."""
    table = predicted.table()
    timed = table[table.measured_seconds.notna()]
    sized = table[table.measured_gib.notna()]
    stated = time_figures(timed[timed.stated_layout.astype(bool)])
    time = Report("step time", per_source(timed, time_figures))
    memory = Report("memory", per_source(sized, memory_figures))
    return Figures(
        {
            "step time": time,
            "step time, layout stated": Report("layout stated", {"all": stated}),
            "memory": memory,
            "macro": Report("sources", {"step time": macro(time), "memory": macro(memory)}),
            "cells": Report("configurations", cells(timed, sized)),
        }
    )


def macro(report: Report) -> dict[str, float]:
    """The middle source: the median of sources' medians and of their 90th percentiles.

    A source with many rows counts as much as one with few.
    """
    lines = [line for name, line in report.lines.items() if name != "all" and line["rows"]]
    if not lines:
        return {"sources": 0}
    return {
        "sources": len(lines),
        "median %": float(np.median([line["median %"] for line in lines])),
        "p90 %": float(np.median([line["p90 %"] for line in lines])),
        "worst median %": max(line["median %"] for line in lines),
    }


def cells(timed: pd.DataFrame, sized: pd.DataFrame) -> dict[str, dict[str, float]]:
    """Errors of configurations, each the median of its rows' errors."""
    return {
        "step time": error_figures(_cell_errors(timed, "seconds")),
        "memory": error_figures(_cell_errors(sized, "gib")),
    }


def _cell_errors(table: pd.DataFrame, unit: str) -> pd.Series:
    errors = table[f"predicted_{unit}"] / table[f"measured_{unit}"] - 1
    return errors.groupby([table[name] for name in CELL], dropna=False).median()


def per_source(table: pd.DataFrame, figures) -> dict[str, dict[str, float]]:  # type: ignore[no-untyped-def]
    """`figures` of each source in the order of the file, then of everything."""
    lines = {str(source): figures(part) for source, part in table.groupby("source", sort=False)}
    return lines | {"all": figures(table)}


def time_figures(table: pd.DataFrame) -> dict[str, float]:
    """Errors of the step time, and how well layouts are ranked."""
    errors = table.predicted_seconds / table.measured_seconds - 1
    return error_figures(errors) | ranking_figures(table)


def memory_figures(table: pd.DataFrame) -> dict[str, float]:
    return error_figures(table.predicted_gib / table.measured_gib - 1)


def error_figures(errors: pd.Series) -> dict[str, float]:
    """Absolute relative errors in percent: median and 90th percentile; bias is the median error."""
    if not len(errors):
        return {"rows": 0}
    size = errors.abs() * 100
    return {
        "rows": len(errors),
        "median %": float(size.median()),
        "p90 %": float(size.quantile(0.9)),
        "worst %": float(size.max()),
        "bias %": float(errors.median() * 100),
    }


def ranking_figures(table: pd.DataFrame) -> dict[str, float]:
    """Over groups of at least two layouts that differ in nothing else (`GROUP`).

    A layout that was measured more than once counts once, with its median. rank: mean Spearman
    correlation of predicted and measured times in groups of three and more. regret: how much
    slower than the best measured layout the one is that the prediction puts first; mean and worst
    over groups.
    """
    ranks, regrets = [], []
    for _, group in table.groupby(GROUP, dropna=False):
        layouts = group.groupby("layout")[["predicted_seconds", "measured_seconds"]].median()
        if len(layouts) < 2:
            continue
        chosen = layouts.loc[layouts.predicted_seconds.idxmin()]
        regrets.append(chosen.measured_seconds / layouts.measured_seconds.min() - 1)
        if len(layouts) >= 3 and layouts.measured_seconds.nunique() > 1:
            ranks.append(layouts.corr(method="spearman").iloc[0, 1])
    if not regrets:
        return {"groups": 0}
    return {
        "groups": len(regrets),
        "rank": float(np.nanmean(ranks)) if ranks else float("nan"),
        "regret %": float(np.mean(regrets) * 100),
        "worst regret %": float(np.max(regrets) * 100),
    }


def oom_report(runs: Predicted, oom: Predicted) -> Report:
    """Precision and recall of "out of memory" over rows that ran and rows that did not.

    Of all sources; of those with rows of both kinds, where alone precision says something; and of
    these the rows that state recomputation and microbatch, on which memory depends most.
    """
    failing = list(dict.fromkeys(c.row.source for c in oom.cases))
    both = {c.row.source for c in runs.cases} & set(failing)
    chosen: dict[str, Callable[[PublishedRow], bool]] = {
        source: lambda row, source=source: row.source == source for source in failing
    }
    chosen["sources with both"] = lambda row: row.source in both
    chosen["and stated"] = lambda row: row.source in both and states_activations(row)
    chosen["all"] = lambda row: True
    parts = {name: (runs.where(rule), oom.where(rule)) for name, rule in chosen.items()}
    lines = {name: _classified(_too_much(a), _too_much(b)) for name, (a, b) in parts.items()}
    return Report("out of memory", lines)


def states_activations(row: PublishedRow) -> bool:
    """Whether column or notes give recomputation and microbatch."""
    return bool(row.micro_batch and (row.recompute or facts_of(row).recompute))


def _too_much(predicted: Predicted) -> np.ndarray:
    """Whether the prediction, with what lies outside the allocator, exceeds the GPU's memory."""
    memory = np.array([float(c.gpu.memory) for c in predicted.cases]) / GIB
    return predicted.total_gibibytes > memory


def _classified(ran: np.ndarray, failed: np.ndarray) -> dict[str, float]:
    hits, false_alarms = int(failed.sum()), int(ran.sum())
    alarms = hits + false_alarms
    return {
        "ran": len(ran),
        "failed": len(failed),
        "alarms": alarms,
        "precision": hits / alarms if alarms else float("nan"),
        "recall": hits / len(failed) if len(failed) else float("nan"),
    }
