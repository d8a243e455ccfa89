"""Resume checkpoints that another version of megatron-core has saved, exactly or not at all.

Belongs here: which version saved a checkpoint, and what follows. Does not belong here: which pairs
of versions are exact (see `supported`), reading the files (one module per version).
"""

from __future__ import annotations

from pathlib import Path

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.checkpoints.resume_shares import read_head
from hpctrain.records.manifest import read_manifest
from hpctrain.train import software
from hpctrain.train.engines.megatron.core_versions.supported import (
    UNNAMED_VERSION,
    resumes_exactly,
    tested_numbers,
)


def saving_version(directory: Path) -> str:
    """Return the version of megatron-core that has saved the checkpoint."""
    head = read_head(directory)  # every rank asks, and the manifest lists the files of all
    manifest = head.manifest if head is not None else read_manifest(directory)
    return (manifest and manifest.library_version) or UNNAMED_VERSION


def check_versions(directory: Path) -> tuple[str, ...]:
    """Return a remark if another version has saved the checkpoint.

    Raises InvalidInputError if a resume across both versions is not known to be exact.
    """
    saved, now = saving_version(directory), software.megatron_core() or UNNAMED_VERSION
    if saved == now:
        return ()
    if resumes_exactly(saved, now):
        return (f"saved by megatron-core {saved}, resumed with {now}",)
    message = f"was saved by megatron-core {saved}, and this is {now}: not known to resume exactly"
    hint = (
        f"resume with megatron-core {saved}; only checkpoints of {tested_numbers()} can change to "
        "another of these versions (docs/engines.md)"
    )
    raise InvalidInputError([Problem(message, str(directory), hint=hint)])
