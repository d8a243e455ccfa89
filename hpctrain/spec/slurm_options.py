"""Checks the options of sbatch and srun that a site adds, against what Slurm has and hpctrain sets.

Belongs here: the names of options by version of Slurm, and those that no profile may set, each
with the field to use instead. Does not belong here: quoting and order (`hpctrain.job.render`).

Sources: `sbatch --help` and `srun --help` of 22.05.8, 24.11.5 and 26.05.5; sbatch(1), srun(1).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from hpctrain.spec.document import Contradiction, Document
from hpctrain.spec.fields import did_you_mean
from hpctrain.spec.job_text import job_text_parts

OptionName = Annotated[str, Field(pattern=r"^[a-z][A-Za-z0-9_-]*$")]
OptionValue = bool | int | str | tuple[int | str, ...]

_BOTH = (
    "acctg-freq core-spec cores-per-socket cpu-freq extra-node-info gpu-freq gres-flags "
    "hint mem-bind network overcommit profile propagate sockets-per-node thread-spec "
    "threads-per-core"
)
_OF_SBATCH = (
    "bb bbf begin cluster-constraint contiguous deadline delay-boot error exclude "
    "ignore-pbs licenses mail-type mail-user mcs-label mincpus nice nodelist oversubscribe power "
    "priority reboot spread-job time-min tmp use-min-nodes wait-all-nodes wckey"
)
_OF_SRUN = (
    "accel-bind bcast bcast-exclude compress cpu-bind epilog gpu-bind mpi prolog resv-ports "
    "send-libs slurmd-debug task-epilog task-prolog"
)
_FIRST_VERSION = "22.05"
# Options that came later, with the first version that has them.
_LATER_SBATCH = {
    **dict.fromkeys(("oom-kill-step", "resv-ports", "tres-bind", "tres-per-task"), "24.11"),
    "spread-segments": "26.05",
}
_LATER_SRUN = dict.fromkeys(("oom-kill-step", "tres-bind", "tres-per-task"), "24.11")

_SIZE = "it follows from the plan: see `resources`"
_MEMORY = "use `slurm.memory` or `slurm.memory_per_gpu`"
_SUBMITTING = "it is about submitting, which hpctrain does"
_CONTINUATION = "use `continuation`"
_CONTAINER = "use `software.container`"
_FOUND = "hpctrain finds and reads its jobs by it"
_OWNED_BY_BOTH = {
    "account": "use `slurm.account`",
    "clusters": "use `slurm.cluster`",
    "chdir": "jobs run in the directory of the run",
    "constraint": "use `slurm.constraint`",
    "cpus-per-gpu": "use `resources.cpus_per_gpu` of the spec",
    "cpus-per-task": "use `resources.cpus_per_gpu` of the spec",
    "comment": "use `slurm.comment`",
    "dependency": _CONTINUATION,
    "distribution": "ranks are numbered along the nodes, as the plan assumes",
    "exclusive": "use `slurm.exclusive`",
    "export": "use `slurm.export`",
    "gres": "use `slurm.gpu_request`",
    "input": "ranks read nothing from a terminal",
    "job-name": _FOUND,
    "no-kill": "it follows from `resources.spare_nodes` and `min_nodes`",
    "output": _FOUND,
    "partition": "use `slurm.partitions`",
    "qos": "use `slurm.qos`",
    "reservation": "use `slurm.reservation`",
    "segment": "use `network.switches`",
    "signal": "the supervisor needs the warning before the time limit",
    "switches": "use `network.switches`",
    "time": "use `resources.walltime` of the spec, or `max_walltime`",
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket"), "use `slurm.gpu_request`"),
    **dict.fromkeys(("gpus-per-task", "ntasks-per-gpu"), "use `slurm.gpu_request`"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-core"), _SIZE),
    **dict.fromkeys(("ntasks-per-node", "ntasks-per-socket"), _SIZE),
    **dict.fromkeys(("gid", "hold", "quiet", "uid", "verbose", "help", "usage"), _SUBMITTING),
}
_OWNED_BY_SBATCH = {
    "array": _CONTINUATION,
    "export-file": "use `slurm.export`",
    "gpu-bind": "use `slurm.options.srun`: steps would inherit it without a word in the script",
    "get-user-env": "use `slurm.export`",
    "nodefile": "use `nodelist` or `exclude`",
    "open-mode": "a requeued job would overwrite its log",
    **dict.fromkeys(("requeue", "no-requeue"), _CONTINUATION),
    **dict.fromkeys(("kill-on-invalid-dep", "parsable", "test-only", "wait", "wrap"), _SUBMITTING),
}
_OWNED_BY_SRUN = {
    **dict.fromkeys(("exclude", "nodelist", "relative"), "the supervisor chooses the nodes"),
    **dict.fromkeys(("immediate", "jobid", "het-group", "no-allocate"), "one step is one launch"),
    **dict.fromkeys(("exact", "overlap", "oversubscribe"), "a launch has all of its nodes"),
    **dict.fromkeys(("label", "unbuffered"), "ranks have logs of their own"),
    **dict.fromkeys(("kill-on-bad-exit", "wait", "quit-on-interrupt"), "the supervisor ends steps"),
    **dict.fromkeys(("multi-prog", "pty", "disable-status"), "all tasks run the trainer"),
    "error": "the supervisor reads what ranks report in one log",
    "preserve-env": "the number of tasks follows from the plan",
}


def available_options(command: str) -> dict[str, str]:
    """Map the options that a site may add to `sbatch` or `srun` to the first version with them."""
    own, later = (_OF_SBATCH, _LATER_SBATCH) if command == "sbatch" else (_OF_SRUN, _LATER_SRUN)
    return dict.fromkeys(f"{_BOTH} {own}".split(), _FIRST_VERSION) | later


def owned_options(command: str) -> dict[str, str]:
    """Map the options that a site may not add to `sbatch` or `srun` to the reason."""
    return _OWNED_BY_BOTH | (_OWNED_BY_SBATCH if command == "sbatch" else _OWNED_BY_SRUN)


class SiteOptions(Document):
    """Options of Slurm's commands besides those of hpctrain: name without dashes, and value."""

    plugins: tuple[OptionName, ...] = Field(
        (), description="Options of the site's SPANK plugins that the two maps may have"
    )
    sbatch: dict[OptionName, OptionValue] = Field(
        {}, description="Of the job: text or number, true for a bare option, a list for several"
    )
    srun: dict[OptionName, OptionValue] = Field(
        {}, description="Of the step that trains, likewise; the job puts in `$NAME`"
    )

    @field_validator("sbatch", "srun")
    @classmethod
    def _may_be_added(
        cls, options: dict[str, OptionValue], info: ValidationInfo
    ) -> dict[str, OptionValue]:
        command = info.field_name or ""
        plugins = info.data.get("plugins", ())
        for name, value in options.items():
            wrong = _name_problem(command, name, plugins) or _value_problem(command, value)
            if wrong is not None:
                message, hint = wrong
                path = ("slurm", "options", command, name)
                raise Contradiction(path, f"{command} --{name}: {message}", hint)
        return options


def too_new_options(options: SiteOptions, version: str) -> list[str]:
    """List the options, as written for a command, that a version such as `22.05` lacks."""
    return [
        f"{command} --{name} (since {since})"
        for command, given in (("sbatch", options.sbatch), ("srun", options.srun))
        for name, since in available_options(command).items()
        if name in given and name not in options.plugins and _number(since) > _number(version)
    ]


def written_options(options: Mapping[str, OptionValue]) -> tuple[tuple[str, str | None], ...]:
    """List each option with its value as text (None: without); one of a list is repeated."""
    found: list[tuple[str, str | None]] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        found += [(name, None if one is True else str(one)) for one in values]
    return tuple(found)


def _name_problem(command: str, name: str, plugins: tuple[str, ...]) -> tuple[str, str] | None:
    owned, available = owned_options(command), available_options(command)
    if name in owned:
        return "hpctrain sets this itself", owned[name]
    if name.startswith("container"):
        return "hpctrain sets this itself", _CONTAINER
    if name in available or name in plugins:
        return None
    other = "srun" if command == "sbatch" else "sbatch"
    if name in available_options(other):
        return f"{command} has no such option", f"{other} has it"
    meant = did_you_mean(name, available)
    plugin = "options of SPANK plugins are listed in `slurm.options.plugins`"
    return f"{command} has no such option", f"{meant} {plugin}" if meant else plugin


def _value_problem(command: str, value: OptionValue) -> tuple[str, str] | None:
    if value is False:
        return "false is no value", "remove it, or give `true` for an option without a value"
    for one in value if isinstance(value, tuple) else (value,):
        text = str(one)
        if command == "srun":
            try:
                job_text_parts(text)
            except ValueError as error:
                return str(error), "`$NAME` is put in by the job"
        elif "$" in text:
            return "sbatch expands no variables", "only patterns of sbatch(1) such as `%j`"
    return None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
