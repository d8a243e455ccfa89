"""Write an interpreter that starts the stand-in where a job starts vLLM.

A profile or a spec of a test names it as the Python of the engine, and every script and command
line stays what it is. Does not belong here: the stand-in itself.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_TEXT = """\
#!/bin/sh
# Made by hpctrain for a sandbox: an engine that computes nothing takes the place of vLLM.
if [ "$1 $2 $3" = "-m vllm.entrypoints.cli.main serve" ]; then
    shift 3
    exec {python} -m hpctrain.serve.stand_in "$@"
fi
# `serve up` asks it whether it has vLLM (`hpctrain.serve.up`).
[ "$1 $2 $4" = "-P -c vllm" ] && exit 0
exec {python} "$@"
"""


def write_engine_interpreter(path: Path) -> Path:
    """Write the program to `path` and return it. Raises OSError."""
    path.write_text(_TEXT.format(python=shlex.quote(sys.executable)))
    path.chmod(0o755)
    return path
