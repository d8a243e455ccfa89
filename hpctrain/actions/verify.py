"""`plan --verify`: what megatron-core really builds for each pipeline stage, beside the plan.

Belongs here: starting the process that builds (it needs torch and megatron-core, this room must
not), and what the plan says of the same quantities. Does not belong here: building (see
`hpctrain.train.engines.megatron.verify`), the comparison's documents (see
`hpctrain.engines.verification`), output.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import ValidationError

from hpctrain.engines.documents import train_config
from hpctrain.engines.kept import planned_kept_bytes
from hpctrain.engines.verification import Built, Verification, compare
from hpctrain.errors import HpctrainError, InvalidInputError, Problem, UsageError
from hpctrain.plan.documents import Plan
from hpctrain.spec.engines.registry import abilities_of
from hpctrain.spec.run import RunSpec

_MISSING = re.compile(r"No module named '([\w.]+)'")
_RANK = re.compile(r"^(\[rank\d+\]: )+")  # torch.distributed puts it before a traceback's lines


def verify_plan(
    spec: RunSpec,
    plan: Plan,
    *,
    python: str = sys.executable,
    timeout_seconds: float = 600.0,
) -> Verification:
    """Build one rank of each stage with megatron-core and compare; needs no GPU and little memory.

    `python` is the interpreter with the trainer's packages. Raises UsageError when the plan is not
    one that megatron-core trains, HpctrainError when the packages are missing or building fails.
    """
    program = _verifier(spec, plan)
    # 16 bits are 16 bits for what is counted here, and fp8 keeps its parameters in bf16
    precision = "fp32" if plan.precision == "fp32" else "bf16"
    config = train_config(spec, plan.model_copy(update={"precision": precision}), None)
    with tempfile.TemporaryDirectory(prefix="hpctrain-verify-") as directory:
        told = Path(directory, "train.json")
        told.write_text(config.model_dump_json())
        built = _run([python, "-P", "-m", program, str(told)], timeout_seconds)
    return compare(plan, planned_kept_bytes(spec, plan), built)


def _verifier(spec: RunSpec, plan: Plan) -> str:
    """Name the engine's program that builds stages. Raises UsageError where there is none."""
    program = abilities_of(plan.engine).verifier
    if program is None:
        raise UsageError(
            f"--verify builds with megatron-core, the engine is {plan.engine}",
            hint="leave out --verify",
        )
    if spec.model.family not in ("gpt", "llama", "bert"):
        raise UsageError(
            f"--verify builds gpt, llama and bert models, the family is {spec.model.family}",
            hint="leave out --verify",
        )
    return program


def _run(command: list[str], timeout_seconds: float) -> Built:
    """The document of the process; its CUDA devices are hidden, so that it needs none."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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
        raise HpctrainError(f"--verify took longer than {timeout_seconds:g} seconds") from error
    except OSError as error:
        raise HpctrainError(f"--verify cannot start {command[0]}: {error.strerror}") from error
    try:
        return Built.model_validate_json(ended.stdout)
    except ValidationError:
        raise _failure(command[0], ended.returncode, ended.stderr) from None


def _failure(python: str, returncode: int, stderr: str) -> HpctrainError:
    """The exception that stands for how the process ended."""
    lines = [line for line in stderr.splitlines() if line.strip()] or ["no message"]
    last = _RANK.sub("", lines[-1]).strip()
    if missing := _MISSING.search(last):
        return HpctrainError(
            f"plan --verify needs the trainer's packages: {python} has no {missing[1]}",
            hint="pip install 'hpctrain[megatron]'",
        )
    ending = f"exit code {returncode}" if returncode >= 0 else f"signal {-returncode}"
    if returncode == InvalidInputError.exit_code:
        return InvalidInputError([Problem(last)])
    return HpctrainError(f"megatron-core could not build the plan ({ending}): {last}")
