"""The documents that every job has in its run directory, whatever it runs.

Belongs here: these documents as texts. Does not belong here: making them (`prepare`,
`service_job`), what only a run has (`run_directory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.records.layout import RunLayout
from hpctrain.records.supervise_config import SuperviseConfig


@dataclass(frozen=True)
class JobDocuments:
    """`script` is the exact text, `signatures` is JSON; `prologue`: None where there is none."""

    script: str
    supervise: SuperviseConfig
    signatures: str
    prologue: str | None

    def texts(self, run: RunLayout) -> Mapping[Path, str]:
        """The files of a run directory with these documents."""
        found = {
            run.script: self.script,
            run.supervise_config: self.supervise.model_dump_json(indent=1),
            run.signatures: self.signatures,
        }
        return found if self.prologue is None else {**found, run.prologue: self.prologue}
