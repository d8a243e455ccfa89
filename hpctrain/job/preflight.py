"""Look at everything that would end a run in the queue or at its start: one list of checks.

`validate SPEC -p PROFILE`, `plan`, `submit` and `submit --dry-run` take their verdict from here:
`validate` shows the list, `plan` its end, `submit` refuses what fails, all at once.
Belongs here: which checks there are, and in which order. Does not belong here: how data is checked
(`input_checks`, `hpctrain.records.datasets`), planning, what nodes find when a launch begins
(`hpctrain.supervise.preflight`, `hpctrain.train.preflight`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.disk_usage import directory_facts
from hpctrain.base.errors import (
    DoesNotFitError,
    HpctrainError,
    InvalidInputError,
    LimitError,
    Problem,
    RefusedPlanError,
)
from hpctrain.base.frozen import Frozen
from hpctrain.base.units import short_bytes
from hpctrain.job.footprint import footprint_of
from hpctrain.job.input_checks import check_code, check_pretrained, check_samples, sidecar_notes
from hpctrain.job.prepare import (
    Prepared,
    PreparedRun,
    load_any_inputs,
    load_knowledge,
    refuse_fields,
)
from hpctrain.job.render.containers import run_container
from hpctrain.job.render.environment import environment_of, login_names
from hpctrain.job.supervisor_settings import notify_settings
from hpctrain.job.trainer_run import (
    PreparedTrainerRun,
    command_problem,
    prepare_any,
    trainer_lines,
)
from hpctrain.notify.channels import channel_problems
from hpctrain.spec.job_text import expanded_text
from hpctrain.spec.loader import Loaded
from hpctrain.spec.notify import joined_notify
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profile.software import ContainerProfile
from hpctrain.spec.run import RunSpec
from hpctrain.spec.trainer import TrainerRunSpec

AnySpec = Loaded[RunSpec] | Loaded[TrainerRunSpec]
State = Literal["works", "limited", "fails", "unknown"]
# Longer runs need data of their own, or the word that they do not.
MADE_UP_STEPS = 100
_PYTHON_SECONDS = 20.0
_WATCH_SECONDS = 3600.0
_PLAN = "plan"
# Prints which of its arguments cannot be found; importing torch would take seconds.
_FIND = """
import importlib.util, json, sys
def found(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
print(json.dumps([name for name in sys.argv[1:] if not found(name)]))
"""


class Check(Frozen):
    """What was looked at, what was found, and the problems if a run would fail."""

    subject: str
    state: State
    sentence: str
    problems: tuple[Problem, ...] = ()


def _check(subject: str, state: State, sentence: str, *problems: Problem) -> Check:
    return Check(subject=subject, state=state, sentence=sentence, problems=problems)


@dataclass(frozen=True)
class Examined:
    """All checks of one run; `prepared` is None if it cannot be planned, and `errors` say why."""

    checks: tuple[Check, ...]
    prepared: PreparedRun | None = None
    errors: tuple[HpctrainError, ...] = ()

    def refuse(self, *subjects: str) -> None:
        """Raise what planning raised if that is all, else all problems at once, if any.

        With `subjects` those of no other count. A run without a plan has the exit code of that in
        any case.
        """
        checks = [one for one in self.checks if not subjects or one.subject in subjects]
        problems = [problem for check in checks for problem in check.problems]
        if len(self.errors) == 1 and all(one.subject == _PLAN for one in checks if one.problems):
            raise self.errors[0]
        if problems:
            error = InvalidInputError(problems)
            error.exit_code = max([error.exit_code, *(one.exit_code for one in self.errors)])
            raise error


def examine(
    spec: Path,
    profile: str,
    overrides: Sequence[str] = (),
    *,
    runs: Path,
    template_directory: Path | None = None,
) -> Examined:
    """Read, plan, render and check. Raises InvalidInputError for documents that cannot be read."""
    loaded_spec, loaded_profile = load_any_inputs(spec, profile, overrides)
    try:
        prepared = prepare_any(
            spec, profile, overrides, runs=runs, template_directory=template_directory
        )
    except (InvalidInputError, DoesNotFitError, LimitError) as error:
        if isinstance(loaded_spec.document, TrainerRunSpec):
            raise
        return unplanned(error, loaded_spec, loaded_profile)
    return Examined(checks_of(prepared, runs), prepared)


def unplanned(
    error: HpctrainError, spec: Loaded[RunSpec], profile: Loaded[ClusterProfile]
) -> Examined:
    """Check a run that cannot be planned or rendered; `error` says why.

    What the trainer lacks and what has no layout are found one without the other, and told at once.
    """
    errors = [error]
    try:
        if isinstance(error, RefusedPlanError):
            refuse_fields(spec, profile)
        else:
            from hpctrain.plan.planner import make_plan  # with NumPy, which only planning needs

            with spec.placing():
                make_plan(spec.document, profile.document, load_knowledge(profile))
    except (InvalidInputError, RefusedPlanError) as other:
        if str(other) != str(error):
            errors.append(other)
    checks = (*(_refused(one, spec) for one in errors), *input_checks(spec, profile))
    return Examined(checks, errors=tuple(errors))


def checks_of(
    prepared: PreparedRun, runs: Path, inputs: tuple[Check, ...] | None = None
) -> tuple[Check, ...]:
    """Check a run that is planned and rendered. Reads files; asks Slurm nothing.

    `inputs` are the `input_checks` of another run with the same data, model and engine.
    """
    if isinstance(prepared, PreparedTrainerRun):
        return _trainer_checks(prepared, runs)
    assert isinstance(prepared, Prepared)
    if inputs is None:
        inputs = input_checks(prepared.spec, prepared.profile, prepared.facts.python)
    plan = prepared.plan
    peak = plan.memory[plan.peak_stage].total_bytes
    words = (
        f"{plan.layout} on {plan.nodes}: {short_bytes(peak)} of "
        f"{short_bytes(plan.gpu_memory_bytes)} a GPU"
    )
    return (
        _check(_PLAN, "works", words),
        *(_check(_PLAN, "limited", warning) for warning in plan.warnings),
        *inputs,
        *_unset(prepared),
        _space(prepared, runs),
        *_watch(prepared, runs),
    )


# Lines of `trainer_lines` that are no findings, and how they begin in the list.
_OF_A_TRAINER: tuple[tuple[str, State, str], ...] = (
    ("Next", "limited", "next is"),
    ("Hangs", "works", "hangs are noticed"),
    ("Unseen", "limited", "unseen are"),
    ("Done", "works", "done"),
    ("First", "works", "the first launch runs"),
    ("Later", "works", "later ones run"),
)


def _trainer_checks(prepared: PreparedTrainerRun, runs: Path) -> tuple[Check, ...]:
    """Check a run with a trainer of its own: what can be known of its command from here."""
    document, profile = prepared.spec.document, prepared.profile
    software, python = profile.document.software, prepared.facts.python
    container = run_container(document.container, software.container)
    if software.python is not None or software.activate is not None:
        python = _interpreter_here(software.interpreter(python))
    lines = dict(trainer_lines(prepared))
    plan, problem = prepared.plan, command_problem(prepared)
    message = f"`trainer.command`: {problem}"
    return (
        _check(_PLAN, "works", str(plan.nodes)),
        _check(_PLAN, "limited", f"memory {lines['Memory']}"),
        _check("trainer", "works", f"level {lines['Level']}"),
        *(
            _check(_PLAN if label == "Next" else "trainer", state, f"{words} {lines[label]}")
            for label, state, words in _OF_A_TRAINER
            if label in lines
        ),
        *(_check(_PLAN, "limited", warning) for warning in plan.warnings),
        *(_check("trainer", "unknown", f"it needs {need}") for need in document.trainer.needs),
        *(
            []
            if problem is None
            else [_failed("trainer", prepared.spec.problem("trainer.command", message))]
        ),
        *_interpreter(profile, python),
        _software((), None, container, python, profile.file),
        *_tracking(prepared.spec, python),
        *_image(container),
        *_channels(prepared.spec, profile),
        *_unset(prepared),
        *_room(prepared, runs),
        *_watch(prepared, runs),
    )


def _unset(prepared: PreparedRun) -> Iterator[Check]:
    """Find variables that fields need in the job, which inherits them from here and finds none."""
    job, facts = prepared.job, prepared.facts
    environment = environment_of(job, facts.python, facts.setup, facts.gpu_variables)
    for field, name, passed in login_names(job, environment):
        if passed and not os.environ.get(name):
            message = f"`{field}`: jobs inherit {name} from here, where it is not set"
            problem = prepared.profile.problem(field, message, f"export {name}, or write its value")
            yield _failed("environment", problem)


def input_checks(
    spec: Loaded[RunSpec], profile: Loaded[ClusterProfile], python: str = sys.executable
) -> tuple[Check, ...]:
    """Check what needs no plan: data, weights, the software that trains, its image."""
    document, software = spec.document, profile.document.software
    abilities = document.engine.abilities
    container = run_container(document.container, software.container)
    if software.python is not None or software.activate is not None:
        python = _interpreter_here(software.interpreter(python))
    weights = []
    if document.model.pretrained is not None:
        words = f"{document.model.pretrained} has the model of the spec"
        weights.append(_tried(spec, "model.pretrained", words, check_pretrained))
    if document.model.counted is not None and document.model.counted.remote_code is not None:
        words = "the model's own code is what was read"
        weights.append(_tried(spec, "model.counted.remote_code", words, check_code))
    return (
        _data(spec),
        *weights,
        *_interpreter(profile, python),
        _software(abilities.packages, abilities.extra, container, python, profile.file),
        *_tracking(spec, python),
        *_image(container),
        *_channels(spec, profile),
    )


def _interpreter_here(text: str) -> str:
    """Return the path of the interpreter of jobs, with values of here if they are set here."""
    try:
        return expanded_text(text, os.environ)
    except ValueError:
        return text


def _tried(
    spec: Loaded[RunSpec], field: str, words: str, check: Callable[[Loaded[RunSpec]], None]
) -> Check:
    """Run one check of what `field` names; a file that cannot be read is a problem of the field."""
    subject = "weights" if field == "model.pretrained" else "data"
    try:
        check(spec)
    except InvalidInputError as error:
        return _failed(subject, *error.problems)
    except OSError as error:
        where = f"{error.filename} " if error.filename else ""
        message = f"`{field}`: {where}cannot be read: {error.strerror or error}"
        return _failed(subject, spec.problem(field, message))
    return _check(subject, "works", words)


def _failed(subject: str, *problems: Problem) -> Check:
    """Make a check of problems: one in its own words, more of them by their number."""
    count = len(problems)
    return _check(
        subject, "fails", str(problems[0]) if count == 1 else f"{count} problems", *problems
    )


def _data(spec: Loaded[RunSpec]) -> Check:
    data, steps = spec.document.data, spec.document.train_steps
    if data.sources:
        count = len(data.sources)
        words = f"{count} {'source' if count == 1 else 'sources'} of {data.format}"
        found = _tried(spec, "data.sources", words, check_samples)
        notes = list(sidecar_notes(spec)) if found.state == "works" else []
        return _check("data", "limited", "; ".join([words, *notes])) if notes else found
    if data.made_up or steps <= MADE_UP_STEPS:
        return _check("data", "limited", "made up: the spec has no `data.sources`")
    message = f"`data` has no sources, so {steps:,} steps would train on made-up samples"
    hint = "name `data.sources`; a trial of the cluster says `data: {made_up: true}`"
    problem = spec.problem("data", message, hint)
    return _check("data", "fails", message, problem)


def _software(
    needed: Sequence[str],
    extra: str | None,
    container: ContainerProfile | None,
    python: str,
    file: str | None,
) -> Check:
    """Look for packages in the Python that the job starts; `file`: the profile's.

    `extra`: that of hpctrain which installs them.
    """
    packages = ("hpctrain", *needed)
    names = ", ".join(packages)
    if container is not None:
        sentence = f"the image is to have {names}: looked for at the start of a job"
        return _check("software", "unknown", sentence)
    found = _packages("software", python, packages, names)
    if isinstance(found, Check):
        return found
    message = f"{python}, which is to train, has no {' and no '.join(found)}"
    name = f"hpctrain[{extra}]" if extra else "hpctrain"
    hint = f"install it there (`pip install '{name}'`), or name another: `software.python`"
    return _check("software", "fails", message, Problem(message, file, hint=hint))


def _interpreter(profile: Loaded[ClusterProfile], python: str) -> Iterator[Check]:
    """Look at the Python that the job starts: is it there, and one of the nodes' processors?

    A path below none of the profile's shared file systems may be there on the nodes alone.
    """
    document = profile.document
    if "$" in python or not os.path.isabs(python):
        return
    field = "software.python" if document.software.python else "nodes.architecture"
    if not os.path.exists(python):
        shared = (Path(one.path) for one in document.filesystems if one.kind != "local")
        home = next((one for one in shared if Path(python).is_relative_to(one)), None)
        if home is not None and home.is_dir():
            message = f"{python} does not exist, and {home} is here: the job could not start"
            yield _failed("interpreter", profile.problem(field, f"`{field}`: {message}"))
        return
    architecture, nodes = _elf_architecture(python), document.nodes.architecture
    if None not in (architecture, nodes) and architecture != nodes:
        message = f"{python} is a program for {architecture}, and the nodes are {nodes}"
        hint = f"name a Python for {nodes} in `software.python`; hpctrain has to be installed there"
        yield _failed("interpreter", profile.problem(field, f"`{field}`: {message}", hint))


def _elf_architecture(path: str) -> str | None:
    """Read for which processors a program is (elf(5), e_machine); None for a script."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(20)
    except OSError:
        return None
    known = {62: "x86_64", 183: "aarch64"}
    return known.get(int.from_bytes(head[18:20], "little")) if head[:4] == b"\x7fELF" else None


def _tracking(spec: AnySpec, python: str) -> Iterator[Check]:
    """Look for TensorBoard and W&B in the Python of the supervisor, which writes for them.

    It runs on the first node of a job, beside any container.
    """
    packages = spec.document.tracking.packages
    if not packages:
        return
    found = _packages("tracking", python, packages, " and ".join(packages))
    if isinstance(found, Check):
        yield found
        return
    message = f"{python}, which runs the supervisor, has no {' and no '.join(found)}"
    field, extras = f"tracking.{found[0]}", ",".join(found)
    hint = f"install it there (`pip install 'hpctrain[{extras}]'`), or remove `{field}`"
    yield _check("tracking", "fails", message, spec.problem(field, message, hint))


def _packages(subject: str, python: str, packages: Sequence[str], names: str) -> Check | list[str]:
    """Look for packages in a Python, if it is on this machine; return those that are missing."""
    if not os.access(python, os.X_OK):
        where = "not on this machine" if "/" in python else "found by the job, on its PATH"
        return _check(subject, "unknown", f"{python} is {where}")
    try:
        answer = subprocess.run(
            [python, "-P", "-c", _FIND, *packages],
            capture_output=True,
            text=True,
            timeout=_PYTHON_SECONDS,
            check=True,
        )
        missing = [str(name) for name in json.loads(answer.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return _check(subject, "unknown", f"{python} does not answer: {error}")
    return missing or _check(subject, "works", f"{python} has {names}")


def _image(container: ContainerProfile | None) -> Iterator[Check]:
    """Look for an image that is a file; one of a registry is fetched in the job."""
    if container is None:
        return
    image = container.image
    if "$" in image or not image.startswith("/"):
        yield _check(
            "image",
            "unknown",
            f"{image} is looked for at the start of a job",
        )
    elif os.path.exists(image):
        yield _check("image", "works", f"{image} is there")
    else:
        problem = Problem(f"container image {image} does not exist on this machine")
        yield _check("image", "fails", problem.message, problem)


def _channels(spec: AnySpec, profile: Loaded[ClusterProfile]) -> Iterator[Check]:
    """Look for the secrets and programs with which the run tells people, and for `watch`."""
    own = spec.document.notify
    notify = joined_notify(own, profile.document.notify)
    settings = notify_settings(notify)
    if notify is None or settings is None:
        return
    loaded = spec if own is not None and "channels" in own.model_fields_set else profile
    sending = [number for number, one in enumerate(notify.channels) if one.kind != "slurm"]
    problems = []
    for number, field, error in channel_problems(settings):
        path = f"notify.channels[{sending[number]}].{field}"
        problems.append(loaded.problem(path, f"`{path}`: {error}", error.hint))
    names = ", ".join(channel.name for channel in settings.channels)
    if problems:
        count = len(problems)
        sentence = problems[0].message if count == 1 else f"{count} problems"
        yield _check("notify", "fails", sentence, *problems)
    else:
        yield _check(
            "notify", "works", f"{names}: `hpctrain notify SPEC -p PROFILE --test` sends a message"
        )


def _watch(prepared: PreparedRun, runs: Path) -> Iterator[Check]:
    """Say when nobody sends what a job cannot send: where its node dies or has no network."""
    if prepared.supervise.notify is None:
        return
    from hpctrain.records.watch_heartbeat import heartbeat_age_seconds, heartbeat_path

    age_seconds = heartbeat_age_seconds(heartbeat_path(runs))
    if age_seconds is None or age_seconds > _WATCH_SECONDS:
        words = (
            "no pass of `hpctrain watch --act` in the last hour: what a job cannot send, and what "
            "quiet hours hold back after its end, is not sent; `hpctrain watch --install-hint`"
        )
        yield _check("notify", "limited", words)


def _room(prepared: PreparedRun, runs: Path) -> Iterator[Check]:
    """Find that the directory of runs cannot be made, or cannot be asked for what it has left.

    The disk of a machine that has no shared file system of the profile is not the run's: whoever
    plans for another place has it.
    """
    profile = prepared.profile.document
    shared = [one.path for one in profile.filesystems if one.kind != "local"]
    if shared and not any(map(os.path.isdir, shared)):
        there = " or ".join(dict.fromkeys(shared))
        words = f"this machine has no {there} of {profile.name}: not looked for"
        yield _check("space", "unknown", words)
        return
    left = directory_facts(runs)
    if left.free_bytes is None or left.free_inodes is None:
        yield _check("space", "unknown", f"{runs} cannot be asked for what it has left")
        return
    nearest = next((one for one in runs.absolute().parents if one.is_dir()), Path("/"))
    keeps_files = left.free_bytes or left.free_inodes or left.inodes  # /proc does not
    if not left.exists and not (keeps_files and os.access(nearest, os.W_OK)):
        message = f"{runs} does not exist, and no directory can be made in {nearest}"
        hint = "another directory: `--runs`, $HPCTRAIN_RUNS"
        yield _check("space", "fails", message, Problem(message, hint=hint))


def _space(prepared: Prepared, runs: Path) -> Check:
    """Compare what the run keeps with what its file system has left."""
    missing = next(_room(prepared, runs), None)
    if missing is not None:
        return missing
    left = directory_facts(runs)
    assert left.free_bytes is not None and left.free_inodes is not None, "it has been asked"
    try:
        needed = footprint_of(prepared)
    except DoesNotFitError as error:
        return _check("space", "unknown", str(error))
    size_bytes, files = needed.bytes.peak_checkpoints, needed.inodes.at_end
    words = (
        f"{short_bytes(left.free_bytes)} and {left.free_inodes:,} files are left for {runs}; the "
        f"run takes {short_bytes(size_bytes)} for checkpoints and {files:,} files"
    )
    counted = left.inodes != 0
    if size_bytes <= left.free_bytes and (files <= left.free_inodes or not counted):
        return _check("space", "works", words)
    hint = "fewer checkpoints (`checkpoint.keep`), or another directory: `--runs`, $HPCTRAIN_RUNS"
    return _check("space", "fails", words, Problem(words, hint=hint))


def _refused(error: HpctrainError, spec: AnySpec) -> Check:
    """Make a check of what planning refuses; each reason at its field."""
    if isinstance(error, RefusedPlanError) and error.refusals:
        hints = [error.hint, *[None] * (len(error.refusals) - 1)]
        return _failed(
            _PLAN,
            *(
                spec.problem(one.field, one, hint)
                for one, hint in zip(error.refusals, hints, strict=True)
            ),
        )
    if isinstance(error, InvalidInputError):
        return _failed(_PLAN, *error.problems)
    return _failed(_PLAN, Problem(str(error), hint=error.hint))


# -- Formats what would end a run in the queue or at its start: the sentence of `plan` ----------


def ready_sentence(spec: Path, profile: str, overrides: Sequence[str], runs: Path) -> str:
    """Say whether the run could be submitted, and the command that follows."""
    checks = examine(spec, profile, overrides, runs=runs).checks
    words = input_words(spec, profile, overrides)
    failing = [check for check in checks if check.state == "fails"]
    notes = [
        check.sentence for check in checks if check.state == "limited" and (check.subject != "plan")
    ]
    if failing:
        counts = [(check.subject, len(check.problems)) for check in failing]
        listed = ", ".join(f"{name} ({n} problem{'' if n == 1 else 's'})" for name, n in counts)
        return f"no: {listed}; `hpctrain validate {words}` lists them"
    said = "".join(f"; {note}" for note in notes)
    return f"yes: `hpctrain submit {words}`{said}"


def input_words(spec: Path, profile: str, overrides: Sequence[str]) -> str:
    """Join the words that give the same documents to another command."""
    settings = [word for one in overrides for word in ("--set", one)]
    return shlex.join(["-p", profile, str(spec), *settings])
