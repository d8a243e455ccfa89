"""Compare what a script asks of Slurm with the job that Slurm has made of it. Pure.

A job_submit plug-in, a default of the site, or a site's own command in the place of sbatch may make
another job than the script asks for (slurm.conf(5), JobSubmitPlugins). Belongs here: reading what
is asked, and the differences. Does not belong here: queries (`client`), what follows for a run
(`hpctrain.job.job_submission`).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpctrain.base.units import short_duration
from hpctrain.slurm.parse import gpus_per_node
from hpctrain.slurm.records import JobRecord, JobTerms

JobSetting = Literal[
    "partition",
    "QOS",
    "account",
    "reservation",
    "time limit",
    "number of nodes",
    "GPUs per node",
    "CPUs",
    "comment",
    "job name",
    "requeue flag",
]


@dataclass(frozen=True)
class JobChange:
    """A setting that the job has otherwise than the script asks for; both values as text."""

    setting: JobSetting
    asked: str
    made: str

    def __str__(self) -> str:
        return f"Slurm changed the {self.setting}: asked {self.asked}, is {self.made}"


def requested_job(script: str, options: Sequence[str] = ()) -> JobRecord:
    """Read the job that a script asks for; options of the command line count before its own lines.

    None for what is not asked, or asked in a form that is not compared, such as a range of nodes.
    """
    asked: dict[str, str] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            asked |= _options(shlex.split(line.removeprefix("#SBATCH"), comments=True))
        elif line.strip() and not line.startswith("#"):
            break  # sbatch(1): directives end at the first command
    asked |= _options(options)
    nodes = _number(asked.get("nodes"))
    tasks = _number(asked.get("ntasks"))
    if tasks is None and nodes is not None and "ntasks-per-node" in asked:
        per_node = _number(asked["ntasks-per-node"])
        tasks = None if per_node is None else nodes * per_node
    # with these Slurm counts cores or threads otherwise than tasks ask for them (sbatch(1))
    plain = not {"hint", "threads-per-core"} & asked.keys()
    per_task = _number(asked.get("cpus-per-task", "1"))
    cpus = tasks * per_task if plain and tasks is not None and per_task is not None else None
    gpus = None
    if "gpus-per-node" in asked:
        gpus = gpus_per_node(f"gres:gpu:{asked['gpus-per-node']}")
    elif "gpu" in asked.get("gres", ""):
        entries = asked["gres"].split(",")
        gpus = gpus_per_node(",".join(f"gres:{entry}" for entry in entries))
    return JobRecord(
        job_id=0,
        name=asked.get("job-name"),
        partition=asked.get("partition"),
        account=asked.get("account"),
        comment=asked.get("comment"),
        time_limit_seconds=_time_seconds(asked.get("time", "")),
        node_count=nodes,
        terms=JobTerms(asked.get("qos"), asked.get("reservation"), cpus, gpus or None),
        requeue=True if "requeue" in asked else False if "no-requeue" in asked else None,
    )


def job_changes(asked: JobRecord, made: JobRecord) -> tuple[JobChange, ...]:
    """List what Slurm has changed; what it does not report is not compared.

    What was not asked for counts only where it binds the job to nodes or times: a reservation.
    """
    return tuple(
        JobChange(setting, before, after)
        for setting, before, after in _settings(asked, made)
        if before is not None and after is not None and before != after
    )


def _settings(
    asked: JobRecord, made: JobRecord
) -> Iterator[tuple[JobSetting, str | None, str | None]]:
    """Yield each setting as it was asked for and as it is, None for what is not to be compared."""
    listed = asked.partition is not None and made.partition in asked.partition.split(",")
    yield "partition", None if listed else asked.partition, made.partition
    # slurmctld and slurmdbd keep these names in lower case
    yield "QOS", _lower(asked.terms.qos), _lower(made.terms.qos)
    yield "account", _lower(asked.account), _lower(made.account)
    yield "reservation", asked.terms.reservation or "none", made.terms.reservation or "none"
    yield "time limit", _minutes(asked.time_limit_seconds), _minutes(made.time_limit_seconds)
    yield "number of nodes", _text(asked.node_count), _text(made.node_count)
    yield "GPUs per node", _text(asked.terms.gpus_per_node), _text(made.terms.gpus_per_node)
    fewer = (made.terms.cpu_count or 0) < (
        asked.terms.cpu_count or 0
    )  # whole nodes have more of them
    yield "CPUs", _text(asked.terms.cpu_count) if fewer else None, _text(made.terms.cpu_count)
    kept = asked.comment is None or asked.comment in (made.comment or "").split()
    yield "comment", None if kept else asked.comment, made.comment or "none"
    yield "job name", asked.name, made.name
    yield "requeue flag", _switch(asked.requeue), _switch(made.requeue)


def _text(number: int | None) -> str | None:
    return None if number is None else str(number)


def _lower(name: str | None) -> str | None:
    return None if name is None else name.lower()


def _switch(value: bool | None) -> str | None:
    return None if value is None else "on" if value else "off"


def _minutes(seconds: float | None) -> str | None:
    """Name a limit in the whole minutes that Slurm counts it in."""
    if seconds is None:
        return None
    return "none" if seconds == math.inf else short_duration(60 * math.ceil(seconds / 60))


def _options(words: Sequence[str]) -> dict[str, str]:
    """Read `--name=value` and `--name`; the script has no other form of them."""
    pairs = (word[2:].partition("=") for word in words if word.startswith("--"))
    return {name: value for name, _, value in pairs}


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _time_seconds(text: str) -> float | None:
    """Read sbatch(1), --time: minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if match is None:
        return math.inf if text.upper() in ("UNLIMITED", "INFINITE") else None
    days, *numbers = (None if part is None else int(part) for part in match.groups())
    first, second, third = numbers
    if days is not None or third is not None:
        hours, minutes, seconds = first or 0, second or 0, third or 0
    else:
        hours, minutes, seconds = 0, first or 0, second or 0
    return float((days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds)
