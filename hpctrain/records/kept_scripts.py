"""Copies of the job scripts that a run was submitted with (`scripts/`), one for each text.

`job.sbatch` is the script of the next submission, which a person may have edited; Slurm keeps its
own copy only while the job is there. Belongs here: keeping and reading the copies. Does not belong
here: submitting, comparing scripts.
"""

from __future__ import annotations

import hashlib

from hpctrain.base.durable import replace_bytes
from hpctrain.records.layout import RunLayout


def keep_script(run: RunLayout) -> str | None:
    """Keep a copy of the script, unless that text has been kept; returns its SHA-256.

    None when that is not possible: a submission does not fail for its copy.
    """
    try:
        text = run.script.read_bytes()
        digest = hashlib.sha256(text).hexdigest()
        kept = run.kept_script(digest)
        if not kept.exists():
            run.make_directory(kept.parent)
            replace_bytes(kept, text, mode=0o600)
    except OSError:
        return None
    return digest


def read_kept_script(run: RunLayout, sha256: str) -> str | None:
    """Read the script of that digest; None where no copy of it was kept."""
    try:
        return run.kept_script(sha256).read_text(errors="replace")
    except OSError:
        return None
