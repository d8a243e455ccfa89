"""Read a site: its Slurm in one pass, this machine, and a node if wanted; detect, check, judge.

Belongs here: collecting the facts, and handing them to `hpctrain.site`. Does not belong here:
judging them, the texts of commands (`hpctrain.slurm`, `facts`), tables (`command`).
"""

from __future__ import annotations

import contextlib
import grp
import os
import platform
import pwd
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.base import clock
from hpctrain.base.disk_usage import directory_facts
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError, SlurmError, UsageError
from hpctrain.site import survey
from hpctrain.site import survey as survey_program
from hpctrain.site.detected import DetectedProfile, detected_profile, undeclared_groups
from hpctrain.site.detected_slurm import refusal
from hpctrain.site.differences import Difference, differences
from hpctrain.site.doctor import SiteFinding, judge_site
from hpctrain.site.facts import (
    LoginFacts,
    NodeSurvey,
    SiteFacts,
    default_interface,
    module_system,
    mounts,
    node_survey,
    rdma_ports,
    survey_line,
)
from hpctrain.site.hardware import NodeGroup, groups_of
from hpctrain.site.job_limits import qos_of
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.cluster_queries import ClusterQueries, step_output
from hpctrain.slurm.cluster_records import ClusterFacts, PartitionFacts
from hpctrain.slurm.records import JobRecord
from hpctrain.spec.files import read_text
from hpctrain.spec.loader import (
    Loaded,
    find_profile,
    load_catalogue,
    load_named_profile,
    load_profile,
    profile_search_path,
)
from hpctrain.spec.open_questions import open_questions
from hpctrain.spec.profile import ClusterProfile

# Variables that sites set to directories of a user; their mounts are file systems of runs.
_DIRECTORIES = ("HOME", "SCRATCH", "WORK", "PROJECT", "PSCRATCH", "SCRATCHDIR")


@dataclass(frozen=True)
class Detection:
    """A detected profile, the file it was written to, and how many queries it took."""

    profile: DetectedProfile
    queries: int
    path: Path | None = None


@dataclass(frozen=True)
class Checked:
    """Differences between a profile and its cluster."""

    profile: Loaded[ClusterProfile]
    differences: tuple[Difference, ...]
    queries: int


@dataclass(frozen=True)
class Examination:
    """What `doctor` has found. `unreachable`: why nothing is known about Slurm."""

    findings: tuple[SiteFinding, ...]
    queries: int
    unreachable: SlurmError | None = None


def detect(
    runs: Path,
    *,
    partition: str | None = None,
    model: str | None = None,
    in_job: bool = False,
    account: str | None = None,
    patience_seconds: float = 600.0,
    output: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Detection:
    """Detect the profile of the cluster, and write it to `output` if that is given.

    The text is loaded like any profile before it is returned. Raises InvalidInputError where no
    profile can be made, SlurmError without answers, UsageError if `output` exists.
    """
    if output is not None and output.exists():
        raise UsageError(f"{output} exists", hint="choose another file, or remove it")
    login = login_facts(runs)
    cluster = ClusterQueries(login.user).facts()
    looked: NodeSurvey | None = None
    if in_job:
        target, gpus = _survey_target(cluster, login, partition)
        choice = qos_of(target, cluster.accounting)
        looked = survey_node(
            SlurmClient(),
            partition=target.name,
            gpus=gpus,
            account=account,
            qos=None if choice is None or choice.is_default else choice.name,
            patience_seconds=patience_seconds,
            directory=Path.cwd(),
            say=say,
        )
    else:
        shell = survey.command(survey.COMMANDS["module"])
        login = replace(login, modules=module_system(str(shell["stdout"])))
    facts = SiteFacts(cluster, login, looked)
    catalogue = load_catalogue(profile_search_path())
    found = detected_profile(facts, catalogue, partition=partition, model=model)
    # Load the text like any profile: what this command writes must be valid
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{found.name}.yaml"
        path.write_text(found.text, encoding="utf-8")
        load_profile(path)
    if output is not None:
        replace_text(output, found.text)
    return Detection(found, cluster.queries, output)


def check(name: str, runs: Path) -> Checked:
    """Compare a profile with its cluster. Raises SlurmError without answers."""
    profile = load_named_profile(name)
    login = login_facts(runs)
    queries = ClusterQueries(login.user, cluster=profile.document.slurm.cluster)
    facts = SiteFacts(queries.facts(), login)
    return Checked(profile, differences(profile.document, facts), facts.cluster.queries)


def examine(runs: Path, profile_name: str | None) -> Examination:
    """Judge what will work at this site, with a profile or with Slurm's default partition."""
    profile = None
    asked: tuple[SiteFinding, ...] = ()
    if profile_name is not None:
        profile = load_named_profile(profile_name).document
        asked = _open_questions(find_profile(profile_name, profile_search_path()))
    login = login_facts(runs)
    name = None if profile is None else profile.slurm.cluster
    queries = ClusterQueries(login.user, cluster=name)
    try:
        cluster = queries.facts()
    except SlurmError as error:
        return Examination((*judge_site(None, login, profile), *asked), queries.count, error)
    return Examination((*judge_site(cluster, login, profile), *asked), queries.count)


def _open_questions(file: Path) -> tuple[SiteFinding, ...]:
    """Repeat the questions of `detect` that nobody has answered in a profile."""
    return tuple(
        SiteFinding(
            topic="profile",
            state="unknown",
            sentence=f"{one.problem(file.name)} (remove the comment when it is answered)",
            source=f"{file.name}:{one.line}",
        )
        for one in open_questions(read_text(file))
    )


def login_facts(runs: Path) -> LoginFacts:
    """Read this machine: Python, mounts, cards, and the directory of the runs."""
    names = {name: os.environ[name] for name in _DIRECTORIES if name in os.environ}
    found = []
    for number in {os.getegid(), *os.getgroups()}:
        try:
            found.append(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return LoginFacts(
        host=socket.gethostname(),
        user=_user(),
        python=tuple(sys.version_info[:3]),
        interpreter=sys.executable,
        machine=platform.machine(),
        groups=tuple(found),
        runs=directory_facts(runs),
        mounts=mounts(survey.text_of("/proc/mounts")),
        ports=rdma_ports(survey.infiniband()),
        default_interface=default_interface(survey.text_of("/proc/net/route")),
        variables=names,
    )


def _survey_target(
    cluster: ClusterFacts, login: LoginFacts, wanted: str | None
) -> tuple[PartitionFacts, str | None]:
    """Choose where the survey runs, and all GPUs of a node there; None where Gres has none.

    The partition is the one that was named, else the first usable one with most GPUs: whole ones
    before slices, and both before those that only names tell of.
    """
    groups = groups_of(cluster.nodes) or groups_of(cluster.nodes, "slices")
    if wanted is not None:
        named = cluster.partition(wanted)
        if named is None:
            known = ", ".join(one.name for one in cluster.partitions)
            raise UsageError(f"no partition is called `{wanted}`", hint=f"there are: {known}")
        nodes = cluster.nodes_of(wanted)
        own = groups_of(nodes) or groups_of(nodes, "slices")
        if groups and not own:
            raise UsageError(f"no node of partition `{wanted}` has GPUs")
        return named, _all_gpus(own[0]) if own else None
    if not groups:
        catalogue = load_catalogue(profile_search_path())
        groups = undeclared_groups(SiteFacts(cluster, login), catalogue, None)
    for one in sorted(cluster.partitions, key=lambda partition: not partition.default):
        is_usable = refusal(one, login, cluster.accounting) is None and not one.hidden
        if is_usable and groups and one.name in groups[0].partitions:
            return one, _all_gpus(groups[0])
    hint = "--partition names one"
    raise HpctrainError("no partition with GPUs takes a job of yours", hint=hint)


def _all_gpus(group: NodeGroup) -> str | None:
    """Name all GPUs of a node, with their type: a partition may have several."""
    if group.kind == "undeclared":
        return None
    return f"gpu:{group.type}:{group.per_node}" if group.type else f"gpu:{group.per_node}"


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


# -- Let one job look at a node: submit the survey, wait for it, read what it printed -----------
# Inside an allocation the survey runs there as a job step.


FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
JOB_MINUTES = 5
# How long the output may take to appear on a shared file system after the job has ended.
_OUTPUT_SECONDS = 30.0


def survey_node(
    slurm: SlurmClient,
    *,
    partition: str,
    gpus: str | None,
    account: str | None,
    qos: str | None = None,
    patience_seconds: float,
    directory: Path,
    say: Callable[[str], None],
) -> NodeSurvey:
    """Run the survey on one node of a partition, and return what it saw.

    `gpus` is what `--gres` asks for, None for nothing. `directory` receives the output of the job,
    so it must be on a file system that nodes share; the file is removed. Raises SlurmError when the
    job is refused, HpctrainError when it does not start within `patience_seconds` (it is cancelled)
    or leaves no survey.
    """
    if job := os.environ.get("SLURM_JOB_ID"):
        say(f"looking at a node of job {job}, in which this command runs")
        return _read(step_output(job, _program()), f"a step of job {job}")
    options = [
        *("--job-name=hpctrain-survey", f"--partition={partition}", "--nodes=1", "--ntasks=1"),
        *(f"--time={JOB_MINUTES}", "--no-requeue"),
        *([f"--gres={gpus}"] if gpus else []),
        *([f"--account={account}"] if account else []),
        *([f"--qos={qos}"] if qos else []),
    ]
    output = directory / f"hpctrain-survey-{os.getpid()}-%j.out"
    options.append(f"--output={output}")
    submitted = slurm.submit(_program(), options)
    file = Path(str(output).replace("%j", str(submitted.job_id)))
    say(f"job {submitted.job_id} of partition {partition} looks at a node")
    try:
        record = _wait_for(slurm, submitted.job_id, patience_seconds)
        text = _output(file)
    finally:
        with contextlib.suppress(SlurmError):
            slurm.cancel(submitted.job_id)
        with contextlib.suppress(OSError):
            file.unlink()
    state = f" ({record.state.value})" if record is not None else ""
    return _read(text, f"job {submitted.job_id}{state}")


def _program() -> str:
    """Return the text of the survey as a batch script that any python3 runs."""
    text = Path(survey_program.__file__).read_text(encoding="utf-8")
    own = f"INTERPRETERS = [{sys.executable!r}]"
    return "#!/usr/bin/env python3\n" + text.replace("INTERPRETERS = []", own, 1)


def _wait_for(slurm: SlurmClient, job_id: int, patience_seconds: float) -> JobRecord | None:
    """Wait until the job has ended; None when the controller has forgotten it."""
    deadline, pause = clock.monotonic() + patience_seconds, FIRST_PAUSE_SECONDS
    while True:
        clock.sleep(pause)
        pause = min(pause * 1.5, LONGEST_PAUSE_SECONDS)
        record = slurm.jobs([job_id]).get(job_id)
        if record is None or record.state.is_ended:
            return record
        if clock.monotonic() > deadline:
            waits = f": {record.reason}" if record.reason else ""
            raise HpctrainError(
                f"job {job_id} is {record.state.value} after {patience_seconds:.0f} s{waits}; it "
                "was cancelled",
                hint="--wait gives it more time; without --in-job nothing has to start",
            )


def _output(file: Path) -> str:
    deadline = clock.monotonic() + _OUTPUT_SECONDS
    while True:
        with contextlib.suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            if survey_line(text) is not None or clock.monotonic() > deadline:
                return text
        if clock.monotonic() > deadline:
            return ""
        clock.sleep(0.2)


def _read(output: str, what: str) -> NodeSurvey:
    line = survey_line(output)
    if line is None:
        said: Sequence[str] = output.strip().splitlines()[-3:]
        raise HpctrainError(
            f"{what} has left no survey of its node" + (f": {' '.join(said)}" if said else ""),
            hint="python3 must be on PATH there, and this directory on a file system that the "
            "nodes share",
        )
    try:
        return node_survey(line)
    except ValueError as error:
        raise HpctrainError(f"{what} printed {error}") from error
