"""Write an interpreter that starts the stand-in where a job script starts the trainer.

A profile or a caller of `prepare` names it as the Python of the run (`software.python`), and the
script stays what it is. Everything else, the supervisor and its probes, runs as it always does.
Does not belong here: the stand-in itself (`rank`).
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pydantic

import hpctrain

_TEXT = """\
#!/bin/sh
# Ranks that compute nothing take the place of the trainer.
if [ "$1 $2" = "-m hpctrain.train" ]; then
    shift 2
    PYTHONPATH={path} exec {python} -S {rank} {step_seconds} "$@"
fi
exec {python} "$@"
"""


def write_stand_in_interpreter(path: Path, step_seconds: float) -> Path:
    """Write the program to `path` and return it; a step of its ranks takes `step_seconds`.

    Without `site` (python(1), -S) a rank starts three times as fast; what the first rank of a node
    imports is found by PYTHONPATH, in which an installed hpctrain comes before that of this
    repository. Raises OSError.
    """
    rank = Path(__file__).resolve().with_name("rank.py")
    installed = (Path(one.__file__).resolve().parents[1] for one in (hpctrain, pydantic))
    directories = dict.fromkeys((*installed, rank.parents[3]))
    words = {
        "path": ":".join(map(str, directories)),
        "python": sys.executable,
        "rank": str(rank),
    }
    quoted = {name: shlex.quote(word) for name, word in words.items()}
    path.write_text(_TEXT.format(**quoted, step_seconds=step_seconds))
    path.chmod(0o755)
    return path
