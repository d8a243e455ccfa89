"""Write an interpreter that starts the stand-in where a job script starts the trainer.

A profile or a caller of `prepare` names it as the Python of the run (`software.python`), and the
script stays what it is. Everything else, the supervisor and its probes, runs as it always does.
Does not belong here: the stand-in itself (see `hpctrain.train.stand_in`).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pydantic

import hpctrain

_TEXT = """\
#!/bin/sh
# Made by hpctrain for a sandbox: ranks that compute nothing take the place of the trainer.
if [ "$1 $2" = "-m hpctrain.train" ]; then
    shift 2
    PYTHONPATH={path} exec {python} -S {rank} {step_seconds} "$@"
fi
exec {python} "$@"
"""


def write_stand_in_interpreter(path: Path, step_seconds: float) -> Path:
    """Write the program to `path` and return it; a step of its ranks takes `step_seconds`.

    Without `site` (python(1), -S) a rank starts three times as fast; what the first rank of a node
    imports is found by PYTHONPATH. Raises OSError.
    """
    package = Path(hpctrain.__file__).resolve().parent
    directories = (package.parent, Path(pydantic.__file__).resolve().parents[1])
    words = {
        "path": ":".join(map(str, directories)),
        "python": sys.executable,
        "rank": str(package / "train" / "stand_in" / "rank.py"),
    }
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    path.write_text(_TEXT.format(**quoted, step_seconds=step_seconds))
    path.chmod(0o755)
    return path
