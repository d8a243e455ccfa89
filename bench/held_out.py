"""Predictions for sources that no constant was fitted to, one family of sources at a time.

Belongs here: leave one source out. For each family, all constants are fitted to the rows of the
others, and its rows are priced as `hpctrain plan` would price them, whose user has no constants of
his own either. Does not belong here: the fit (`calibrate_planner`), figures (`accuracy_figures`).
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from bench.calibrate_planner import base_calibration, document, fitted
from bench.calibration_table import free_constants
from bench.cases import CannotModel, RowCase, row_case
from bench.predictions import Predicted
from bench.published import PublishedRow, family_of, read_rows
from hpctrain.spec.calibration import Calibration
from hpctrain.spec.loader import load_catalogue

PROCESSES = 2


def constants_from(rows: Iterable[PublishedRow]) -> Calibration:
    """All constants, fitted to these rows alone; without rows, what is believed before any."""
    start = document(base_calibration(free_constants()))
    cases = modelled([row for row in rows if row.step_seconds], start)
    return fitted(cases) if cases else start


def modelled(
    rows: Iterable[PublishedRow], calibration: Calibration, product: bool = False
) -> list[RowCase]:
    """The cases of those rows that can be modelled."""
    catalogue, cases = load_catalogue(), []
    for row in rows:
        try:
            cases.append(row_case(row, catalogue, calibration, product))
        except CannotModel:
            continue
    return cases


def unseen(family: str, rows: list[PublishedRow]) -> list[RowCase]:
    """The rows of a family as `hpctrain plan` prices them, on constants that have not seen it."""
    constants = constants_from(row for row in rows if family_of(row.source) != family)
    own = [row for row in rows if family_of(row.source) == family]
    return modelled(own, constants, product=True)


def leave_one_source_out(path: Path) -> Predicted:
    """Every row of a file, each predicted without its own family; as many fits as families.

    Two processes: a fit takes most of a minute. Raises OSError when the file cannot be read.
    """
    rows = list(read_rows(path))
    families = list(dict.fromkeys(family_of(row.source) for row in rows))
    with ProcessPoolExecutor(PROCESSES) as pool:
        parts = list(pool.map(partial(unseen, rows=rows), families))
    return Predicted([case for part in parts for case in part], [], [])
