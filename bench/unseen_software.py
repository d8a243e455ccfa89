"""How near predictions are for software that no constant was fitted to.

    python -m bench.unseen_software --runs FILE.csv

For each family of software: fit all constants to the rows of the others, give the family the
median constants of the others (`calibrate_planner.generic`), and predict its rows. What its users
would know of it stays: whether attention is fused, what precision gradients have. Belongs here:
that experiment. Does not belong here: the fit (`calibrate_planner`) or figures
(`accuracy_figures`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from bench.accuracy_figures import Report, error_figures
from bench.calibrate_planner import base_calibration, document, filled, fit, generic, load_cases
from bench.calibration_table import GENERIC, GENERIC_FROM, free_constants
from bench.cases import RowCase, row_case
from bench.predictions import Predicted
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.loader import load_catalogue

FAMILIES = {
    "Megatron-LM 2021": ("megatron-2021",),
    "Megatron-DeepSpeed": ("megatron-deepspeed",),
    "Aleph Alpha Scaling": ("scaling", "scaling-unfused-norms"),
    "Megatron-LM forks 2023": ("megatron-2023",),
    "llm-foundry (FSDP)": ("llm-foundry", "fsdp"),
    "megatron-core, no overlap": ("mcore-plain",),
    "megatron-core 2024": ("mcore",),
    "NeMo": ("nemo",),
    "Megatron-Bridge": tuple(
        f"bridge-{release}" for release in ("25.09", "25.11", "26.02", "26.04", "26.06", "26.08")
    ),
}
KNOWN = ("flash", "scatter_gather", "gradient_bytes", "main_bytes", "fused_loss", "description")


def without(family: tuple[str, ...], cases: list[RowCase]) -> Calibration:
    """Constants fitted to the rows of all other software; the family has the generic ones."""
    free = free_constants()
    values = fit([case for case in cases if case.software not in family], free)
    sections = filled(base_calibration(free), free, values)
    sources = tuple(key for key in GENERIC_FROM if key not in family)
    unseen = generic(sections["software"], sources)
    for key in family:
        own = sections["software"][key]
        sections["software"][key] = {**unseen, **{name: own[name] for name in KNOWN}}
    sections["software"][GENERIC] = unseen
    return document(sections)


def errors(family: tuple[str, ...], cases: list[RowCase]) -> pd.Series:
    """Relative errors of the family's rows with constants that have not seen them."""
    calibration, catalogue = without(family, cases), load_catalogue()
    rows = [case.row for case in cases if case.software in family]
    predicted = Predicted([row_case(row, catalogue, calibration) for row in rows], [], [])
    measured = np.array([row.step_seconds for row in rows], dtype=float)
    return pd.Series(predicted.seconds / measured - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, action="append", required=True)
    options = parser.parse_args()
    sections = base_calibration(free_constants())
    sections["software"][GENERIC] = generic(sections["software"])
    cases, _ = load_cases(options.runs, document(sections), share=1.1)
    found = {name: errors(family, cases) for name, family in FAMILIES.items()}
    lines = {name: error_figures(part) for name, part in found.items()}
    lines["all"] = error_figures(pd.concat(list(found.values())))
    print(Report("step time of unseen software", lines).text())


if __name__ == "__main__":
    main()
