"""`compare` and `scale`: several short runs of one spec, or what the planner says of them.

    found = hpctrain.compare("gpt.yaml", "a100x1", engines="fsdp,deepspeed:zero2")
    print(found.recommendation.sentences)

Belongs here: the two verbs as functions. Does not belong here: how trials are planned
(`trial_plans`), run (`trials`) and read (`trial_results`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.actions.runs import runs_directory
from hpctrain.actions.trial_plans import Request, Subject, predicted_record, subject_of
from hpctrain.actions.trial_results import predicted_comparison
from hpctrain.actions.trials import POLL_SECONDS, Pursuit, Tell, look, start
from hpctrain.comparison.documents import Comparison
from hpctrain.comparison.trial_spec import FEWEST_STEPS, sizes
from hpctrain.comparison.variants import parse_variants
from hpctrain.errors import UsageError
from hpctrain.slurm.client import SlurmClient
from hpctrain.store.comparisons import ComparisonLayout
from hpctrain.units import Duration

DEFAULT_STEPS = 20


@dataclass(frozen=True)
class Manner:
    """How trials are run and waited for; see `Pursuit`."""

    at_a_time: int | None = None
    wait: bool = True
    keep_checkpoints: bool = False
    poll_seconds: float = POLL_SECONDS
    tell: Tell = lambda line: None


def engines_request(
    subject: Subject,
    engines: str,
    variants: Sequence[str],
    steps: int = DEFAULT_STEPS,
    walltime: Duration | None = None,
) -> Request:
    """What `--engines` and `--variant` ask for. Raises UsageError."""
    parsed = parse_variants(engines, variants, subject.run.engine.name)
    return Request("engines", parsed, _steps(steps), walltime=walltime)


def sizes_request(
    subject: Subject,
    gpus: Sequence[int],
    steps: int = DEFAULT_STEPS,
    walltime: Duration | None = None,
    *,
    weak: bool = False,
) -> Request:
    """What `--gpus` and `--weak` ask for. Raises UsageError."""
    return Request("sizes", sizes(subject.run, gpus, weak=weak), _steps(steps), weak, walltime)


def _steps(steps: int) -> int:
    if steps < FEWEST_STEPS:
        raise UsageError(f"{steps} steps say nothing about a pace", hint="20 is the default")
    return steps


def predict(subject: Subject, request: Request) -> Comparison:
    """The planner's word on every variant; no job, no file."""
    return predicted_comparison(predicted_record(subject, request))


def pursue(layout: ComparisonLayout, slurm: SlurmClient, manner: Manner) -> Comparison:
    """Submit what is left to submit, and wait."""
    return Pursuit(
        layout,
        slurm,
        manner.tell,
        at_a_time=manner.at_a_time,
        wait=manner.wait,
        keep_checkpoints=manner.keep_checkpoints,
        poll_seconds=manner.poll_seconds,
    ).run()


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
    """Run every variant for `steps` steps as a job and wait; `predicted`: ask the planner only.

    Raises what `hpctrain compare` reports; a variant that fails is in the result.
    """
    subject = subject_of(Path(spec), profile, overrides)
    request = engines_request(subject, engines, variants, steps)
    return _done(subject, request, predicted, runs, slurm, at_a_time)


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
    """The same spec on several numbers of GPUs: speed-up, efficiency, losses, where time goes."""
    subject = subject_of(Path(spec), profile, overrides)
    request = sizes_request(subject, gpus, steps, weak=weak)
    return _done(subject, request, predicted, runs, slurm, at_a_time)


def _done(
    subject: Subject,
    request: Request,
    predicted: bool,
    runs: Path | None,
    slurm: SlurmClient | None,
    at_a_time: int | None,
) -> Comparison:
    if predicted:
        return predict(subject, request)
    layout = start(subject, request, runs_directory(runs))
    return pursue(layout, slurm or SlurmClient(), Manner(at_a_time))


def open_comparison(directory: str | Path, slurm: SlurmClient | None = None) -> Comparison:
    """What is known now about the comparison in that directory; nothing is submitted."""
    return look(ComparisonLayout(Path(directory).absolute()), slurm or SlurmClient())
