"""Fit the constants of the cost model to published step times and write calibration.yaml.

    python -m bench.calibrate_planner --runs FILE.csv [--share 0.6] [--write]

Belongs here: the fit. Does not belong here: which constants are free (`calibration_table`), rows
(`published`), cases (`cases`). Rows are chosen by a hash of source, model, GPUs and layout, so
that the rest stays unseen (`planner_accuracy --split` uses the same rule). The residual of a row
is the logarithm of predicted over measured; every source weighs the same.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ruamel.yaml import YAML
from scipy.optimize import least_squares

from bench.calibration_table import (
    ATTENTION,
    CLUSTERS,
    DISPATCH,
    FABRICS,
    FLASH,
    GPUS,
    GRAPHS,
    HALF_HEADS,
    LAYER_LAUNCHES,
    NETWORK_EFFICIENCY,
    SOFTWARE,
    STRAGGLING,
    STREAMING,
    TAIL_PRODUCTS,
    Free,
    free_constants,
)
from bench.cases import CannotModel, RowCase, fabric_key, row_case
from bench.fit_jacobian import jacobian
from bench.published import read_rows
from bench.rows_split import in_calibration
from hpctrain.plan.cost.case import Case, Floats, stack
from hpctrain.plan.cost.from_spec import CONTEXT_BYTES
from hpctrain.plan.cost.step import step_seconds
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.files import packaged_json
from hpctrain.spec.loader import PACKAGED_CALIBRATION, load_catalogue

TOLERANCE = 0.04  # relative error at which a residual counts 1
MISTRUST = 3.0  # residuals beyond so many tolerances count less (soft L1)
ROWS = 8.0  # every source weighs as much as so many rows

GPU_FIXED = dict(
    product_efficiency=0.7,
    fp8_efficiency=0.65,
    fp4_efficiency=0.4,
    batched_efficiency=0.25,
    scan_efficiency=0.05,
    memory_efficiency=0.86,  # of an H200, measured (docs/gpu.md)
    nvlink_efficiency=0.77,  # all-gathers of nccl-tests
    misaligned_cost=5.0,
)
SOFTWARE_FIXED = dict(
    flash_speed=1.0,
    softmax_passes=6.0,
    tp_overlap=0.7,
    dp_overlap=0.9,  # all but the last bucket
    pp_overlap=0.9,
    ep_overlap=0.8,
    expert_overhead=3e-5,  # two products and an activation, 10 us each
    step_overhead=1e-3,
    beside_weights=0.0,
    fused_loss=0.0,
    sharding_efficiency=1.0,
    dummy_gradients=1.0,
    norm_bytes=0.0,
    checkpoint_copies=1.0,
    logit_bytes=4.0,
    slack=1.0,
    context_bytes=CONTEXT_BYTES,
)


def base_calibration(free: list[Free]) -> dict[str, dict[str, dict[str, Any]]]:
    """All constants before the fit, as the document's sections."""
    gpus: dict[str, dict[str, Any]] = {
        key: dict(
            GPU_FIXED,
            flash_efficiency=FLASH.get(group, 0.45),
            half_head=HALF_HEADS.get(group, 14.0),
            tail_products=TAIL_PRODUCTS.get(group, 1e6),
        )
        for key, group in GPUS.items()
    }
    software = {
        key: {
            **SOFTWARE_FIXED,
            "streaming": STREAMING[family.kind],
            "layer_overhead": LAYER_LAUNCHES[family.kind],
            "description": family.description,
            **family.fixed,
        }
        for key, family in SOFTWARE.items()
    }
    attention = {key: dict(values) for key, values in ATTENTION.items()}
    assumed = "assumed to be as InfiniBand: no open row has it"
    links = dict(network_efficiency=NETWORK_EFFICIENCY, straggling=STRAGGLING)
    fabrics: dict[str, dict[str, Any]] = {key: {**links, "provenance": assumed} for key in FABRICS}
    fabrics |= {
        key: {**links, "provenance": f"default: {words}"} for key, (_, words) in CLUSTERS.items()
    }
    sections: dict[str, dict[str, dict[str, Any]]] = dict(
        gpus=gpus,
        software=software,
        attention=attention,
        fabrics=fabrics,
        dispatch={name: dict(values) for name, values in DISPATCH.items()},
        graphs={name: dict(values) for name, values in GRAPHS.items()},
    )
    return filled(sections, free, np.array([constant.start for constant in free]))


def filled(
    sections: dict[str, dict[str, dict[str, Any]]], free: list[Free], values: np.ndarray
) -> dict[str, dict[str, dict[str, Any]]]:
    """The sections with the free constants set."""
    for constant, value in zip(free, values, strict=True):
        for one in constant.targets:
            written = one.scale * float(f"{value:.4g}")
            sections[one.section][one.key][one.field] = float(f"{written:.6g}")
    for entries in (sections["gpus"], sections["software"]):
        for entry in entries.values():
            entry.setdefault("provenance", "default: no open row depends on it")
    for entry in sections["attention"].values():
        entry.setdefault("softmax_passes", 6.0)
    return sections


def document(sections: dict[str, dict[str, dict[str, Any]]]) -> Calibration:
    """The sections as the document; raises pydantic's ValidationError for a wrong figure."""
    return Calibration.model_validate(sections)


@dataclass(frozen=True)
class Mask:
    """One field of a record of the stacked cases that a constant sets in some rows."""

    record: str
    field: str
    rows: np.ndarray
    scale: float


@dataclass
class Fit:
    """The stacked cases of the rows, and how the constants enter them."""

    cases: list[RowCase]
    free: list[Free]

    def __post_init__(self) -> None:
        stacks = [[getattr(c.case, part) for c in self.cases] for part in PARTS]
        self.case = Case(*(stack(records) for records in stacks))
        self.measured = np.array([c.row.step_seconds for c in self.cases])
        self.masks = [self._masks(constant) for constant in self.free]
        counts = Counter(c.row.source for c in self.cases)
        self.weights = np.array([(ROWS / counts[c.row.source]) ** 0.5 for c in self.cases])

    def _masks(self, constant: Free) -> list[Mask]:
        """Which figures of which rows a constant sets."""
        found = []
        for one in constant.targets:
            rows = np.array([_uses(c, one.section, one.key, one.field) for c in self.cases])
            if rows.any():
                record = "machine" if one.section in ("gpus", "fabrics") else "software"
                found.append(Mask(record, _field(one.section, one.field), rows, one.scale))
        return found

    def with_values(self, values: np.ndarray) -> Case:
        """The cases with these values of the free constants."""
        changed: dict[str, dict[str, np.ndarray]] = {"machine": {}, "software": {}}
        for value, masks in zip(values, self.masks, strict=True):
            for mask in masks:
                column = changed[mask.record].setdefault(
                    mask.field, np.array(getattr(getattr(self.case, mask.record), mask.field))
                )
                column[mask.rows] = mask.scale * value
        machine = replace(self.case.machine, **changed["machine"])
        return replace(
            self.case, machine=machine, software=replace(self.case.software, **changed["software"])
        )

    def residuals(self, values: np.ndarray) -> np.ndarray:
        predicted = np.asarray(step_seconds(self.with_values(values)).total)
        rows = self.of_rows(predicted, np.arange(len(predicted)))
        return np.concatenate([rows, self.beliefs(values)])

    def of_rows(self, predicted: Floats, rows: np.ndarray) -> np.ndarray:
        """Residuals of these rows, from their predictions."""
        errors = np.log(predicted / self.measured[rows])
        return _softened(self.weights[rows] * errors / TOLERANCE)

    def beliefs(self, values: np.ndarray) -> np.ndarray:
        """Residuals of the constants: how far they are from what was believed."""
        found = [
            constant.weight * np.log(max(value, 1e-12) / constant.start)
            for constant, value in zip(self.free, values, strict=True)
        ]
        return np.clip(found, -6, 6)

    def touched(self, constant: int) -> np.ndarray:
        """Which rows a constant enters, as their numbers."""
        masks = [mask.rows for mask in self.masks[constant]]
        return np.flatnonzero(np.any(masks, axis=0)) if masks else np.zeros(0, dtype=int)


PARTS = ("shape", "mesh", "machine", "software")
FIELDS = {
    ("gpus", "fp8_efficiency"): "low_efficiency",
    ("gpus", "fp4_efficiency"): "low_efficiency",
    ("dispatch", "efficiency"): "dispatch_efficiency",
    ("graphs", "layers"): "launched_layers",
    ("graphs", "experts"): "launched_experts",
}


def _field(section: str, field: str) -> str:
    return FIELDS.get((section, field), field)


def _uses(case: RowCase, section: str, key: str, field: str) -> bool:
    """Whether a row's case takes this constant."""
    if section == "gpus":
        own = case.gpu.name if case.gpu.name in GPUS else case.gpu.generation
        four = "fp4" in case.row.precision.lower()
        return own == key and (field, four) not in (
            ("fp8_efficiency", True),
            ("fp4_efficiency", False),
        )
    if section == "fabrics":
        return fabric_key(case.row) == key
    if section == "attention":
        return case.attention == key
    if section == "dispatch":
        return (case.dispatcher or "alltoall") == key
    if section == "graphs":
        return case.graphs == key
    if field in ("flash", "flash_speed", "softmax_passes") and case.attention is not None:
        return False
    return case.software == key


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


def fitted(cases: list[RowCase], start: np.ndarray | None = None) -> Calibration:
    """All constants, fitted to these rows. `start`: values of a fit to nearly the same rows."""
    free = free_constants()
    sections = filled(base_calibration(free), free, fit(cases, free, start))
    return document(with_provenance(sections, cases))


def fit(cases: list[RowCase], free: list[Free], start: np.ndarray | None = None) -> np.ndarray:
    """The values of the free constants; `start` shortens the search for them."""
    task = Fit(cases, free)
    low, high = (np.array([getattr(c, name) for c in free]) for name in ("low", "high"))
    believed = np.array([c.start for c in free])
    solution = least_squares(
        task.residuals,
        np.clip(believed if start is None else start, low + 1e-9, high - 1e-9),
        jac=partial(jacobian, task),
        bounds=(low, high),
        x_scale=np.maximum(believed, 1e-5),
        max_nfev=60 if start is None else 12,
        ftol=1e-5,
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
    cases, refused = load_cases(options.runs, document(sections), options.share)
    values = fit(cases, free)
    sections = with_provenance(filled(sections, free, values), cases)
    for constant, value in zip(free, values, strict=True):
        print(f"{constant.name:42s} {constant.start:10.4g} -> {value:10.4g}")
    print(f"{len(cases)} rows fitted, {len(refused)} not modelled")
    if options.write:
        write(sections)


def with_provenance(
    sections: dict[str, dict[str, dict[str, Any]]], cases: list[RowCase]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Each entry says how many rows of which sources its figures were fitted to."""
    keys = dict(gpus=_gpu_key, software=lambda case: case.software, fabrics=_fabric)
    for section, key_of in keys.items():
        for key, entry in sections[section].items():
            used = Counter(c.row.source for c in cases if key_of(c) == key)
            if used:
                listed = ", ".join(f"{source} ({n})" for source, n in used.most_common(6))
                entry["provenance"] = f"bench/calibrate_planner.py: {listed}"
    return sections


def _fabric(case: RowCase) -> str:
    return fabric_key(case.row)


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
