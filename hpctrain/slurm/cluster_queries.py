"""Ask a Slurm about its cluster in one pass of few queries, each with a time limit.

Eight at most, beside those that are repeated: `scontrol show` config, node, partition, topology,
licenses and reservation, each one RPC to slurmctld, and two of sacctmgr to slurmdbd. A query
without an answer is repeated after a pause that doubles; optional ones may stay unanswered.
Belongs here: which commands are run, counting them, and parsing their texts. Does not belong here:
queries about jobs (`client`).
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from hpctrain.base import clock
from hpctrain.base.errors import SlurmError, SlurmRefusedError, SlurmUnreachableError
from hpctrain.slurm import parse
from hpctrain.slurm.cluster_records import (
    Accounting,
    Association,
    ClusterFacts,
    Leaf,
    License,
    NodeFacts,
    PartitionFacts,
    PreemptionMode,
    Qos,
    Reservation,
    TopologyKind,
)
from hpctrain.slurm.parse import epoch_seconds, expand_hosts, limit_seconds
from hpctrain.slurm.process import Command, Runner, accepted, for_queries, parsed, run_command
from hpctrain.slurm.records import SlurmConfig
from hpctrain.slurm.settings import capabilities

ATTEMPTS = 3
FIRST_PAUSE_SECONDS = 1.0
_STEP_SECONDS = 300.0
# Where Slurm's programs are if they are not on PATH: AWS ParallelCluster, NVIDIA Base Command
# Manager, and what sites build by themselves.
USUAL_PLACES = (
    "/opt/slurm/bin",
    "/cm/shared/apps/slurm/current/bin",
    "/usr/local/slurm/bin",
    "/usr/local/bin",
)
_Parsed = TypeVar("_Parsed")


class ClusterQueries:
    """One pass over a cluster. `count` is the number of commands that were run.

    `cluster`: the one that commands name (`--clusters`); None: that of this host. `run` is a seam
    for tests.
    """

    def __init__(
        self,
        user: str,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 30.0,
        *,
        cluster: str | None = None,
        run: Runner = run_command,
    ) -> None:
        self.count = 0
        self._where = () if cluster is None else (f"--clusters={cluster}",)
        self._user = user
        self._environment = for_queries(os.environ if environment is None else environment)
        self._timeout_seconds = timeout_seconds
        self._run = run
        self._unanswered: dict[str, str] = {}

    def facts(self) -> ClusterFacts:
        """Read everything. Raises SlurmError without configuration, nodes or partitions."""
        began = clock.now()
        text = self._ask("scontrol", "show", "config")
        config_seconds, told = clock.now() - began, controller_time(text)
        config = SlurmConfig(parse.config_values(text))
        kind = topology_kind(config)
        found_nodes = self._shown("node", nodes)
        found_partitions = self._shown("partition", lambda text: partitions(text, config))
        switches: tuple[TopologyKind, tuple[Leaf, ...]] | None = (kind, ())
        if kind != "none" or capabilities(config).hides_topology:
            switches = self._shown_if_answered("topology", topology)
        return ClusterFacts(
            config=config,
            nodes=found_nodes,
            partitions=found_partitions,
            topology=kind if switches is None or not switches[1] else switches[0],
            leaves=switches[1] if switches is not None else (),
            licenses=self._shown_if_answered("licenses", licenses) or (),
            reservations=self._shown_if_answered("reservation", reservations) or (),
            accounting=self._accounting(config) if config.accounting_enabled else None,
            unanswered=dict(self._unanswered),
            queries=self.count,
            config_seconds=config_seconds,
            # scontrol prints whole seconds, so the middle of that second
            clock_ahead_seconds=None if told is None else told + 0.5 - began - config_seconds / 2,
        )

    def _accounting(self, config: SlurmConfig) -> Accounting | None:
        where = [f"name={self._user}", f"cluster={config.cluster_name}"]
        rights = f"format={','.join(ASSOCIATION_FIELDS)}"
        try:
            associations = self._ask(
                *("sacctmgr", "-nP", "show", "user", "where", *where, "withassoc", rights)
            )
            kinds = f"format={','.join(QOS_FIELDS)}"
            qos = self._ask("sacctmgr", "-nP", "show", "qos", kinds)
            return parsed("sacctmgr", lambda: accounting(associations, qos))
        except SlurmError as error:
            self._unanswered["sacctmgr"] = str(error)
            return None

    def _shown(self, what: str, read: Callable[[str], _Parsed]) -> _Parsed:
        # -a: hidden partitions, too, whose jobs may take nodes away
        text = self._ask("scontrol", "-a", "-o", "show", what)
        return parsed(f"scontrol show {what}", lambda: read(text))

    def _shown_if_answered(self, what: str, read: Callable[[str], _Parsed]) -> _Parsed | None:
        try:
            return self._shown(what, read)
        except SlurmError as error:
            self._unanswered[f"scontrol show {what}"] = str(error)
            return None

    def _ask(self, *argv: str) -> str:
        """Run a command. Raises SlurmUnreachableError after ATTEMPTS without an answer, and
        SlurmRefusedError at once.
        """
        if argv[0] == "scontrol":
            argv = (argv[0], *self._where, *argv[1:])
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.count += 1
                answer = self._run(Command(argv, self._environment, self._timeout_seconds))
                return accepted(argv, answer).stdout
            except SlurmUnreachableError as error:
                elsewhere = [p for p in USUAL_PLACES if os.access(f"{p}/{argv[0]}", os.X_OK)]
                if isinstance(error.__cause__, FileNotFoundError) and elsewhere:
                    hint = f"{elsewhere[0]} has it: `export PATH={elsewhere[0]}:$PATH`"
                    raise SlurmUnreachableError(str(error), hint=hint) from error
                if attempt == ATTEMPTS:
                    raise
            # jitter: many users begin to ask again when a controller comes back
            clock.sleep(FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.75, 1.25))
        raise AssertionError("the last attempt returns or raises")


def step_output(job_id: str, program: str) -> str:
    """Run a Python program, given as text, on one node of a running job; return its stdout.

    Raises SlurmRefusedError if srun fails, SlurmUnreachableError if it takes too long.
    """
    argv = ("srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1", "python3", "-")
    answer = run_command(Command(argv, for_queries(os.environ), _STEP_SECONDS, program))
    if answer.returncode != 0:
        words = answer.stderr.strip() or f"`srun` ended with exit code {answer.returncode}"
        raise SlurmRefusedError(words)
    return answer.stdout


# -- Parse what scontrol and sacctmgr print about a cluster. Pure -------------------------------
# `scontrol -o` prints one record a line as `Key=value`; values with blanks (OS, Reason, Comment,
# Extra) are free text, so a word counts as a key only where Slurm's own names begin, and the first
# value of a key wins. Formats: scontrol(1), sacctmgr(1) `--parsable2`; 22.05, 24.11 and 26.05.
#
# Raises ValueError for text that does not have the expected form.


_NOTHING = frozenset({"", "(null)", "N/A", "NONE", "None"})
_EVERYBODY = frozenset({"ALL", "all", *_NOTHING})
ASSOCIATION_FIELDS = (
    *("DefaultAccount", "Account", "Partition", "QOS", "DefaultQOS"),
    *("MaxJobs", "MaxSubmit", "MaxTRES", "MaxWall", "GrpTRES", "GrpTRESMins"),
)
QOS_FIELDS = (
    *("Name", "Preempt", "PreemptMode", "GraceTime", "MaxWall"),
    *("MaxTRESPU", "MaxSubmitJobsPU", "GrpTRES", "MaxTRES", "MinTRES", "Flags"),
)
_KEY = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z_:/]*)=")


def records(text: str) -> Iterator[dict[str, str]]:
    """Parse `scontrol -o`: one record of keys and values for each line that has any."""
    for line in text.splitlines():
        found: dict[str, str] = {}
        marks = list(_KEY.finditer(line))
        ends = [mark.start() for mark in marks[1:]]
        for mark, end in zip(marks, [*ends, len(line)], strict=False):
            found.setdefault(mark[1], line[mark.end() : end].strip())
        if found:
            yield found


def nodes(text: str) -> tuple[NodeFacts, ...]:
    """Parse `scontrol -o show node`. Raises ValueError if there is none."""
    found = tuple(_node(row) for row in records(text) if "NodeName" in row)
    if not found:
        raise ValueError(f"no node in {text[:200]!r}")
    return found


def _node(row: dict[str, str]) -> NodeFacts:
    # slurm.conf(5), CPUs: a site may count cores where they have two threads
    threads, cores = int(row.get("ThreadsPerCore", 1) or 1), 0
    if row.get("Sockets", "").isdecimal() and row.get("CoresPerSocket", "").isdecimal():
        cores = int(row["Sockets"]) * int(row["CoresPerSocket"])
    if cores:
        threads = min(threads, max(1, int(row.get("CPUTot", 0) or 0) // cores))
    return NodeFacts(
        name=row["NodeName"],
        address=row.get("NodeAddr", ""),
        arch=row.get("Arch", ""),
        threads_per_core=threads,
        cpus=int(row.get("CPUEfctv") or row.get("CPUTot") or 0),
        memory_mib=int(row.get("RealMemory", 0)),
        reserved_mib=int(row.get("MemSpecLimit", 0)),
        gpus=gpus(row.get("Gres", "")),
        features=frozenset(_names(row.get("ActiveFeatures", "")) or ()),
        partitions=_names(row.get("Partitions", "")),
        state=row.get("State", "").lower(),
    )


def gpus(gres: str) -> tuple[tuple[str, int], ...]:
    """Parse the GPUs of Gres: `gpu:h100:8(S:0-1)`, `gpu:4`, several types joined by commas.

    Slices of a GPU (MIG types such as `1g.10gb`) come along as Slurm counts them. Other kinds of
    Gres are no GPUs: shares of one (`shard`, `mps`), network cards (`nic`).
    """
    found = []
    for entry in re.split(r",(?![^(]*\))", gres):
        match = re.fullmatch(r"gpu(?::([^:()]+))?:(\d+)(?:\(.*\))?", entry)
        if match:
            found.append((match[1] or "", int(match[2])))
    return tuple(found)


def partitions(text: str, config: SlurmConfig) -> tuple[PartitionFacts, ...]:
    """Parse `scontrol -o show partition`. Raises ValueError if there is none."""
    found = tuple(_partition(row, config) for row in records(text) if "PartitionName" in row)
    if not found:
        raise ValueError(f"no partition in {text[:200]!r}")
    return found


def _partition(row: dict[str, str], config: SlurmConfig) -> PartitionFacts:
    text = row.get("AllocNodes", "ALL")
    submit_hosts = () if text in _EVERYBODY else expand_hosts(text)
    return PartitionFacts(
        name=row["PartitionName"],
        default=row.get("Default") == "YES",
        is_up=row.get("State", "UP") == "UP",
        hidden=row.get("Hidden") == "YES",
        max_seconds=_limit(row.get("MaxTime", "")),
        min_nodes=_count(row.get("MinNodes", "")) or 0,
        max_nodes=_count(row.get("MaxNodes", "")),
        preemption=_preemption(row, config),
        grace_seconds=int(row.get("GraceTime", "0") or 0),
        priority_tier=int(row.get("PriorityTier", "1") or 1),
        whole_nodes=row.get("OverSubscribe") == "EXCLUSIVE" or row.get("Exclusive") == "NODE",
        reservation_only=row.get("ReqResv") == "YES",
        root_only=row.get("RootOnly") == "YES",
        allow_accounts=_limited_to(row.get("AllowAccounts", "")),
        deny_accounts=_limited_to(row.get("DenyAccounts", "")),
        allow_qos=_limited_to(row.get("AllowQos", "")),
        deny_qos=_limited_to(row.get("DenyQos", "")),
        allow_groups=_limited_to(row.get("AllowGroups", "")),
        submit_hosts=submit_hosts,
        qos=None if row.get("QoS", "") in _NOTHING else row["QoS"],
    )


def preemption_mode(words: str) -> PreemptionMode:
    """Parse PreemptMode; `SUSPEND,GANG` suspends, `GANG` alone preempts nobody (slurm.conf(5))."""
    modes = {word.strip().lower() for word in words.split(",")}
    if "suspend" in modes:
        return "suspend"
    if "requeue" in modes:
        return "requeue"
    return "cancel" if "cancel" in modes else "off"


def _preemption(row: dict[str, str], config: SlurmConfig) -> PreemptionMode:
    """A partition without an own mode has the cluster's; without a plugin nobody preempts."""
    if config.get("PreemptType").rpartition("/")[2] in ("", "none"):
        return "off"
    return preemption_mode(row.get("PreemptMode") or config.get("PreemptMode"))


def topology_kind(config: SlurmConfig) -> TopologyKind:
    """Read TopologyPlugin: by default `none`, `default` (24.11) or `flat` (26.05), all of which
    know no switches.
    """
    name = config.get("TopologyPlugin").rpartition("/")[2]
    if name in ("", "none", "default", "flat"):
        return "none"
    return name if name in ("tree", "block") else "other"  # type: ignore[return-value]


def topology(text: str) -> tuple[TopologyKind, tuple[Leaf, ...]]:
    """Parse `scontrol -o show topology`: switches of the lowest level, or blocks."""
    found: list[Leaf] = []
    kind: TopologyKind = "other"
    for row in records(text):
        if "SwitchName" in row:
            kind, is_leaf = "tree", row.get("Level") == "0"
        else:
            is_leaf = "BlockName" in row  # an AggregatedBlock is several of them
            kind = "block" if is_leaf else kind
        if is_leaf and row.get("Nodes"):
            name = row.get("SwitchName") or row["BlockName"]
            found.append(Leaf(name, expand_hosts(row["Nodes"])))
    return kind, tuple(found)


def licenses(text: str) -> tuple[License, ...]:
    """Parse `scontrol -o show licenses`."""
    rows = (row for row in records(text) if "LicenseName" in row)
    return tuple(License(row["LicenseName"], int(row.get("Total", 0) or 0)) for row in rows)


def reservations(text: str) -> tuple[Reservation, ...]:
    """Parse `scontrol -o show reservation`, printed under TZ=UTC0."""
    return tuple(
        Reservation(
            name=row["ReservationName"],
            start_time=epoch_seconds(row.get("StartTime", "")),
            end_time=epoch_seconds(row.get("EndTime", "")),
            node_count=int(row.get("NodeCnt", 0) or 0),
            is_maintenance="MAINT" in row.get("Flags", "").split(","),
            users=_names(row.get("Users", "")),
            accounts=_names(row.get("Accounts", "")),
        )
        for row in records(text)
        if "ReservationName" in row
    )


def accounting(associations: str, qos: str) -> Accounting:
    """Parse `sacctmgr -nP show user withassoc` and `show qos` with the fields above."""
    rows = [_row(line, ASSOCIATION_FIELDS) for line in associations.splitlines() if line.strip()]
    default = next((row["DefaultAccount"] for row in rows if row["DefaultAccount"]), None)
    return Accounting(
        default_account=default,
        associations=tuple(_association(row) for row in rows if row["Account"]),
        qos=tuple(_qos(_row(line, QOS_FIELDS)) for line in qos.splitlines() if line.strip()),
    )


def _association(row: dict[str, str]) -> Association:
    kept = ("MaxJobs", "MaxSubmit", "MaxTRES", "MaxWall", "GrpTRES", "GrpTRESMins")
    return Association(
        account=row["Account"],
        partition=row["Partition"] or None,
        qos=tuple(name for name in row["QOS"].split(",") if name),
        default_qos=row["DefaultQOS"] or None,
        max_seconds=_limit(row["MaxWall"]),
        limits={name: row[name] for name in kept if row[name]},
    )


def _qos(row: dict[str, str]) -> Qos:
    mode = row["PreemptMode"].lower()
    kept = ("MaxWall", "MaxTRESPU", "MaxSubmitJobsPU", "GrpTRES", "MaxTRES", "MinTRES")
    return Qos(
        name=row["Name"],
        preempts=tuple(name for name in row["Preempt"].split(",") if name),
        # `cluster` is the cluster's own mode (sacctmgr(1), PreemptMode)
        preemption=None if mode in ("", "cluster") else preemption_mode(mode),
        grace_seconds=int(limit_seconds(row["GraceTime"]) or 0),
        max_seconds=_limit(row["MaxWall"]),
        limits={name: row[name] for name in kept if row[name]},
        flags=frozenset(_names(row["Flags"].lower())),
    )


def _row(line: str, fields: tuple[str, ...]) -> dict[str, str]:
    cells = line.split("|")
    if len(cells) != len(fields):
        raise ValueError(f"not {len(fields)} fields: {line[:200]!r}")
    return dict(zip(fields, cells, strict=True))


def controller_time(text: str) -> float | None:
    """Parse the first line of `scontrol show config`, the controller's clock under TZ=UTC0.

    `Configuration data as of 2026-11-23T02:47:36`: slurmctld fills in its time (proc_req.c).
    """
    match = re.match(r"Configuration data as of (\S+)", text)
    return epoch_seconds(match[1]) if match else None


def _names(text: str) -> tuple[str, ...]:
    return () if text in _NOTHING else tuple(name for name in text.split(",") if name)


def _limited_to(text: str) -> tuple[str, ...]:
    return () if text in _EVERYBODY else tuple(name for name in text.split(",") if name)


def _limit(text: str) -> float | None:
    seconds = limit_seconds(text)
    return None if seconds in (None, float("inf")) else seconds


def _count(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
