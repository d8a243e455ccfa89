"""Fit the memory constants of two generations of software; prints them for `calibration_table`.

    python -m bench.fit_memory --runs FILE.csv --oom FILE.csv

Aleph Alpha's tables say only which configurations ran and which were out of memory: a logistic
loss on the margin to the GPU's memory. BLOOM's trials print nvidia-smi: absolute logarithms of
predicted over measured. Both lean on priors, since few of the constants are pinned down alone.
Belongs here: these two fits. Does not belong here: step times (`calibrate_planner`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from bench.predictions import GIB, Predicted, predict_file
from hpctrain.plan.cost.case import Floats
from hpctrain.plan.cost.memory import peak_bytes

MARGIN_GIB = 2.5  # a configuration so far below the limit ran with probability 0.73
TOLERANCE = 0.05  # relative error at which a BLOOM residual counts 1
STARTS = 6
NAMES = ("gradient_bytes", "main_bytes", "checkpoint_copies", "logit_bytes", "slack", "context_GiB")
# (believed value, believed error) of each of NAMES
SCALING = ((2.0, 0.5), (12.0, 0.1), (1.5, 0.7), (10.0, 4.0), (1.05, 0.05), (2.0, 1.0))
UNFUSED_NORMS = (8.0, 4.0)  # bytes per element that an eager norm keeps
DEEPSPEED = ((2.5, 0.7), (16.0, 3.0), (1.0, 0.5), (8.0, 3.0), (1.05, 0.05), (3.0, 1.5))
BF16_BESIDES = 4.0  # fp32 accumulator


def peaks(rows: Predicted, values: Floats, norm_bytes: float = 0.0) -> Floats:
    """GiB of every row with these constants."""
    gradient, main, copies, logit, slack, context = values
    eager = np.array([c.unfused_norms for c in rows.cases])
    bf16 = np.array(
        ["bloom" in c.row.source.lower() and c.row.precision == "bf16" for c in rows.cases]
    )
    software = replace(
        rows.case.software,
        main_bytes=main,
        checkpoint_copies=copies,
        logit_bytes=logit,
        slack=slack,
        context_bytes=context * GIB,
        norm_bytes=np.where(eager, norm_bytes, 0.0),
    )
    mesh = replace(rows.case.mesh, gradient_bytes=gradient + BF16_BESIDES * bf16)
    return np.asarray(peak_bytes(replace(rows.case, software=software, mesh=mesh))) / GIB


def best(loss: Callable[[Floats], float], beliefs: tuple[tuple[float, float], ...]) -> Floats:
    """Nelder-Mead from several starts around the beliefs."""
    believed, errors = (np.array(column) for column in zip(*beliefs, strict=True))
    slack = NAMES.index("slack")

    def whole(values: Floats) -> float:
        if values.min() < 0 or values[slack] < 1:
            return 1e9
        return loss(values) + 0.5 * float((((values - believed) / errors) ** 2).sum())

    found = []
    for seed in range(STARTS):
        start = believed * (1 + 0.2 * np.random.default_rng(seed).standard_normal(len(believed)))
        start[slack] = max(1.0, start[slack])
        found.append(minimize(whole, start, method="Nelder-Mead", options={"maxiter": 3000}))
    return np.asarray(min(found, key=lambda solution: solution.fun).x)


def fit_scaling(runs: Predicted, oom: Predicted) -> Floats:
    """Which of Aleph Alpha's configurations ran; the last value is of eager norms."""
    ran, failed = (part.where(lambda row: "Aleph" in row.source) for part in (runs, oom))
    limit = float(ran.cases[0].gpu.memory) / GIB

    def loss(values: Floats) -> float:
        above = (peaks(ran, values[:-1], values[-1]) - limit) / MARGIN_GIB
        below = (limit - peaks(failed, values[:-1], values[-1])) / MARGIN_GIB
        return float(np.logaddexp(0, above).sum() + np.logaddexp(0, below).sum())

    return best(loss, (*SCALING, UNFUSED_NORMS))


def fit_deepspeed(runs: Predicted) -> Floats:
    """nvidia-smi of BLOOM's trials."""
    rows = runs.where(lambda row: "BLOOM" in row.source and row.memory_gb is not None)
    measured = np.array([c.row.memory_gb for c in rows.cases], dtype=float)

    def loss(values: Floats) -> float:
        return float(np.abs(np.log(peaks(rows, values) / measured) / TOLERANCE).sum())

    return best(loss, DEEPSPEED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--oom", type=Path, required=True)
    options = parser.parse_args()
    runs, oom = predict_file(options.runs), predict_file(options.oom)
    for title, names, values in (
        ("scaling", (*NAMES, "norm_bytes (unfused norms)"), fit_scaling(runs, oom)),
        ("megatron-deepspeed", NAMES, fit_deepspeed(runs)),
    ):
        print(title)
        for name, value in zip(names, values, strict=True):
            print(f"  {name:28s} {value:8.3f}")


if __name__ == "__main__":
    main()
