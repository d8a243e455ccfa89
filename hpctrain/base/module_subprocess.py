"""Runs a module of hpctrain that imports torch in a subprocess without GPUs; does not train.

Belongs here: starting the subprocess, its time limit, and errors that every such module can cause.
Does not belong here: what the module does, and the JSON that it prints (see `convert`, `verify`).
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.base.errors import HpctrainError, UsageError

_MISSING = re.compile(r"No module named '([\w.]+)'")
_RANK = re.compile(r"^(\[rank\d+\]: )+")  # torch.distributed puts it before a traceback's lines


@dataclass(frozen=True)
class ModuleProgram:
    """A module to run with `python -m`.

    For messages: `name` is the hpctrain command that runs the module, `extras` are the pip extras
    that install its packages. `python` is an interpreter that has these packages.
    """

    module: str
    name: str
    extras: str
    python: str


@dataclass(frozen=True)
class EndedProgram:
    """How a program ended; `last_line` of its stderr usually names the reason."""

    returncode: int
    stdout: str
    last_line: str

    @property
    def ending(self) -> str:
        """The exit code or the signal, for messages."""
        code = self.returncode
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


def run_module(
    program: ModuleProgram,
    *arguments: str,
    timeout_seconds: float,
    variables: Mapping[str, str] | None = None,
) -> EndedProgram:
    """Run a program to its end, with `variables` added to the environment.

    Raises UsageError when a package is missing, HpctrainError when the program cannot be started or
    exceeds the time limit. Any other failure is for the caller to report.
    """
    # -P: the working directory often contains files named like Python modules
    command = [program.python, "-P", "-m", program.module, *arguments]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **(variables or {})},
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        message = f"{program.name} took longer than {timeout_seconds:g} seconds"
        raise HpctrainError(message) from error
    except OSError as error:
        message = f"{program.name} cannot start {program.python}: {error.strerror}"
        raise HpctrainError(message) from error
    lines = [line for line in ended.stderr.splitlines() if line.strip()] or ["no message"]
    last_line = _RANK.sub("", lines[-1]).strip()
    if ended.returncode and (missing := _MISSING.search(last_line)):
        raise UsageError(
            f"{program.name} needs the trainer's packages: {program.python} has no {missing[1]}",
            hint=f"pip install 'hpctrain[{program.extras}]'",
        )
    return EndedProgram(ended.returncode, ended.stdout, last_line)
