"""Fit what no source of software says about memory; prints it for `calibration_table`.

    python -m bench.fit_memory --runs FILE.csv --oom FILE.csv

Two things are fitted. The allocator's fragmentation before PyTorch 2.1 is one factor for all
software of that time: BLOOM's trials print nvidia-smi, Aleph Alpha's tables say which layouts ran
and which were out of memory, the zero-bubble runs fitted. Each source alone chooses a factor, and
each is judged with it. What DeepSpeed leaves unused is fitted to BLOOM's trials alone. Belongs
here: these fits. Does not belong here: step times (`calibrate_planner`), bytes that follow from the
source of a program (`memory_facts`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from bench.memory_facts import BF16_ACCUMULATOR
from bench.predictions import GIB, Predicted, predict_file, reserved_on_ranks
from hpctrain.plan.cost.case import Case, Floats
from hpctrain.plan.cost.memory import peak_bytes

MARGIN_GIB = 2.5  # a configuration so far below the limit ran with probability 0.73
TOLERANCE = 0.05  # relative error at which a residual of nvidia-smi counts 1
SLACK = (1.0, 1.4)
NAMES = ("gradient_bytes", "more with bf16", "cached")
# (believed value, believed error) of each of NAMES
DEEPSPEED = ((2.5, 0.5), (5.0, 1.0), (0.05, 0.05))


@dataclass(frozen=True)
class Sources:
    """The rows of software without expandable segments."""

    trials: Predicted  # of BLOOM: nvidia-smi
    ran: Predicted  # layouts of Aleph Alpha
    failed: Predicted
    full: Predicted  # zero-bubble runs, which all fitted


def sources(runs: Predicted, oom: Predicted) -> Sources:
    ran, failed = (part.where(lambda row: "Aleph" in row.source) for part in (runs, oom))
    trials = runs.where(lambda row: "BLOOM" in row.source and row.memory_gb is not None)
    return Sources(trials, ran, failed, runs.where(lambda row: "Zero-Bubble" in row.source))


def fragmented(rows: Predicted, slack: float) -> Case:
    """The cases of all rows with this factor."""
    return replace(rows.case, software=replace(rows.case.software, slack=slack))


def capacities(rows: Predicted) -> Floats:
    """GiB of every row's GPU."""
    return np.array([float(c.gpu.memory) for c in rows.cases]) / GIB


def above(rows: Predicted, slack: float) -> Floats:
    """GiB that every row needs above what its GPU has."""
    return np.asarray(peak_bytes(fragmented(rows, slack))) / GIB - capacities(rows)


def seen(rows: Predicted, case: Case) -> Floats:
    """Logarithm of predicted over measured bytes of every row, as nvidia-smi shows them."""
    measured = np.array([c.row.memory_gb for c in rows.cases], dtype=float)
    held = reserved_on_ranks(case, capacities(rows) * GIB)["ends"]
    return np.asarray(np.log(held / GIB / measured))


def slack_of_trials(found: Sources) -> float:
    """What BLOOM's trials choose."""
    return _least(lambda slack: np.abs(seen(found.trials, fragmented(found.trials, slack))).sum())


def slack_of_layouts(found: Sources) -> float:
    """What sorts Aleph Alpha's layouts best: a logistic loss on the margin."""

    def loss(slack: float) -> float:
        wrong = above(found.ran, slack), -above(found.failed, slack)
        return float(sum(np.logaddexp(0, gib / MARGIN_GIB).sum() for gib in wrong))

    return _least(loss)


def slack_of_full(found: Sources) -> float:
    """The largest with which every zero-bubble run still fits."""
    grid = np.arange(*SLACK, 0.005)
    return float(max(slack for slack in grid if above(found.full, slack).max() <= 0))


def _least(loss: Callable[[float], float]) -> float:
    return float(minimize_scalar(loss, bounds=SLACK, method="bounded").x)


def fit_deepspeed(rows: Predicted) -> Floats:
    """What DeepSpeed's gradients take with unused blocks, and what is cached."""
    believed, errors = (np.array(column) for column in zip(*DEEPSPEED, strict=True))
    bf16 = np.array([c.row.precision == "bf16" for c in rows.cases])

    def loss(values: Floats) -> float:
        gradient, more, cached = values
        if values.min() < 0:
            return 1e9
        mesh = replace(rows.case.mesh, gradient_bytes=gradient + more * bf16)
        software = replace(rows.case.software, cached=cached)
        errors_seen = np.abs(seen(rows, replace(rows.case, mesh=mesh, software=software)))
        prior = 0.5 * float((((values - believed) / errors) ** 2).sum())
        return float(errors_seen.sum() / TOLERANCE) + prior

    options = dict(maxiter=2000)
    return np.asarray(minimize(loss, believed + 0.1, method="Nelder-Mead", options=options).x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--oom", type=Path, required=True)
    options = parser.parse_args()
    found = sources(predict_file(options.runs), predict_file(options.oom))
    print("fragmentation     chosen   BLOOM: median %   Aleph Alpha: precision  recall   too full")
    for name, choose in (
        ("BLOOM", slack_of_trials),
        ("Aleph Alpha", slack_of_layouts),
        ("zero-bubble", slack_of_full),
    ):
        slack = choose(found)
        errors = 100 * np.abs(np.expm1(seen(found.trials, fragmented(found.trials, slack))))
        right, wrong = (int((above(part, slack) > 0).sum()) for part in (found.failed, found.ran))
        recall = right / max(1, len(found.failed.cases))
        full = int((above(found.full, slack) > 0).sum())
        print(
            f"{name:16s} {slack:7.3f} {np.median(errors):17.2f} "
            f"{right / max(1, right + wrong):24.3f} {recall:7.3f} {full:10d}"
        )
    print("megatron-deepspeed")
    for name, value in zip(NAMES, fit_deepspeed(found.trials), strict=True):
        print(f"  {name:28s} {value:8.3f}")
    print(f"  (in use: more with bf16 {BF16_ACCUMULATOR})")


if __name__ == "__main__":
    main()
