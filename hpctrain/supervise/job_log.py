"""Write the messages of the supervisor and of srun into the job's log, which is stderr.

Slurm has opened the log in the run directory, so writing may fail for a while. Then the lines are
buffered and written with the next one.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque

# More lines than a supervisor writes in an hour; the oldest are dropped.
_MOST_BUFFERED_LINES = 1000
_buffered: deque[str] = deque(maxlen=_MOST_BUFFERED_LINES)
# The reader of srun's stderr writes, too; a signal may interrupt a thread that is writing.
_lock = threading.RLock()


def write_log(text: str) -> None:
    """Write text with its line end into the job's log, or buffer it until that is possible."""
    with _lock:
        _buffered.append(text)
        with contextlib.suppress(OSError):
            while _buffered:
                sys.stderr.write(_buffered[0])
                sys.stderr.flush()
                _buffered.popleft()
