"""`convert`: the same weights in another form.

Belongs here: starting the process that converts (it needs torch, this room must not), and saying
how it ended. Does not belong here: converting (see `hpctrain.convert`), output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from hpctrain.errors import HpctrainError
from hpctrain.store.conversions import ConversionFailure, ConversionReport

_PROGRAM = "hpctrain.convert"
Answer = TypeVar("Answer", bound=BaseModel)
_MISSING = re.compile(r"No module named '([\w.]+)'")


def convert_weights(
    source: Path, target: Path, *, python: str = sys.executable, timeout_seconds: float = 86400.0
) -> ConversionReport:
    """Write the model of `source` to the new directory `target`; needs no GPU, and memory for it.

    `source` is a Hugging Face directory, one that this function has made for megatron-core, or a
    checkpoint of a run (`RUN/checkpoints/iter_N`). Raises InvalidInputError when it cannot be
    converted, HpctrainError when the packages are missing or the process fails.
    """
    command = [python, "-P", "-m", _PROGRAM, str(source), str(target)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise HpctrainError(f"converting took longer than {timeout_seconds:g} seconds") from error
    except OSError as error:
        raise HpctrainError(f"cannot start {python}: {error.strerror}") from error
    if report := _parsed(ConversionReport, ended.stdout):
        return report
    if failure := _parsed(ConversionFailure, ended.stdout):
        raise failure.error()
    raise _failure(python, ended.returncode, ended.stderr)


def _parsed(kind: type[Answer], text: str) -> Answer | None:
    try:
        return kind.model_validate_json(text)
    except ValidationError:
        return None


def _failure(python: str, returncode: int, stderr: str) -> HpctrainError:
    """The exception that stands for how the process ended."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no message"]
    if missing := _MISSING.search(lines[-1]):
        return HpctrainError(
            f"convert needs the trainer's packages: {python} has no {missing[1]}",
            hint="pip install 'hpctrain[megatron,huggingface]'",
        )
    if returncode == -9:
        return HpctrainError(
            "the process that converts was killed", hint="is there memory for the whole model?"
        )
    ending = f"exit code {returncode}" if returncode >= 0 else f"signal {-returncode}"
    return HpctrainError(f"the weights could not be converted ({ending}): {lines[-1].strip()}")
