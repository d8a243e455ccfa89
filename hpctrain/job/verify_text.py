"""Formats the comparison of a plan with what megatron-core built."""

from __future__ import annotations

from textwrap import wrap

from hpctrain.base.units import short_bytes
from hpctrain.engines.verification import Verification, VerifiedStage
from hpctrain.page.text import LINE_WIDTH, columns_text


def verification_lines(verification: Verification, width: int = LINE_WIDTH) -> list[str]:
    """Format one line per stage, a verdict, and the remarks."""
    return [
        f"Verify    one rank of each stage, built by megatron-core "
        f"{verification.megatron_core_version} on no GPU",
        *_rows(verification.stages),
        *_wrapped("", _verdict(verification), width),
        *(line for remark in verification.remarks for line in _wrapped("- ", remark, width)),
    ]


def _rows(stages: tuple[VerifiedStage, ...]) -> list[str]:
    """Tabulate parameters planned and built, and planned and measured bytes of a microbatch."""
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
        for stage in stages
    ]
    return columns_text(headers, cells, numeric=True)


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


def _wrapped(bullet: str, text: str, width: int) -> list[str]:
    return wrap(text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet))
