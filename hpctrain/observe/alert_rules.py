"""The packaged rules of Prometheus: which alerts there are, and what is recorded. Pure.

Belongs here: where they are, and variants of them for rehearsals. Does not belong here: what each
alert means (docs/alerts.md), the metrics (`families`), a Prometheus that loads them
(`hpctrain.sandbox.monitoring`).
"""

from __future__ import annotations

import re
from pathlib import Path

RULES = Path(__file__).with_name("rules") / "hpctrain-rules.yaml"
_WAIT = re.compile(r"^( +for: )(\d+)([smh])$", re.MULTILINE)
_UNIT_MILLISECONDS = {"s": 1_000, "m": 60_000, "h": 3_600_000}


def with_delays(rules: str, factor: float) -> str:
    """Multiply the time that each condition has to last before its alert fires."""

    def scaled(match: re.Match[str]) -> str:
        milliseconds = int(match[2]) * _UNIT_MILLISECONDS[match[3]] * factor
        return f"{match[1]}{round(milliseconds)}ms"

    return _WAIT.sub(scaled, rules)
