"""Identify the container image of a launch, which its ranks cannot see from inside.

Belongs here: that. Does not belong here: comparing it with that of the run
(`hpctrain.records.software_lock`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_END_BYTES = 2**20
_DIGITS = 12


def image_identity(image: str) -> str:
    """Describe an image by its name and, for a file, a digest of its size, head and end.

    A whole image has tens of GiB. SquashFS and SIF have times and identifiers in their heads, and
    tables of contents at their ends, so that two builds differ there. A directory or an address
    stays a name: what is behind it may change unseen, unless the address has a digest.
    """
    path = Path(os.path.expandvars(image))
    try:
        if not path.is_file():
            return image
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for start in (0, max(0, size - _END_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_END_BYTES))
    except OSError:
        return image
    return f"{path.name} ({digest.hexdigest()[:_DIGITS]})"
