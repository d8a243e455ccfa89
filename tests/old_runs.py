"""Run directories that earlier versions of hpctrain have written, kept packed as they were.

Paths of the machine on which such a run was made stand in the archive as placeholders. Checkpoints
are untouched, because their digests cover every byte. The cache of the sample order is left out.
"""

from __future__ import annotations

import shlex
import sys
import tarfile
from pathlib import Path

from hpctrain.records.find import RunFiles
from hpctrain.records.layout import RunLayout

ARCHIVES = Path(__file__).resolve().parent / "unit" / "records" / "old_runs"
# Preempted at step 88, requeued, stopped by a person at step 214 of 400.
NOVEMBER_2026 = "2026-11"
STOPPED_STEP, TARGET_STEP = 214, 400
_WITH_PATHS = (".json", ".jsonl", ".sbatch", ".yaml")


def unpack(name: str, place: Path, python: Path = Path(sys.executable)) -> RunFiles:
    """Unpack an archive into the empty directory `place` and return its run."""
    with tarfile.open(ARCHIVES / f"{name}.tar.gz") as archive:
        archive.extractall(place)
    for path in place.rglob("*"):
        if path.suffix in _WITH_PATHS:
            text = path.read_text()
            # As rendering does: a path may have blanks, and only the script is read by a shell.
            filled_in = shlex.quote if path.suffix == ".sbatch" else str
            filled = text.replace("@PLACE@", filled_in(str(place)))
            filled = filled.replace("@PYTHON@", filled_in(str(python)))
            if filled != text:
                path.write_text(filled)
    (directory,) = (path for path in (place / "runs").iterdir() if path.is_dir())
    return RunFiles(RunLayout(directory))
