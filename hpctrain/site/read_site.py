"""Read a site: its Slurm in one pass, this machine, and a node if wanted; detect, check, judge.

Belongs here: collecting the facts, and handing them to `hpctrain.site`. Does not belong here:
judging them, the texts of commands (`hpctrain.slurm`, `survey_texts`), tables (`command`).
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.disk_usage import directory_facts
from hpctrain.base.durable import replace_text
from hpctrain.base.errors import HpctrainError, SlurmError, UsageError
from hpctrain.site import survey
from hpctrain.site.detected import DetectedProfile, detected_profile
from hpctrain.site.detected_partitions import refusal
from hpctrain.site.differences import Difference, differences
from hpctrain.site.doctor import SiteFinding, judge_site
from hpctrain.site.facts import LoginFacts, SiteFacts
from hpctrain.site.hardware import NodeGroup, groups_of
from hpctrain.site.node_survey import survey_node
from hpctrain.site.survey_texts import NodeSurvey, default_interface, mounts, rdma_ports
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.cluster_queries import ClusterQueries
from hpctrain.slurm.cluster_records import ClusterFacts, PartitionFacts
from hpctrain.spec.loader import Loaded, load_catalogue, load_profile
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profiles import load_named_profile, profile_search_path

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
        target = _survey_partition(cluster, login, partition)
        looked = survey_node(
            SlurmClient(),
            partition=target.name,
            gpus=_whole_node(groups_of(cluster.nodes_of(target.name))[0]),
            account=account,
            patience_seconds=patience_seconds,
            directory=Path.cwd(),
            say=say,
        )
    facts = SiteFacts(cluster, login, looked)
    catalogue = load_catalogue(profile_search_path())
    found = detected_profile(facts, catalogue, partition=partition, model=model)
    _refuse_invalid(found)
    if output is not None:
        replace_text(output, found.text)
    return Detection(found, cluster.queries, output)


def check(name: str, runs: Path) -> Checked:
    """Compare a profile with its cluster. Raises SlurmError without answers."""
    profile = load_named_profile(name)
    login = login_facts(runs)
    facts = SiteFacts(ClusterQueries(login.user).facts(), login)
    return Checked(profile, differences(profile.document, facts), facts.cluster.queries)


def examine(runs: Path, profile_name: str | None) -> Examination:
    """Judge what will work at this site, with a profile or with Slurm's default partition."""
    profile = None
    if profile_name is not None:
        profile = load_named_profile(profile_name).document
    login = login_facts(runs)
    queries = ClusterQueries(login.user)
    try:
        cluster = queries.facts()
    except SlurmError as error:
        return Examination(judge_site(None, login, profile), queries.count, error)
    return Examination(judge_site(cluster, login, profile), queries.count)


def login_facts(runs: Path) -> LoginFacts:
    """Read this machine: Python, mounts, cards, and the directory of the runs."""
    names = {name: os.environ[name] for name in _DIRECTORIES if name in os.environ}
    return LoginFacts(
        host=socket.gethostname(),
        user=_user(),
        python=tuple(sys.version_info[:3]),
        groups=tuple(_groups()),
        runs=directory_facts(runs),
        mounts=mounts(survey.text_of("/proc/mounts")),
        ports=rdma_ports(survey.infiniband()),
        default_interface=default_interface(survey.text_of("/proc/net/route")),
        variables=names,
    )


def _survey_partition(
    cluster: ClusterFacts, login: LoginFacts, wanted: str | None
) -> PartitionFacts:
    """Choose where the survey runs: the partition that was named, else the first usable one."""
    if wanted is not None:
        named = cluster.partition(wanted)
        if named is None:
            known = ", ".join(one.name for one in cluster.partitions)
            raise UsageError(f"no partition is called `{wanted}`", hint=f"there are: {known}")
        if groups_of(cluster.nodes_of(wanted)):
            return named
        raise UsageError(f"no node of partition `{wanted}` has GPUs")
    groups = groups_of(cluster.nodes)
    for one in sorted(cluster.partitions, key=lambda partition: not partition.default):
        is_usable = refusal(one, login, cluster.accounting) is None
        if groups and one.name in groups[0].partitions and is_usable:
            return one
    raise HpctrainError("no partition with GPUs takes a job of yours", hint="--partition names one")


def _whole_node(group: NodeGroup) -> str:
    """Name all GPUs of a node, with their type: a partition may have several."""
    return f"gpu:{group.type}:{group.per_node}" if group.type else f"gpu:{group.per_node}"


def _refuse_invalid(found: DetectedProfile) -> None:
    """Load the text like any profile: what this command writes must be valid."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{found.name}.yaml"
        path.write_text(found.text, encoding="utf-8")
        load_profile(path)


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _groups() -> list[str]:
    found = []
    for number in {os.getegid(), *os.getgroups()}:
        try:
            found.append(grp.getgrgid(number).gr_name)
        except KeyError:
            continue
    return found
