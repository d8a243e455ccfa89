"""Formats what would end a run in the queue or at its start: the sentence of `plan`.

Does not belong here: looking for it (`hpctrain.job.preflight`).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpctrain.job.preflight import Check, examine
from hpctrain.records.find import runs_directory


def ready_sentence(spec: Path, profile: str, overrides: Sequence[str]) -> str:
    """Say whether the run could be submitted, and the command that follows."""
    checks = examine(spec, profile, overrides, runs=runs_directory(None)).checks
    words = input_words(spec, profile, overrides)
    failing = [check for check in checks if check.state == "fails"]
    notes = [
        check.sentence for check in checks if check.state == "limited" and (check.subject != "plan")
    ]
    if failing:
        listed = ", ".join(_counted(check) for check in failing)
        return f"no: {listed}; `hpctrain validate {words}` lists them"
    said = "".join(f"; {note}" for note in notes)
    return f"yes: `hpctrain submit {words}`{said}"


def input_words(spec: Path, profile: str, overrides: Sequence[str]) -> str:
    """Join the words that give the same documents to another command."""
    settings = [word for one in overrides for word in ("--set", one)]
    return shlex.join(["-p", profile, str(spec), *settings])


def _counted(check: Check) -> str:
    if len(check.problems) == 1:
        return f"{check.subject} (1 problem)"
    return f"{check.subject} ({len(check.problems)} problems)"
