"""Converts weights into another form, for `hpctrain convert`.

Belongs here: starting the program that converts (it needs torch, this room must not), and the
error if it fails. Does not belong here: converting (see `hpctrain.convert`), output.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import HpctrainError
from hpctrain.base.module_subprocess import ModuleProgram, run_module
from hpctrain.records.conversions import ConversionFailure, ConversionReport

_TIMEOUT_SECONDS = 86400.0


def convert_weights(
    source: Path, target: Path, *, python: str = sys.executable
) -> ConversionReport:
    """Write the model of `source` to the new directory `target`; needs no GPU.

    `source` is a Hugging Face directory, one that this function has made for megatron-core, or a
    checkpoint of a run (`RUN/checkpoints/iter_N`). Raises InvalidInputError when it cannot be
    converted, HpctrainError when the packages are missing or the process fails.
    """
    program = ModuleProgram("hpctrain.convert", "convert", "megatron,huggingface", python)
    ended = run_module(program, str(source), str(target), timeout_seconds=_TIMEOUT_SECONDS)
    try:
        return ConversionReport.model_validate_json(ended.stdout)
    except ValidationError:
        pass
    try:
        failure = ConversionFailure.model_validate_json(ended.stdout)
    except ValidationError:
        if ended.returncode == -9:
            raise HpctrainError(
                "the process that converts was killed",
                hint="was its memory limited? The same command goes on where it was",
            ) from None
        message = f"the weights could not be converted ({ended.ending}): {ended.last_line}"
        raise HpctrainError(message) from None
    raise failure.error()
