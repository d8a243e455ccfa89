"""Become a program that Slurm's signals do not reach: `python -m ...shield PARENT WORDS...`.

Slurm sends SIGTERM to all processes of a step at once, at a preemption, a time limit and scancel
(with proctrack/cgroup to its tasks only, with proctrack/linuxproc to all that descend from them).
An engine would refuse requests from that moment on, and its workers would end at once
(vllm/v1/executor/multiproc_executor.py), while the router still asks it. So these signals are
blocked before the engine begins, and all its processes inherit that (sigprocmask(2), execve(2)).
SIGINT is left: the replica program sends it when the replica is out of the router.

CPython opens the shield by itself: `multiprocessing.resource_tracker` unblocks SIGTERM after it has
started its process, whether it was blocked before or not. So every Python of an engine begins with
a `sitecustomize` that keeps these signals out of `signal.pthread_sigmask`. It lies in the directory
that the variable HPCTRAIN_SHIELD names; without one there is none.

The engine ends with the replica program (prctl(2), PR_SET_PDEATHSIG): its session is its own, where
proctrack/pgid would not find it. Does not belong here: anything after exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

SHIELDED = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT),
    *(signal.SIGXCPU, signal.SIGALRM),
)
DIRECTORY_VARIABLE = "HPCTRAIN_SHIELD"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# site(3) of Python: `sitecustomize` is imported at every start. One that a site has of its own is
# further behind in the path, and is run as well.
_SITECUSTOMIZE = """\
import os, signal, sys

_SHIELDED = frozenset({numbers})
_pthread_sigmask = signal.pthread_sigmask


def pthread_sigmask(how, mask):
    if how == signal.SIG_UNBLOCK:
        mask = set(mask) - _SHIELDED
    elif how == signal.SIG_SETMASK:
        mask = set(mask) | _SHIELDED
    return _pthread_sigmask(how, mask)


signal.pthread_sigmask = pthread_sigmask
_here = os.path.dirname(__file__)
_path = list(sys.path)
sys.path[:] = [entry for entry in _path if os.path.abspath(entry or ".") != _here]
_shield = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize
except ImportError:
    sys.modules["sitecustomize"] = _shield
finally:
    sys.path[:] = _path
"""


def become(words: list[str], parent: int) -> None:
    """Block the signals and become the program; `parent` is the process to end with."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SHIELDED)
    directory = os.environ.pop(DIRECTORY_VARIABLE, None)
    if directory is not None:
        _shield_pythons(Path(directory))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it has ended before it could be followed
    os.execvp(words[0], words)


def _shield_pythons(directory: Path) -> None:
    """Have every Python that descends from this process keep its shield. Raises OSError."""
    numbers = set(map(int, SHIELDED))
    (directory / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(numbers=numbers))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{before}" if before else str(directory)


if __name__ == "__main__":
    try:
        become(sys.argv[2:], int(sys.argv[1]))
    except OSError as error:
        print(f"OSError: {sys.argv[2]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)
