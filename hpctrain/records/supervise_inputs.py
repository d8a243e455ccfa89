"""Read only the `inputs` of `supervise.json`, with the standard library.

The check of a node starts on all nodes of a job at once, from a shared file system: it cannot
afford to import pydantic. Does not belong here: any other field (see `supervise_config`).
"""

from __future__ import annotations

import json
from pathlib import Path


def read_inputs(path: Path) -> tuple[str, ...]:
    """The files and directories that every node must be able to read; none if `path` is unreadable.

    Paths are not checked against the format version: a node is not to blame for it, and the
    supervisor has read the whole document before.
    """
    try:
        return tuple(json.loads(path.read_bytes()).get("inputs", ()))
    except (OSError, ValueError):
        return ()
