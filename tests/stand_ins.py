"""Programs in Python that a test puts in the place of others."""

from __future__ import annotations

import sys
from pathlib import Path


def python_program(path: Path, body: str) -> Path:
    """Write an executable file that this interpreter runs, wherever it lies.

    The first line of a script holds no path with blanks, nor a long one (execve(2), Interpreter
    scripts): the shell reads the second line as a command, Python reads it as a string.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"""#!/bin/sh\n'''exec' "{sys.executable}" "$0" "$@"\n' '''\n{body}\n""")
    path.chmod(0o755)
    return path
