"""Tests that need a GPU. Where there is none nothing of this directory is collected.

They start real processes, because a GPU cannot be used by what was forked from a process that has
looked at it: run them side by side, `make gpu`.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engines"))
collect_ignore_glob = [] if Path("/dev/nvidiactl").exists() else ["test_*.py"]
