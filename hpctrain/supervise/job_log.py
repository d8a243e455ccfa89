"""The job's log: what the supervisor says and what srun says, on stderr.

Slurm has opened the log in the run directory, so it may be away or read-only for a moment: then the
supervisor goes on, and what waits is written with the next line. Belongs here: writing. Does not
belong here: the words.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque

# More lines than a supervisor writes in an hour; the oldest are given up.
_LONGEST_WAIT_LINES = 1000
_waiting: deque[str] = deque(maxlen=_LONGEST_WAIT_LINES)
# The reader of srun's stderr writes, too; a signal may interrupt a thread that is writing.
_turn = threading.RLock()


def write_log(text: str) -> None:
    """Write text with its line end into the job's log, or keep it until the log can be written."""
    with _turn:
        _waiting.append(text)
        with contextlib.suppress(OSError):
            while _waiting:
                sys.stderr.write(_waiting[0])
                sys.stderr.flush()
                _waiting.popleft()
