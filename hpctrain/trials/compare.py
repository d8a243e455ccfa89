"""Compares variants or sizes of one spec by short runs, or by predictions of the planner.

    found = hpctrain.compare("gpt.yaml", "a100x1", engines="fsdp,deepspeed:zero2")
    print(found.recommendation.sentences)

Belongs here: the two verbs as functions. Does not belong here: how trials are planned
(`trial_plans`), run and read (`run_trials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpctrain.base.units import Duration
from hpctrain.records.find import runs_directory
from hpctrain.records.sweeps import ComparisonLayout
from hpctrain.slurm.client import SlurmClient
from hpctrain.trials.documents import Comparison
from hpctrain.trials.run_trials import TrialRunner, look, predict, start
from hpctrain.trials.trial_plans import Subject, TrialRequest, subject_of
from hpctrain.trials.variants import parse_variants, sizes

DEFAULT_STEPS = 20


def engines_request(
    subject: Subject,
    engines: str,
    variants: Sequence[str],
    steps: int = DEFAULT_STEPS,
    walltime: Duration | None = None,
) -> TrialRequest:
    """Build the request of `--engines` and `--variant`. Raises UsageError."""
    parsed = parse_variants(engines, variants, subject.run.engine.name)
    return TrialRequest("engines", parsed, steps, walltime=walltime)


def sizes_request(
    subject: Subject,
    gpus: Sequence[int],
    steps: int = DEFAULT_STEPS,
    walltime: Duration | None = None,
    *,
    weak: bool = False,
) -> TrialRequest:
    """Build the request of `--gpus` and `--weak`. Raises UsageError."""
    return TrialRequest("sizes", sizes(subject.run, gpus, weak=weak), steps, weak, walltime)


def compare(
    spec: str | Path,
    profile: str,
    *,
    engines: str = "",
    variants: Sequence[str] = (),
    overrides: Sequence[str] = (),
    steps: int = DEFAULT_STEPS,
    predicted: bool = False,
    runs: Path | None = None,
    slurm: SlurmClient | None = None,
    at_a_time: int | None = None,
) -> Comparison:
    """Run every variant for `steps` steps as a job and wait; `predicted`: predictions only.

    Raises what `hpctrain compare` reports; a variant that fails is in the result.
    """
    subject = subject_of(Path(spec), profile, overrides)
    request = engines_request(subject, engines, variants, steps)
    return _predict_or_run(subject, request, predicted, runs, slurm, at_a_time)


def scale(
    spec: str | Path,
    profile: str,
    *,
    gpus: Sequence[int],
    weak: bool = False,
    overrides: Sequence[str] = (),
    steps: int = DEFAULT_STEPS,
    predicted: bool = False,
    runs: Path | None = None,
    slurm: SlurmClient | None = None,
    at_a_time: int | None = None,
) -> Comparison:
    """Run one spec on several numbers of GPUs: speed-up, efficiency, losses, shares of a step."""
    subject = subject_of(Path(spec), profile, overrides)
    request = sizes_request(subject, gpus, steps, weak=weak)
    return _predict_or_run(subject, request, predicted, runs, slurm, at_a_time)


def _predict_or_run(
    subject: Subject,
    request: TrialRequest,
    predicted: bool,
    runs: Path | None,
    slurm: SlurmClient | None,
    at_a_time: int | None,
) -> Comparison:
    if predicted:
        return predict(subject, request)
    layout = start(subject, request, runs_directory(runs))
    return TrialRunner(layout, slurm or SlurmClient(), at_a_time=at_a_time).run()


def open_comparison(directory: str | Path, slurm: SlurmClient | None = None) -> Comparison:
    """What is known now about the comparison in that directory; nothing is submitted."""
    return look(ComparisonLayout(Path(directory).absolute()), slurm or SlurmClient())
