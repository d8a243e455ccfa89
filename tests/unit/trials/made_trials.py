"""Trials with made-up figures, for tests of what is said about them."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.trials.documents import (
    LossAgreement,
    Measured,
    Predicted,
    Stability,
    StepSpread,
    TrialRecord,
    TrialResult,
)

GIB = 2**30
MEMORY_BYTES = 80 * GIB


def record(name: str, *, gpus: int = 8, global_batch: int = 64) -> TrialRecord:
    return TrialRecord(
        name=name,
        overrides=(),
        gpus=gpus,
        global_batch=global_batch,
        sample_length=128,
        train_steps=1000,
        precision="bf16",
        training="same",
        run_id=f"run-{name}",
    )


def trial(
    name: str,
    step_seconds: float = 1.0,
    gib: float = 40.0,
    *,
    gpus: int = 8,
    jitter: float = 0.01,
    failures: Sequence[str] = (),
    drifts: bool = False,
    state: str = "DONE",
    eval_loss: float | None = None,
) -> TrialResult:
    """A trial that has made 18 steps of that many seconds, give or take `jitter` of them."""
    around = step_seconds * jitter
    spread = StepSpread(
        median=step_seconds,
        p10=step_seconds - around,
        p90=step_seconds + around,
        mean=step_seconds,
    )
    measured = Measured(
        steps=18,
        step_seconds=spread,
        samples_per_second=64 / step_seconds,
        peak_bytes=round(gib * GIB),
        peak_of_all_ranks=True,
        shares=None,
        eval_loss=eval_loss,
        eval_accuracy=None,
    )
    apart = LossAgreement(reference="first", steps=20, largest=0.02, bound=0.004, verdict="drifts")
    return TrialResult(
        record=record(name, gpus=gpus),
        state=state,
        over=True,
        measured=measured if state == "DONE" else None,
        stability=Stability(
            launches=1 + len(failures), failures=tuple(failures), preemptions=0, steps_again=0
        ),
        agreement=apart if drifts else None,
    )


def predicted(
    name: str,
    step_seconds: float,
    *,
    step_deviation: float | None = 0.1,
    layout_deviation: float | None = 0.1,
    fit_probability: float = 0.99,
) -> TrialResult:
    """A trial that only the planner knows, at 64 samples a step."""
    figures = Predicted(
        layout="tp 1",
        zero=1,
        offload="none",
        recompute="none",
        micro_batch=1,
        peak_bytes=40 * GIB,
        step_seconds=step_seconds,
        parts=None,
        step_deviation=step_deviation,
        layout_deviation=layout_deviation,
        fit_probability=fit_probability,
    )
    known = record(name).model_copy(update={"predicted": figures})
    return TrialResult(record=known, state="PLANNED", over=True)
