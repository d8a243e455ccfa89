"""Fit the constants of the cost model to published step times and write calibration.yaml.

    python -m bench.calibrate_planner --runs FILE.csv [--share 0.6] [--write]

Belongs here: the fit. Does not belong here: which constants are free (`calibration_table`), rows
(`published`), cases (`cases`). Rows are chosen by a hash of source, model, GPUs and layout, so
that the rest stays unseen (`planner_accuracy --split` uses the same rule). The residual of a row
is the logarithm of predicted over measured; every source weighs as the square root of its rows.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from scipy.optimize import least_squares

from bench.calibration_table import (
    ATTENTION,
    GENERIC,
    GENERIC_FROM,
    GPUS,
    SOFTWARE,
    Free,
    free_constants,
)
from bench.cases import CannotModel, RowCase, row_case
from bench.published import read_rows
from bench.rows_split import in_calibration
from hpctrain.plan.cost.case import Case, stack
from hpctrain.plan.cost.step import step_seconds
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.loader import PACKAGED_CALIBRATION, load_catalogue, packaged_json

TOLERANCE = 0.04  # relative error at which a residual counts 1
MISTRUST = 3.0  # residuals beyond so many tolerances count less (soft L1)

GPU_FIXED = dict(
    product_efficiency=0.7,
    fp8_efficiency=0.6,
    fp4_efficiency=0.4,
    flash_efficiency=0.45,
    batched_efficiency=0.25,
    scan_efficiency=0.05,
    memory_efficiency=0.85,
    nvlink_efficiency=0.7,
    tail_products=1.5e6,
    misaligned_cost=5.0,
)
SOFTWARE_FIXED = dict(
    flash_speed=1.0,
    softmax_passes=6.0,
    ep_overlap=0.3,
    expert_overhead=1.2e-3,  # middle of the releases that are fitted
    fused_loss=0.0,
    dummy_gradients=1.0,
    norm_bytes=0.0,
    checkpoint_copies=1.0,
    logit_bytes=4.0,
    slack=1.0,
    context_bytes=0.0,
)


def base_calibration(free: list[Free]) -> dict[str, dict[str, dict[str, Any]]]:
    """All constants before the fit, as the document's sections."""
    gpus: dict[str, dict[str, Any]] = {key: dict(GPU_FIXED) for key in GPUS}
    software = {
        key: {**SOFTWARE_FIXED, "description": family.description, **family.fixed}
        for key, family in SOFTWARE.items()
    }
    attention = {key: dict(values) for key, values in ATTENTION.items()}
    sections: dict[str, dict[str, dict[str, Any]]] = dict(
        gpus=gpus,
        software=software,
        attention=attention,
        dispatch={name: {} for name in ("alltoall", "allgather", "deepep", "hybridep")},
        graphs={"none": {"factor": 1.0}, "layer": {}, "full": {}},
    )
    return filled(sections, free, np.array([constant.start for constant in free]))


def filled(
    sections: dict[str, dict[str, dict[str, Any]]], free: list[Free], values: np.ndarray
) -> dict[str, dict[str, dict[str, Any]]]:
    """The sections with the free constants set."""
    for constant, value in zip(free, values, strict=True):
        for section, key, field in constant.targets:
            sections[section][key][field] = float(f"{value:.4g}")
    for entries in (sections["gpus"], sections["software"]):
        for entry in entries.values():
            entry.setdefault("provenance", "default: no open row depends on it")
    for entry in sections["attention"].values():
        entry.setdefault("flash_speed", 1.0)
        entry.setdefault("softmax_passes", 6.0)
    return sections


def document(sections: dict[str, dict[str, dict[str, Any]]]) -> Calibration:
    """The sections as the document; raises pydantic's ValidationError for a wrong figure."""
    graphs = {scope: entry["factor"] for scope, entry in sections["graphs"].items()}
    return Calibration.model_validate({**sections, "graphs": graphs})


@dataclass
class Fit:
    """The stacked cases of the rows, and how the constants enter them."""

    cases: list[RowCase]
    free: list[Free]

    def __post_init__(self) -> None:
        stacks = [[getattr(c.case, part) for c in self.cases] for part in PARTS]
        self.case = Case(*(stack(records) for records in stacks))
        self.measured = np.array([c.row.step_seconds for c in self.cases])
        self.no_overlap = np.asarray(self.case.software.dp_overlap) == 0
        self.masks = [self._masks(constant) for constant in self.free]
        counts = Counter(c.row.source for c in self.cases)
        self.weights = np.array([(12 / max(counts[c.row.source], 6)) ** 0.5 for c in self.cases])

    def _masks(self, constant: Free) -> list[tuple[str, str, np.ndarray]]:
        """(record, field, rows) that a constant sets."""
        found = []
        for section, key, field in constant.targets:
            rows = np.array([_uses(c, section, key, field) for c in self.cases])
            if rows.any():
                record = "machine" if field in MACHINE_FIELDS else "software"
                record = "graphs" if section == "graphs" else record
                found.append((record, _field(field), rows))
        return found

    def with_values(self, values: np.ndarray) -> Case:
        """The cases with these values of the free constants."""
        changed: dict[str, dict[str, np.ndarray]] = {"machine": {}, "software": {}}
        graphs = np.ones(len(self.cases))
        for value, masks in zip(values, self.masks, strict=True):
            for record, field, rows in masks:
                if record == "graphs":
                    graphs[rows] = value
                    continue
                column = changed[record].setdefault(
                    field, np.array(getattr(getattr(self.case, record), field))
                )
                column[rows] = value
        for field in ("layer_overhead", "expert_overhead"):
            column = changed["software"].setdefault(field, getattr(self.case.software, field))
            changed["software"][field] = column * graphs
        data = changed["software"].get("dp_overlap")
        if data is not None:
            changed["software"]["dp_overlap"] = np.where(self.no_overlap, 0.0, data)
        machine = replace(self.case.machine, **changed["machine"])
        return replace(
            self.case, machine=machine, software=replace(self.case.software, **changed["software"])
        )

    def residuals(self, values: np.ndarray) -> np.ndarray:
        predicted = step_seconds(self.with_values(values)).total
        rows = self.weights * np.log(predicted / self.measured) / TOLERANCE
        beliefs = [
            constant.weight * np.log(max(value, 1e-12) / constant.start)
            for constant, value in zip(self.free, values, strict=True)
        ]
        return np.concatenate([_softened(rows), np.clip(beliefs, -6, 6)])


PARTS = ("shape", "mesh", "machine", "software")
MACHINE_FIELDS = {
    *("product_efficiency", "fp8_efficiency", "fp4_efficiency", "flash_efficiency"),
    *("batched_efficiency", "memory_efficiency", "nvlink_efficiency", "tail_products"),
    *("misaligned_cost", "network_efficiency", "scan_efficiency"),
}


FIELDS = {
    "fp8_efficiency": "low_efficiency",
    "fp4_efficiency": "low_efficiency",
    "overlap": "ep_overlap",
}


def _field(field: str) -> str:
    return FIELDS.get(field, field)


def _uses(case: RowCase, section: str, key: str, field: str) -> bool:
    """Whether a row's case takes this constant."""
    if section == "gpus":
        own = case.gpu.name if case.gpu.name in GPUS else case.gpu.generation
        four = "fp4" in case.row.precision.lower()
        return own == key and (field, four) not in (
            ("fp8_efficiency", True),
            ("fp4_efficiency", False),
        )
    if section == "attention":
        return case.attention == key
    if section == "dispatch":
        return case.dispatcher == key and not case.overlapped_experts
    if section == "graphs":
        return case.graphs == key
    if field in ("flash", "flash_speed", "softmax_passes") and case.attention is not None:
        return False
    plain = case.software == key
    if field == "streaming" and case.unfused_norms:
        return key == f"{case.software}-unfused-norms"
    return plain


def _softened(residuals: np.ndarray) -> np.ndarray:
    """Soft L1 beyond MISTRUST tolerances, so that single odd rows do not bend the constants."""
    size = np.abs(residuals)
    beyond = np.sqrt(MISTRUST * np.maximum(2 * size - MISTRUST, 0.0))
    return np.sign(residuals) * np.where(size > MISTRUST, np.maximum(beyond, MISTRUST), size)


def load_cases(
    runs: list[Path], calibration: Calibration, share: float
) -> tuple[list[RowCase], list[str]]:
    """Cases of the rows to fit, and why others cannot be modelled."""
    catalogue, cases, refused = load_catalogue(), [], []
    for path in runs:
        for row in read_rows(path):
            if not row.step_seconds or not in_calibration(row, share):
                continue
            try:
                cases.append(row_case(row, catalogue, calibration))
            except CannotModel as error:
                refused.append(f"{path.name}:{row.line}: {error}")
    return cases, refused


def fit(cases: list[RowCase], free: list[Free]) -> np.ndarray:
    """The values of the free constants."""
    task = Fit(cases, free)
    low, high = (np.array([getattr(c, name) for c in free]) for name in ("low", "high"))
    start = np.clip([c.start for c in free], low + 1e-9, high - 1e-9)
    solution = least_squares(
        task.residuals, start, bounds=(low, high), x_scale=np.maximum(start, 1e-5), max_nfev=80
    )
    return np.asarray(solution.x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=Path, action="append", required=True)
    parser.add_argument("--share", type=float, default=0.6, help="of the rows that are fitted to")
    parser.add_argument("--write", action="store_true", help="write calibration.yaml")
    options = parser.parse_args()
    free = free_constants()
    sections = base_calibration(free)
    sections["software"][GENERIC] = generic(sections["software"])
    calibration = document(sections)
    cases, refused = load_cases(options.runs, calibration, options.share)
    values = fit(cases, free)
    sections = with_provenance(filled(sections, free, values), cases)
    sections["software"][GENERIC] = generic(sections["software"])
    for constant, value in zip(free, values, strict=True):
        print(f"{constant.name:42s} {constant.start:10.4g} -> {value:10.4g}")
    print(f"{len(cases)} rows fitted, {len(refused)} not modelled")
    if options.write:
        write(sections)


def generic(
    software: dict[str, dict[str, Any]], sources: Sequence[str] = GENERIC_FROM
) -> dict[str, Any]:
    """Software that nobody has measured: field by field the median of measured modern ones."""
    known = [software[key] for key in sources]
    numbers = {
        field: float(f"{np.median([entry[field] for entry in known]):.4g}")
        for field, value in known[0].items()
        if not isinstance(value, str)
    }
    memory = {key: software["mcore-plain"][key] for key in MEMORY_FIELDS}
    return {
        **numbers,
        **memory,
        "description": "Any software that was not measured: median of measured modern ones",
        "provenance": f"bench/calibrate_planner.py: median of {', '.join(sources)}",
    }


MEMORY_FIELDS = (
    *("gradient_bytes", "main_bytes", "dummy_gradients", "norm_bytes", "checkpoint_copies"),
    *("logit_bytes", "slack", "context_bytes"),
)


def with_provenance(
    sections: dict[str, dict[str, dict[str, Any]]], cases: list[RowCase]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Each entry says how many rows of which sources its figures were fitted to."""
    for section, key_of in (("gpus", _gpu_key), ("software", lambda case: case.software)):
        for key, entry in sections[section].items():
            used = Counter(c.row.source for c in cases if key_of(c) == key)
            if used:
                listed = ", ".join(f"{source} ({n})" for source, n in used.most_common(6))
                entry["provenance"] = f"bench/calibrate_planner.py: {listed}"
    return sections


def _gpu_key(case: RowCase) -> str:
    return case.gpu.name if case.gpu.name in GPUS else case.gpu.generation


HEADER = """\
# Shares of the data sheet that kernels and links reach; written by bench/calibrate_planner.py from
# published step times, memory constants by hand from runs that print bytes (docs/planner.md). What
# each field means: hpctrain/spec/calibration.py. `gpus`: by catalogue name, else by generation.
"""


def write(sections: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Replace the packaged file, after checking it against its schema."""
    checked = document(sections).model_dump(mode="json")
    yaml = YAML()
    yaml.width = 110
    with open(PACKAGED_CALIBRATION, "w", encoding="utf-8") as file:
        file.write(HEADER)
        yaml.dump(checked, file)
    PACKAGED_CALIBRATION.with_suffix(".json").write_text(packaged_json(PACKAGED_CALIBRATION))


if __name__ == "__main__":
    main()
