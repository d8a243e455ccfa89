"""Lock a directory of several runs, so that one process at a time submits them.

Belongs here: the lock of comparisons and sweeps. Does not belong here: what is submitted.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(directory: Path) -> int | None:
    """Return a descriptor that holds the lock until it is closed; None while another process does.

    The kernel frees it when its process ends in any way (flock(2)), so it is never stale. On
    a file system without locks everybody gets it.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor
