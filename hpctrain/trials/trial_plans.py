"""Plans every variant of a comparison: the trials that can run, and why others cannot.

Belongs here: spec + variant -> plan and prepared run. Does not belong here: submitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base.errors import DoesNotFitError, InvalidInputError, LimitError, UsageError
from hpctrain.base.units import Duration
from hpctrain.job.input_checks import check_inputs
from hpctrain.job.prepare import (
    Prepared,
    load_inputs,
    load_knowledge,
    prepare,
    refuse_fields,
    refuse_untrainable,
)
from hpctrain.plan.abilities.trainable import untrainable_layout
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import gpu_price
from hpctrain.spec.loader import Loaded
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.trials.documents import (
    ComparisonRecord,
    Kind,
    Predicted,
    TrialRecord,
)
from hpctrain.trials.variants import (
    FEWEST_STEPS,
    Variant,
    training_digest,
    trial_name,
    trial_overrides,
)

# Errors of one variant that do not end the comparison.
REFUSALS = (InvalidInputError, DoesNotFitError, LimitError)
DEFAULT_WALLTIME = Duration(1800)


@dataclass(frozen=True)
class Subject:
    """The inputs of a comparison: spec, profile, overrides for all trials, and both documents."""

    spec: Path
    profile: str
    overrides: tuple[str, ...]
    loaded_spec: Loaded[RunSpec]
    loaded_profile: Loaded[ClusterProfile]

    @property
    def run(self) -> RunSpec:
        return self.loaded_spec.document

    @property
    def site(self) -> ClusterProfile:
        return self.loaded_profile.document


@dataclass(frozen=True)
class TrialRequest:
    """How the trials are run. Raises UsageError for too few steps."""

    kind: Kind
    variants: tuple[Variant, ...]
    steps: int
    weak: bool = False
    walltime: Duration | None = None

    def __post_init__(self) -> None:
        if self.steps < FEWEST_STEPS:
            raise UsageError(
                f"{self.steps} steps are too few to measure a rate", hint="20 is the default"
            )


def subject_of(spec: Path, profile: str, overrides: Sequence[str] = ()) -> Subject:
    """Load spec and profile. Raises InvalidInputError with the problems of both."""
    if str(spec) == "-":
        raise UsageError("a spec on standard input can be read only once", hint="give a file")
    return Subject(spec, profile, tuple(overrides), *load_inputs(spec, profile, overrides))


def predicted_record(subject: Subject, request: TrialRequest) -> ComparisonRecord:
    """Predict every variant; nothing is written."""
    from hpctrain.plan.planner import make_plan  # with NumPy, which only planning needs

    trials = []
    for variant in request.variants:
        own = None
        try:
            own, site = load_inputs(subject.spec, subject.profile, _overrides(subject, variant))
            refuse_fields(own, site)
            plan = make_plan(own.document, site.document, load_knowledge(site))
            refuse_untrainable(own, untrainable_layout(plan))
            trials.append(trial_record(variant, own.document, predicted=predicted_of(plan)))
        except REFUSALS as error:
            document = own.document if own else subject.run
            trials.append(trial_record(variant, document, refusal=error))
    return comparison_record(subject, request, tuple(trials), None)


def prepared_trial(
    subject: Subject, request: TrialRequest, variant: Variant, runs: Path
) -> tuple[TrialRecord, Prepared | None]:
    """Prepare one trial for submission, or record its refusal."""
    own = None
    try:
        given = _overrides(subject, variant)
        own, site = load_inputs(subject.spec, subject.profile, given)
        document = own.document
        name = trial_name(subject.run.name, variant.name)
        # Short jobs start early: half an hour, or less if spec or partition allow less.
        partition = site.document.slurm.partition(document.resources.partition)
        limits = (document.resources.walltime, partition.max_walltime if partition else None)
        shortest = min([DEFAULT_WALLTIME, *(limit for limit in limits if limit)])
        walltime = request.walltime or shortest
        short = trial_overrides(document, name, request.steps, walltime)
        prepared = prepare(subject.spec, subject.profile, (*given, *short), runs=runs)
        check_inputs(prepared.spec)
    except REFUSALS as error:
        return trial_record(variant, own.document if own else subject.run, refusal=error), None
    predicted = predicted_of(prepared.plan)
    record = trial_record(variant, document, predicted=predicted, run_id=prepared.run_id)
    # Two windows of rank times: the first step is in none, and rank 0 gets the times of a window
    # one step after its end.
    window_steps = max(1, (request.steps - 2) // 2)
    # Messages are not measured: the step in which they are takes longer than others.
    settings = {"rank_times_interval_steps": window_steps, "messages_interval_steps": None}
    train = prepared.train.model_copy(update=settings)
    return record, replace(prepared, train=train)


def _overrides(subject: Subject, variant: Variant) -> tuple[str, ...]:
    """Combine the overrides of one variant, without profiling unless it sets that.

    Traces would slow some steps, and the FLOPs of one engine are refused for another.
    """
    return (*subject.overrides, "profile=", *variant.overrides)


def predicted_of(plan: Plan) -> Predicted:
    """Record what a plan promises of a trial."""
    sure = plan.certainty
    return Predicted(
        layout=str(plan.layout),
        zero=plan.zero,
        offload=plan.offload,
        recompute=plan.recompute,
        micro_batch=plan.batch.micro_batch,
        peak_bytes=plan.memory[plan.peak_stage].total_bytes,
        step_seconds=plan.step_seconds,
        parts=plan.prediction.parts if plan.prediction else None,
        low_step_seconds=sure.low_step_seconds if sure else None,
        high_step_seconds=sure.high_step_seconds if sure else None,
        step_deviation=sure.step_deviation if sure else None,
        layout_deviation=sure.layout_deviation if sure else None,
        fit_probability=sure.fit_probability if sure else None,
    )


def trial_record(
    variant: Variant,
    spec: RunSpec,
    *,
    predicted: Predicted | None = None,
    run_id: str | None = None,
    refusal: Exception | None = None,
) -> TrialRecord:
    """Record one variant; `spec` is that of the whole run."""
    first_problem = None  # for a cell of a table; `hpctrain plan` shows all of them
    if isinstance(refusal, InvalidInputError):
        first_problem = str(refusal.problems[0]).splitlines()[0]
    elif refusal is not None:
        first_problem = str(refusal).splitlines()[0]
    return TrialRecord(
        name=variant.name,
        overrides=variant.overrides,
        gpus=spec.resources.gpus,
        global_batch=spec.batch.global_,
        sample_length=1 if spec.model.reads_images else spec.model.seq,
        # whole ones of the same work, where the first are smaller
        train_steps=-(-spec.batch.sizes.samples_after(spec.train_steps) // spec.batch.global_),
        precision=spec.precision,
        training=training_digest(spec),
        run_id=run_id,
        refusal=first_problem,
        predicted=predicted,
    )


def comparison_record(
    subject: Subject,
    request: TrialRequest,
    trials: tuple[TrialRecord, ...],
    comparison_id: str | None,
) -> ComparisonRecord:
    """Record the whole comparison."""
    return ComparisonRecord(
        kind=request.kind,
        comparison_id=comparison_id,
        run_name=subject.run.name,
        profile_name=subject.site.name,
        steps=request.steps,
        weak=request.weak,
        unit="images" if subject.run.model.reads_images else "tokens",
        gpu_memory_bytes=round(subject.site.gpu.memory),
        price_per_gpu_hour=gpu_price(subject.run, subject.site),
        trials=trials,
    )
