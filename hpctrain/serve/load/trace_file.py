"""Reading a trace of requests: CSV with arrival_seconds, prompt_tokens and output_tokens.

Belongs here: the file's format, with `file:line` of what is wrong. Does not belong here: what is
done with a trace (see `hpctrain.serve.plan.traffic`).
"""

from __future__ import annotations

import csv
import math
from itertools import pairwise
from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.serve.plan.traffic import Trace

COLUMNS = ("arrival_seconds", "prompt_tokens", "output_tokens")


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises InvalidInputError with all lines that are wrong."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError([Problem(f"cannot be read: {error}", file=str(path))]) from error
    name = str(path)
    if not rows or any(column not in rows[0] for column in COLUMNS):
        message = f"the first line must name the columns {', '.join(COLUMNS)}"
        raise InvalidInputError([Problem(message, file=name, line=1)])
    places = [rows[0].index(column) for column in COLUMNS]
    problems: list[Problem] = []
    arrivals: list[float] = []
    lengths: list[tuple[int, int]] = []
    for line, row in enumerate(rows[1:], 2):
        if not row:
            continue
        try:
            arrival = float(row[places[0]])
            prompt, output = (int(row[place]) for place in places[1:])
        except (ValueError, IndexError):
            problems.append(Problem("is not three numbers", file=name, line=line))
            continue
        if not math.isfinite(arrival) or prompt < 1 or output < 1:
            problems.append(Problem("needs lengths of at least 1 token", file=name, line=line))
        elif arrivals and arrival < arrivals[-1]:
            problems.append(Problem("comes before the line above it", file=name, line=line))
        arrivals.append(arrival)
        lengths.append((prompt, output))
    if not problems and (len(arrivals) < 2 or arrivals[-1] <= arrivals[0]):
        problems.append(Problem("needs two requests at different times", file=name))
    if problems:
        raise InvalidInputError(problems)
    # A trace may be repeated: its first request then comes as long after the last as in the mean.
    mean_gap = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)
    gaps = [mean_gap, *(late - early for early, late in pairwise(arrivals))]
    return Trace(
        gap_seconds=tuple(gaps),
        prompt_tokens=tuple(prompt for prompt, _ in lengths),
        output_tokens=tuple(output for _, output in lengths),
    )
