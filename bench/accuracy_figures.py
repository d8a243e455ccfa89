"""Statistics of predicted against measured.

Belongs here: errors, rank correlation, regret, precision and recall, and their table. Does not
belong here: predictions (`predictions`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from bench.predictions import GIB, Predicted

GROUP = ["source", "model", "gpu", "gpus", "global_batch", "seq_len", "precision"]


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
        width = max(len(name) for name in self.lines)
        head = f"{self.title:{width}s} " + " ".join(f"{name:>9s}" for name in names)
        rows = [
            f"{name:{width}s} " + " ".join(_cell(line.get(key)) for key in names)
            for name, line in self.lines.items()
        ]
        return "\n".join([head, *rows])


@dataclass(frozen=True)
class Both:
    """Step time and memory of the same rows."""

    time: Report
    stated: Report
    memory: Report

    def text(self) -> str:
        return "\n\n".join(part.text() for part in (self.time, self.stated, self.memory))

    def figures(self) -> dict[str, object]:
        parts = {"step time": self.time, "step time, layout stated": self.stated}
        parts["memory"] = self.memory
        return {name: part.figures() for name, part in parts.items()}


def _cell(value: float | None) -> str:
    if value is None or np.isnan(value):
        return f"{'-':>9s}"
    return f"{value:9.0f}" if float(value).is_integer() else f"{value:9.2f}"


def report_of(predicted: Predicted) -> Both:
    """The figures of measured rows."""
    table = predicted.table()
    timed = table[table.measured_seconds.notna()]
    sized = table[table.measured_gib.notna()]
    return Both(
        Report("step time", per_source(timed, time_figures)),
        Report("layout stated", {"all": time_figures(timed[timed.stated_layout.astype(bool)])}),
        Report("memory", per_source(sized, memory_figures)),
    )


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
    """Over groups of at least two layouts of one model, GPUs and batch.

    rank: mean Spearman correlation of predicted and measured times in groups of three and more.
    regret: how much slower than the best measured layout the one is that the prediction puts
    first; mean and worst over groups.
    """
    ranks, regrets = [], []
    for _, group in table.groupby(GROUP, dropna=False):
        if group.layout.nunique() < 2:
            continue
        chosen = group.loc[group.predicted_seconds.idxmin()]
        regrets.append(chosen.measured_seconds / group.measured_seconds.min() - 1)
        if len(group) >= 3 and group.measured_seconds.nunique() > 1:
            ranks.append(group.predicted_seconds.corr(group.measured_seconds, method="spearman"))
    if not regrets:
        return {"groups": 0}
    return {
        "groups": len(regrets),
        "rank": float(np.nanmean(ranks)) if ranks else float("nan"),
        "regret %": float(np.mean(regrets) * 100),
        "worst regret %": float(np.max(regrets) * 100),
    }


def oom_report(runs: Predicted, oom: Predicted) -> Report:
    """Precision and recall of "out of memory" over rows that ran and rows that did not."""
    ran, failed = _too_much(runs), _too_much(oom)
    lines = {}
    sources = list(dict.fromkeys(c.row.source for c in [*oom.cases]))
    for source in [*sources, "all"]:
        here = [_from(part, source) for part in (runs, oom)]
        lines[source] = _classified(ran[here[0]], failed[here[1]])
    return Report("out of memory", lines)


def _from(predicted: Predicted, source: str) -> np.ndarray:
    return np.array([source in ("all", c.row.source) for c in predicted.cases], dtype=bool)


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
