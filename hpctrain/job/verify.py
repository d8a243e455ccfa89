"""Compares the plan with what megatron-core builds for each pipeline stage, for `plan --verify`.

Belongs here: starting the program that builds (it needs torch and megatron-core, this room must
not), and the planned values of the same quantities. Does not belong here: building (see
`hpctrain.train.engines.megatron.verify`), the comparison's documents (see
`hpctrain.engines.verification`), output.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from hpctrain.base.errors import HpctrainError, InvalidInputError, Problem, UsageError
from hpctrain.base.module_subprocess import ModuleProgram, run_module
from hpctrain.base.units import short_bytes
from hpctrain.engines.train_json import train_config
from hpctrain.engines.verification import (
    BuiltModel,
    Verification,
    VerifiedStage,
    compare,
    planned_kept_bytes,
)
from hpctrain.page.text import LINE_WIDTH, columns_text, paragraph
from hpctrain.plan.job import TrainingJob
from hpctrain.spec.engines.registry import abilities_of


def verify_plan(
    job: TrainingJob, *, python: str = sys.executable, timeout_seconds: float = 600.0
) -> Verification:
    """Build one rank of each stage with megatron-core and compare; needs no GPU and little memory.

    `python` is the interpreter with the trainer's packages. Raises UsageError when the plan is not
    one that megatron-core trains, HpctrainError when the packages are missing or building fails.
    """
    spec, plan = job.spec, job.plan
    verifier, extra = abilities_of(plan.engine).verifier, abilities_of(plan.engine).extra or ""
    if verifier is None:
        raise UsageError(
            f"--verify builds with megatron-core, the engine is {plan.engine}",
            hint="leave out --verify",
        )
    if spec.model.family not in ("gpt", "llama", "bert"):
        raise UsageError(
            f"--verify builds gpt, llama and bert models, the family is {spec.model.family}",
            hint="leave out --verify",
        )
    # all 16-bit types are equal for what is counted here, and fp8 keeps its parameters in bf16
    precision = "fp32" if plan.precision == "fp32" else "bf16"
    config = train_config(replace(job, plan=plan.model_copy(update={"precision": precision})))
    program = ModuleProgram(verifier, "plan --verify", extra, python)
    with tempfile.TemporaryDirectory(prefix="hpctrain-verify-") as directory:
        file = Path(directory, "train.json")
        file.write_text(config.model_dump_json())
        one_thread = {"OMP_NUM_THREADS": "1"}
        ended = run_module(
            program, str(file), timeout_seconds=timeout_seconds, variables=one_thread
        )
    try:
        built = BuiltModel.model_validate_json(ended.stdout)
    except ValidationError:
        if ended.returncode == InvalidInputError.exit_code:
            raise InvalidInputError([Problem(ended.last_line)]) from None
        message = f"megatron-core could not build the plan ({ended.ending}): {ended.last_line}"
        raise HpctrainError(message) from None
    return compare(plan, planned_kept_bytes(job), built)


# -- Formats the comparison of a plan with what megatron-core built -----------------------------


def verification_lines(verification: Verification, width: int = LINE_WIDTH) -> list[str]:
    """Format one line per stage, a verdict, and the remarks."""
    # Tabulate parameters planned and built, and planned and measured bytes of a microbatch
    headers = ("STAGE", "RANK", "PLANNED", "BUILT", "", "KEPT", "MEASURED")
    cells = [
        (
            str(stage.index),
            str(stage.rank),
            f"{stage.planned_parameters:,}",
            f"{stage.built_parameters:,}",
            "equal" if stage.equal else "DIFFERENT",
            "-" if stage.planned_kept_bytes is None else short_bytes(stage.planned_kept_bytes),
            "-" if stage.measured_kept_bytes is None else short_bytes(stage.measured_kept_bytes),
        )
        for stage in verification.stages
    ]
    rows = columns_text(headers, cells, numeric=True)
    return [
        f"Verify    one rank of each stage, built by megatron-core "
        f"{verification.megatron_core_version} on no GPU",
        *rows,
        *paragraph(_verdict(verification), width=width),
        *(line for remark in verification.remarks for line in paragraph(remark, "- ", width=width)),
    ]


def _verdict(verification: Verification) -> str:
    wrong = [stage for stage in verification.stages if not stage.equal]
    if wrong:
        worst = max(wrong, key=lambda stage: abs(_excess(stage)))
        return (
            f"parameters differ on {len(wrong)} of {len(verification.stages)} stages, most on "
            f"stage {worst.index}: planned {_excess(worst):+,}. This is a fault of hpctrain: "
            "please report it with the spec"
        )
    count = len(verification.stages)
    counted = f"parameters are equal on {'the one stage' if count == 1 else f'all {count} stages'}"
    errors = [error for stage in verification.stages if (error := stage.kept_error) is not None]
    if not errors:
        return counted
    worst_error = max(errors, key=abs)
    return (
        f"{counted}; activations that one microbatch keeps are planned within "
        f"{abs(worst_error):.1%} of what was measured"
    )


def _excess(stage: VerifiedStage) -> int:
    return stage.planned_parameters - stage.built_parameters
