"""Prove the first start of a profile: submit one small job with its real environment, and watch it.

The script is that of a run, rendered from the same template by the same code; only the programs
that it starts are another one (`start_survey`), and it asks for one node. Belongs here: making,
submitting and watching the job, reading its reports, the record of a proof. Does not belong here:
what the job looks at (`start_survey`), sentences (`start_findings`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.base import clock
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import SlurmError, SlurmRefusedError, UsageError
from hpctrain.base.units import Duration
from hpctrain.job.kept_code import keep_code
from hpctrain.job.prepare import (
    digested_with,
    load_knowledge,
    setup_file,
    site_templates,
    templates_digest,
)
from hpctrain.job.render.environment import submit_variables
from hpctrain.job.render.job_options import exclusive_option, gpu_request, memory_options
from hpctrain.job.render.script import (
    PACKAGED,
    JobTask,
    ScriptFacts,
    SrunTasks,
    job_script,
    render_template,
)
from hpctrain.job.render.shell_files import COMMANDS, ShellFile
from hpctrain.plan.documents import NodeRequest
from hpctrain.plan.job import Job, ServicePart, ServingProgram
from hpctrain.records.first_starts import FirstStart, record_first_start
from hpctrain.records.jobs import sbatch_options
from hpctrain.records.layout import RunLayout
from hpctrain.site import start_survey
from hpctrain.site.doctor import SiteFinding
from hpctrain.site.start_findings import (
    BatchReport,
    Interpreter,
    StartExpectation,
    StartOutcome,
    TaskReport,
    judge_request,
    judge_start,
)
from hpctrain.slurm.client import REVOKED_SECONDS, Backoff, SlurmClient
from hpctrain.spec.catalogue import GpuVariable
from hpctrain.spec.engines.registry import DEFAULT_ENGINE, ENGINES
from hpctrain.spec.job_text import expanded_names
from hpctrain.spec.loader import (
    Loaded,
    load_catalogue,
    load_named_profile,
    partition_profile,
    profile_search_path,
)
from hpctrain.spec.profile import INTERFACE_VARIABLES, ClusterProfile
from hpctrain.spec.run import EnvironmentSpec, ResourcesSpec

TEMPLATE = "start.sbatch.j2"
JOB_NAME = "hpctrain-start"
JOB_LIMIT = Duration(600)
# As much as importing torch and the engines needs, where a site wants a number.
_MEMORY = "4096M"
_MOST_CPUS = 4
# Masks and maps are those of a whole node, and Slurm refuses CPUs that a job does not have.
_BINDINGS = ("accel-bind", "cpu-bind", "gpu-bind", "mem-bind")
# How long reports may take to appear on a shared file system after the job has ended.
_OUTPUT_SECONDS = 20.0
# Files of a job's log that are read at most, from the end.
_LOG_BYTES = 20_000
# Options that are left away one after the other, to find the one that Slurm refuses.
_CULPRITS = (
    *("constraint", "gres", "gpus-per-node", "gpus-per-task", "mem", "mem-per-gpu"),
    *("cpus-per-task", "account", "qos", "reservation", "time", "exclusive", "nodes"),
    *("switches", "segment", "partition"),
)


@dataclass(frozen=True)
class StartRequest:
    """Where and how the job is to start; `keep` it, and its directory, for somebody who looks."""

    partition: str | None = None
    account: str | None = None
    gpus: int = 0
    patience_seconds: float = 600.0
    keep: bool = False


@dataclass(frozen=True)
class StartJob:
    """The job: its script, what a run would ask for in its place, and what its program reads.

    `profile` is the one for jobs in its partition.
    """

    profile: Loaded[ClusterProfile]
    job: Job
    script: str
    request: tuple[str, ...]
    shells: tuple[ShellFile, ...]
    settings: Mapping[str, object]
    interpreter: str
    expectation: StartExpectation

    @property
    def request_words(self) -> str:
        """What a run would ask for, in short."""
        wanted = ("nodes", "ntasks-per-node", "cpus-per-task", "gres", "gpus-per-node", "mem")
        return " ".join(f"--{one}" for one in self.request if one.partition("=")[0] in wanted)


@dataclass(frozen=True)
class StartCheck:
    """What was found. `refusal`: Slurm took no such job; `proof`: it is recorded as proved.

    `directory` is kept for looking; None: it is gone.
    """

    profile: Loaded[ClusterProfile]
    findings: tuple[SiteFinding, ...]
    outcome: StartOutcome | None = None
    refusal: SlurmError | None = None
    proof: FirstStart | None = None
    directory: Path | None = None

    @property
    def failures(self) -> tuple[SiteFinding, ...]:
        return tuple(one for one in self.findings if one.state == "fails")


def check_start(
    name: str,
    runs: Path,
    slurm: SlurmClient,
    wanted: StartRequest,
    say: Callable[[str], None] = lambda _: None,
) -> StartCheck:
    """Submit the job, wait for its end, and judge it; the job is cancelled if it has not ended.

    Raises InvalidInputError for a profile that renders no script, SlurmUnreachableError.
    """
    start = start_job(load_named_profile(name), wanted)
    profile = start.profile.document
    site = start.profile.document.slurm
    slurm = slurm.at(cluster=site.cluster, submit_command=site.submit_words)
    request = _judged_request(start, slurm)
    directory = (runs / f".start-{profile.name}-{secrets.token_hex(3)}").absolute()
    layout = _written(start, directory)
    submit_time = clock.now()
    try:
        submitted = slurm.submit(
            layout.script, sbatch_options(directory), variables=submit_variables(start.job)
        )
    except SlurmError as error:
        shutil.rmtree(directory)
        if not isinstance(error, SlurmRefusedError):
            raise
        return StartCheck(start.profile, (request,), refusal=error)
    say(f"job {submitted.job_id} of partition {start.job.partition.name} starts as a run would")
    try:
        outcome = _watched(
            start, layout, slurm, submitted.job_id, submit_time, wanted.patience_seconds
        )
    finally:
        if not wanted.keep:
            with contextlib.suppress(SlurmError):
                slurm.cancel(submitted.job_id)
    findings = (request, *judge_start(profile, outcome))
    failed = any(one.state == "fails" for one in findings)
    proof = None
    if not failed and outcome.task is not None:
        proof = _recorded(start, slurm, submitted.job_id, runs)
    kept = wanted.keep or failed or outcome.batch is None
    if not kept:
        shutil.rmtree(directory, ignore_errors=True)
    return StartCheck(
        start.profile, findings, outcome, proof=proof, directory=directory if kept else None
    )


def _recorded(start: StartJob, slurm: SlurmClient, job_id: int, runs: Path) -> FirstStart | None:
    """Record the proof; None where the directory of runs cannot be written."""
    cluster = None
    with contextlib.suppress(SlurmError):
        cluster = slurm.cluster_name()
    proof = FirstStart(
        event="proved",
        profile=start.profile.document.name,
        profile_digest=start.profile.digest,
        partition=start.job.partition.name,
        cluster=cluster,
        job_id=job_id,
        event_time=clock.now(),
    )
    try:
        record_first_start(runs, proof)
    except OSError:
        return None
    return proof


# -- The job --------------------------------------------------------------------------------------


def start_job(
    loaded: Loaded[ClusterProfile], wanted: StartRequest, python: str = sys.executable
) -> StartJob:
    """Render the script of a run on two nodes, if there are two, that asks for one in the end.

    Raises InvalidInputError for what sbatch cannot take, UsageError for an unknown partition and
    for more GPUs than a node has.
    """
    chosen = loaded.document.slurm.partition(wanted.partition)
    if chosen is None:
        known = ", ".join(one.name for one in loaded.document.slurm.partitions)
        message = f"profile {loaded.document.name} has no partition `{wanted.partition}`"
        raise UsageError(message, hint=f"there are: {known}")
    loaded = partition_profile(loaded, wanted.partition)
    templates = site_templates(loaded)
    template_sha256 = None if templates is None else templates_digest(templates)
    loaded = digested_with(loaded, template_sha256)
    profile = loaded.document
    if wanted.gpus > profile.gpu.per_node:
        message = f"a node has {profile.gpu.per_node} GPUs in profile {profile.name}"
        raise UsageError(message, hint="--gpus asks for those of one node")
    least = chosen.min_nodes or 1
    several = max(least, min(2, profile.nodes.count))
    run = _job(profile, wanted, several, profile.gpu.per_node)
    small = _job(profile, wanted, least, wanted.gpus)
    gpu = load_knowledge(loaded).gpu
    variables: tuple[GpuVariable, ...] = ()
    if gpu is not None:
        catalogue = load_catalogue(profile_search_path())
        variables = catalogue.variables_for(gpu, DEFAULT_ENGINE, model_parallel=True)
    facts = ScriptFacts(
        run_id=JOB_NAME,
        comment="",
        spec_digest="",
        profile_digest=loaded.digest,
        python=python,
        gpu_variables=variables,
        setup=setup_file(loaded),
        template_sha256=template_sha256,
    )
    script = job_script(run, facts, _task(profile))
    cpus = min(_MOST_CPUS, run.cpus_per_gpu)
    program = Path(start_survey.__file__).name
    before = script.trainer[: script.trainer.index("-m")]
    own = replace(
        script,
        directives=_changed(script.directives, _small_options(small, script.directives, cpus)),
        shell_files=tuple(one for one in script.shell_files if one.name != COMMANDS),
        cancel_waiting=(),
        on_exit="-",
        supervisor=(script.supervisor[0], program, "batch"),
        srun=_changed(
            script.srun,
            {
                "nodes": str(least),
                "ntasks": "1",
                "ntasks-per-node": "1" if least == 1 else None,
                "cpus-per-task": str(cpus),
            },
        ),
        srun_options=tuple(
            one
            for one in script.srun_options
            if one.removeprefix("--").partition("=")[0] not in _BINDINGS
        ),
        trainer=(*before, program, "task"),
    )
    systems = [(f"filesystems[{i}].path", one.path) for i, one in enumerate(profile.filesystems)]
    if profile.software.scratch is not None:
        systems.append(("software.scratch", profile.software.scratch))
    names = _names(profile)
    passed = [one.name for one in script.variables] + ["PYTHONPATH"]
    if profile.software.container is None:
        passed += ["PATH", "LD_LIBRARY_PATH", *profile.software.unset]
    requeue = profile.continuation == "requeue"
    return StartJob(
        profile=loaded,
        job=small,
        script=render_template(f"{PACKAGED}/{TEMPLATE}", templates, own),
        request=tuple(one.removeprefix("--") for one in script.directives),
        shells=own.shell_files,
        settings={
            "salt": secrets.token_hex(8),
            "passed": list(dict.fromkeys(passed)),
            "names": [*names],
            "filesystems": [path for _, path in systems],
            "interfaces": list(INTERFACE_VARIABLES),
            "packages": sorted({one for e in ENGINES.values() for one in e.packages} - {"torch"}),
            "continuation": profile.continuation,
            "requeue": requeue,
        },
        interpreter=script.supervisor[0],
        expectation=StartExpectation(cpus, requeue, tuple(field for field, _ in systems), names),
    )


def _job(profile: ClusterProfile, wanted: StartRequest, nodes: int, gpus: int) -> Job:
    chosen = profile.slurm.partition(wanted.partition)
    limits = (chosen.max_walltime if chosen else None, profile.limits.max_walltime)
    part = ServicePart(
        name=JOB_NAME,
        engine=ServingProgram(DEFAULT_ENGINE),
        resources=ResourcesSpec.model_validate(
            {
                "gpus": max(1, nodes * gpus),
                "walltime": min((JOB_LIMIT, *(one for one in limits if one))),
                "partition": wanted.partition,
                "account": wanted.account,
            }
        ),
        environment=EnvironmentSpec(),
        nodes=NodeRequest(nodes=nodes, gpus_per_node=gpus),
        launcher="srun",
    )
    return Job(part, profile, part)


def _task(profile: ClusterProfile) -> JobTask:
    note = "Where a run starts its ranks, one task tries what they need."
    return JobTask(
        title=f"The first start at {profile.name}: what a run needs is tried on one node",
        layout="",
        settings=start_survey.SETTINGS,
        tasks=SrunTasks(
            tasks=1,
            tasks_per_node=1,
            gpus_per_task=1,
            module=("hpctrain.train",),
            task_kind="rank",
            log_number="%4t",
            labelled=False,
            note=note,
        ),
        warning_seconds=60,
        warning_note="USR1 is sent by the program itself, to see whether it arrives",
        continuation_note="The job asks once to be requeued where the profile continues by that"
        if profile.continuation == "requeue"
        else f"The profile continues by {profile.continuation}; this job ends",
    )


def _small_options(small: Job, directives: Sequence[str], cpus: int) -> dict[str, str | None]:
    """Choose the values in which the small job differs from a run; None leaves an option out."""
    memory: Mapping[str, str | None] = memory_options(small)
    if not small.plan.nodes.gpus_per_node:
        wants = any(one.startswith(("--mem=", "--mem-per-gpu=")) for one in directives)
        memory = {"mem": _MEMORY if wants else None, "mem-per-gpu": None}
    exclusive = exclusive_option(small)
    left_out = {} if exclusive else {"exclusive": None}
    gone = ("array", "dependency", "comment", "switches", "segment", "no-kill")
    gpus = {"gres": None, "gpus-per-node": None, "gpus-per-task": None}
    return {
        "job-name": JOB_NAME,
        "nodes": str(small.plan.nodes.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(cpus),
        **gpus,
        **gpu_request(small, counts_tasks=False),
        **memory,
        **left_out,
        "time": small.walltime.slurm(),
        "output": "logs/slurm-%j.out",
        **dict.fromkeys(gone),
    }


def _changed(words: Sequence[str], changes: Mapping[str, str | None]) -> tuple[str, ...]:
    """Replace the values of options, drop those without one, and append those that are new."""
    kept, left = [], dict(changes)
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if not word.startswith("--") or name not in changes:
            kept.append(word)
            continue
        value = left.pop(name, None)
        if value is not None:
            kept.append(f"--{name}={value}")
    return (*kept, *(f"--{name}={value}" for name, value in left.items() if value is not None))


def _names(profile: ClusterProfile) -> dict[str, str]:
    """Map each `$NAME` of the profile to the first field that has it; Slurm's own are left out."""
    found: dict[str, str] = {}
    for path, text in _texts(profile.model_dump(), ""):
        if "$" not in text or path.endswith((".reason", "description")):
            continue
        with contextlib.suppress(ValueError):
            for name in expanded_names(text):
                if not name.startswith(("SLURM", "HPCTRAIN_")):
                    found.setdefault(name, path)
    return found


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _texts(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{path}[{number}]")


def _written(start: StartJob, directory: Path) -> RunLayout:
    """Write the directory of the job. Raises UsageError where that cannot be."""
    layout = RunLayout(directory)
    try:
        layout.create()
        keep_code(layout)
        texts = {
            layout.script: start.script,
            directory / start_survey.SETTINGS: json.dumps(start.settings, indent=1),
            directory / Path(start_survey.__file__).name: Path(start_survey.__file__).read_text(
                encoding="utf-8"
            ),
        }
        texts |= {directory / one.name: one.text for one in start.shells}
        for path, text in texts.items():
            replace_text(path, text, mode=0o600)
    except OSError as error:
        raise UsageError(
            f"{directory} cannot be made: {error.strerror}",
            hint="choose a directory of runs that all nodes see: `--runs` or $HPCTRAIN_RUNS",
        ) from error
    return layout


# -- What a run would ask for ---------------------------------------------------------------------


def _judged_request(start: StartJob, slurm: SlurmClient) -> SiteFinding:
    """Have Slurm validate what a run asks for; where it refuses, find the option behind it."""
    profile = start.profile.document
    wanted = [one for one in start.request if not one.startswith(("dependency", "array"))]
    refused = _refusal(wanted, slurm)
    culprit = None
    if refused is not None:
        for name in _CULPRITS:
            rest = [one for one in wanted if one.partition("=")[0] != name]
            if len(rest) < len(wanted) and _refusal(rest, slurm) is None:
                culprit = next(one for one in wanted if one.partition("=")[0] == name)
                break
    return judge_request(profile, start.request_words, refused, culprit)


def _refusal(options: Sequence[str], slurm: SlurmClient) -> str | None:
    text = "".join(f"#SBATCH --{one}\n" for one in options)
    try:
        slurm.test_only(f"#!/bin/bash\n{text}true\n")
    except SlurmRefusedError as error:
        return str(error)
    return None


# -- Watching -------------------------------------------------------------------------------------


def _watched(
    start: StartJob,
    layout: RunLayout,
    slurm: SlurmClient,
    job_id: int,
    submit_time: float,
    patience_seconds: float,
) -> StartOutcome:
    """Wait until the job has ended for good, and read what it has left."""
    deadline, pauses = clock.monotonic() + patience_seconds, Backoff()
    batch_file, seen_time, started = layout.directory / start_survey.BATCH, None, None
    gave_up, record, over_since, back_since = False, None, math.inf, math.inf
    while True:
        record = slurm.jobs([job_id]).get(job_id)
        if seen_time is None and batch_file.exists():
            seen_time = clock.now()
        if record is not None and record.state.is_active and started is None:
            started = record
        if record is None or record.state.is_ended:
            over_since = min(over_since, clock.monotonic())
            if not _comes_back(layout) or clock.monotonic() - over_since > _OUTPUT_SECONDS:
                break
            clock.sleep(pauses.next_seconds())
            continue
        over_since = math.inf
        if record.restart_count and not record.state.is_active and record.hold is None:
            back_since = min(back_since, clock.monotonic())
        else:
            back_since = math.inf
        if clock.monotonic() - back_since > REVOKED_SECONDS:
            # Slurm lets a requeued job wait for minutes (cred_expire of AuthInfo)
            with contextlib.suppress(SlurmError):
                slurm.update_job(job_id, start_now=True)
        if clock.monotonic() > deadline:
            gave_up = True
            break
        clock.sleep(pauses.next_seconds())
    settled = record is None or (record.state.is_ended and not record.exit_code)
    until = clock.monotonic() + (_OUTPUT_SECONDS if settled and not gave_up else 0.0)
    while not _has_all(start, layout.directory) and clock.monotonic() < until:
        clock.sleep(0.2)
    log = None
    with contextlib.suppress(OSError):
        text = (layout.directory / "logs" / f"slurm-{job_id}.out").read_bytes()
        log = text[-_LOG_BYTES:].decode("utf-8", "replace")
    batch = _report(batch_file)
    task = _report(layout.directory / start_survey.TASK)
    second = _report(layout.directory / start_survey.SECOND)
    if record is not None and started is not None:  # the first start of a job with two
        record = replace(record, start_time=started.start_time)
    return StartOutcome(
        job_id=job_id,
        submit_time=submit_time,
        seen_time=clock.now() if seen_time is None else seen_time,
        machine=platform.machine(),
        interpreter=_interpreter(start.interpreter),
        directory=str(layout.directory),
        expected=start.expectation,
        record=record,
        log=log,
        batch=None if batch is None else BatchReport.model_validate(batch),
        task=None if task is None else TaskReport.model_validate(task),
        restarts=None if second is None else int(second["restarts"]),
        gave_up=gave_up,
    )


def _comes_back(layout: RunLayout) -> bool:
    """Tell whether the job has asked to be requeued and has not started again.

    Slurm shows such a job as over for a moment (seen on 22.05.8).
    """
    asked = (_report(layout.directory / start_survey.BATCH) or {}).get("requeue")
    again = (layout.directory / start_survey.SECOND).exists()
    return asked is not None and asked.get("returncode") is None and not again


def _has_all(start: StartJob, directory: Path) -> bool:
    """Tell whether everything that the job has written can be read: a shared disk takes its time.

    Where the step or the requeue has failed, nothing more comes.
    """
    batch = _report(directory / start_survey.BATCH)
    if batch is None:
        return False
    if (batch.get("step") or {}).get("returncode") != 0:
        return True
    refused = (batch.get("requeue") or {}).get("returncode") is not None
    again = start.expectation.requeue and not refused
    return (directory / start_survey.TASK).exists() and (
        not again or (directory / start_survey.SECOND).exists()
    )


def _report(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _interpreter(python: str) -> Interpreter:
    """Look at the interpreter from here, as far as its path can be known here."""
    path = os.path.expandvars(python)
    if not os.path.isabs(path):
        return Interpreter(path, None)
    real = os.path.realpath(path)
    return Interpreter(path, start_survey.elf_machine(real))
