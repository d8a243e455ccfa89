"""Checks the options of sbatch and srun that a site adds, against what Slurm has and hpctrain sets.

Belongs here: the names of options by version of Slurm, and those that hpctrain sets itself, each
with what happens to a site's own and why. Does not belong here: quoting and order
(`hpctrain.job.render`).

Sources: `sbatch --help` and `srun --help` of 22.05.8, 24.11.5 and 26.05.5; sbatch(1), srun(1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from hpctrain.spec.document import Contradiction, Contradictions, Document
from hpctrain.spec.fields import did_you_mean
from hpctrain.spec.job_text import job_text_parts

OptionName = Annotated[str, Field(pattern=r"^[a-z][A-Za-z0-9_-]*$")]
OptionValue = bool | int | str | tuple[int | str, ...]
Command = Literal["sbatch", "srun"]

_BOTH = (
    "acctg-freq core-spec cores-per-socket cpu-freq extra-node-info gpu-freq gres-flags "
    "hint mem-bind network overcommit profile propagate sockets-per-node thread-spec "
    "threads-per-core"
)
_OF_SBATCH = (
    "bb bbf begin cluster-constraint clusters contiguous deadline delay-boot error exclude "
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
_CPUS = "use `resources.cpus_per_gpu` of the spec"
_GPUS = "use `slurm.gpu_request`"
_STEPS = "the supervisor ends steps itself, after it has found out which rank failed first"
_ALL_NODES = "a launch has all of its nodes"
_LOGS = "hpctrain finds and reads its logs where it puts them"

# Options that hpctrain sets itself, by who has them. A site's own is refused where it asks for
# something that has a field, or that contradicts what hpctrain relies on.
_REFUSED = {
    "both": {
        "account": "use `slurm.account`",
        "constraint": "use `slurm.constraint`",
        "comment": "use `slurm.comment`",
        "dependency": _CONTINUATION,
        "distribution": "ranks are numbered along the nodes, as the plan assumes",
        "exclusive": "use `slurm.exclusive`",
        "export": "use `slurm.export`",
        "partition": "use `slurm.partitions`",
        "qos": "use `slurm.qos`",
        "reservation": "use `slurm.reservation`",
        **dict.fromkeys(("segment", "switches"), "use `network.switches`"),
        "time": "use `resources.walltime` of the spec, or `max_walltime`",
        **dict.fromkeys(("cpus-per-gpu", "cpus-per-task"), _CPUS),
        **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-socket"), _GPUS),
        **dict.fromkeys(("gpus-per-task", "ntasks-per-gpu"), _GPUS),
        **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
        **dict.fromkeys(("ntasks-per-core", "ntasks-per-socket"), _SIZE),
        **dict.fromkeys(("gid", "hold", "uid", "help", "usage"), _SUBMITTING),
    },
    "sbatch": {
        "array": _CONTINUATION,
        "gpu-bind": "use `slurm.options.srun`: steps would inherit it without a word in the script",
        **dict.fromkeys(("export-file", "get-user-env"), "use `slurm.export`"),
        "nodefile": "use `nodelist` or `exclude`",
        **dict.fromkeys(("requeue", "no-requeue"), _CONTINUATION),
        **dict.fromkeys(("test-only", "wrap"), _SUBMITTING),
    },
    "srun": {
        **dict.fromkeys(("nodelist", "exclude", "relative"), "the supervisor chooses the nodes"),
        **dict.fromkeys(("jobid", "het-group", "no-allocate"), "one step is one launch"),
        **dict.fromkeys(("multi-prog", "pty"), "all tasks run the trainer"),
    },
}
# It is left out, and commands say so, where nothing is lost without it.
_LEFT_OUT = {
    "both": {
        "chdir": "jobs run in the directory of the run",
        "input": "ranks read nothing from a terminal",
        "job-name": "jobs have the name of their run, by which hpctrain finds them",
        "no-kill": "it follows from `resources.spare_nodes` and `min_nodes`",
        "output": _LOGS,
        "signal": "the supervisor asks for a warning of its own before the time limit",
        **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), _SIZE),
        **dict.fromkeys(("quiet", "verbose"), _SUBMITTING),
    },
    "sbatch": {
        "open-mode": "logs are appended to, or a requeued job would overwrite its own",
        **dict.fromkeys(("kill-on-invalid-dep", "parsable", "wait"), _SUBMITTING),
    },
    "srun": {
        **dict.fromkeys(("exact", "exclusive", "oversubscribe", "overlap"), _ALL_NODES),
        **dict.fromkeys(("kill-on-bad-exit", "quit-on-interrupt", "wait"), _STEPS),
        **dict.fromkeys(("label", "unbuffered"), "ranks have logs of their own"),
        "disable-status": "the supervisor ends steps, and nobody types into them",
        "error": _LOGS,
        "immediate": "the job has its nodes when a step starts",
        "preserve-env": "the number of tasks follows from the plan",
    },
}
# Refused, but where the option says what hpctrain does anyway: it is left out then, too.
_FIELDS = ("account", "constraint", "exclusive", "qos", "reservation")
_BY_CONTINUATION = ("requeue", "no-requeue")
_USUAL = {
    ("sbatch", "distribution"): ("block", "block:block"),
    ("srun", "distribution"): ("block", "block:block"),
    ("srun", "export"): ("ALL",),
}


def available_options(command: str) -> dict[str, str]:
    """Map the options that a site may add to `sbatch` or `srun` to the first version with them."""
    own, later = (_OF_SBATCH, _LATER_SBATCH) if command == "sbatch" else (_OF_SRUN, _LATER_SRUN)
    return dict.fromkeys(f"{_BOTH} {own}".split(), _FIRST_VERSION) | later


def owned_options(command: str) -> dict[str, str]:
    """Map the options of `sbatch` or `srun` that hpctrain sets itself to the reason."""
    both = (*_REFUSED["both"].items(), *_LEFT_OUT["both"].items())
    return dict(both) | _REFUSED[command] | _LEFT_OUT[command]


class SiteOptions(Document):
    """Options of Slurm's commands besides those of hpctrain: name without dashes, and value.

    Those that hpctrain sets itself are left out with a note where nothing is lost, else refused.
    """

    plugins: tuple[OptionName, ...] = Field(
        (), description="Options of the site's SPANK plugins that the two maps may have"
    )
    sbatch: dict[OptionName, OptionValue] = Field(
        {}, description="Of the job: text or number, true for a bare option, a list for several"
    )
    srun: dict[OptionName, OptionValue] = Field(
        {}, description="Of the step that trains, likewise; the job puts in `$NAME`"
    )

    def given(self) -> Iterator[tuple[str, str, OptionValue]]:
        """List command, name and value of all options, those that are left out included."""
        yield from (("sbatch", name, value) for name, value in self.sbatch.items())
        yield from (("srun", name, value) for name, value in self.srun.items())

    def used(self, command: Command) -> dict[str, OptionValue]:
        """Return the options that a command gets: all but those that hpctrain sets itself."""
        given, own = self.sbatch if command == "sbatch" else self.srun, owned_options(command)
        return {name: value for name, value in given.items() if name not in own}


def refused_options(options: SiteOptions, fields: Mapping[str, object]) -> list[Contradiction]:
    """List all options that a site may not add, and values that no command could get.

    `fields`: the values of `slurm` beside them.
    """
    found = []
    for command, name, value in options.given():
        wrong = _name_problem(command, name, value, options.plugins, fields)
        if wrong is None and name not in owned_options(command):
            wrong = _value_problem(command, value)
        if wrong is not None:
            message, hint = wrong
            path = ("slurm", "options", command, name)
            found.append(Contradiction(path, f"{command} --{name}: {message}", hint))
    return found


def left_out_options(options: SiteOptions) -> list[tuple[str, str]]:
    """List the options that no command gets because hpctrain sets them itself: path and reason."""
    return [
        (
            f"slurm.options.{command}.{name}",
            (_LEFT_OUT["both"] | _LEFT_OUT[command]).get(name, "hpctrain asks for the same"),
        )
        for command, name, _ in options.given()
        if name in owned_options(command)
    ]


# Directives of hpctrain that a site may leave out. Without `--nodes` the number of tasks says how
# many; srun asks for CPUs itself; without `--no-kill` the loss of a node ends the job.
_MAY_BE_OMITTED = frozenset({"cpus-per-task", "no-kill", "nodes", "open-mode"})


class DirectiveOrder(Document):
    """Which of hpctrain's `#SBATCH` lines a site leaves out, and which stand first."""

    first: tuple[OptionName, ...] = Field(
        (), description="Options that stand first, in this order, such as `[partition, account]`"
    )
    omit: tuple[OptionName, ...] = Field(
        (),
        description="Options that jobs must not have here: `nodes` (the number of tasks says it), "
        "`cpus-per-task`, `open-mode`, `no-kill`; hpctrain relies on the others",
    )

    @field_validator("first", "omit")
    @classmethod
    def _are_options(cls, names: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        field = str(info.field_name)
        own, found = owned_options("sbatch"), []
        for number, name in enumerate(names):
            path = ("slurm", "directives", field, number)
            if name not in own and name not in available_options("sbatch"):
                hint = did_you_mean(name, (*own, *available_options("sbatch")))
                found.append(Contradiction(path, f"sbatch has no option --{name}", hint))
            elif field == "omit" and name not in _MAY_BE_OMITTED:
                reason = own.get(name, "it is one of `slurm.options`: remove it there")
                message = f"--{name} cannot be left out"
                found.append(Contradiction(path, message, reason))
        if found:
            raise Contradictions(found)
        return names

    def applied_to(self, lines: Iterable[str]) -> list[str]:
        """Return the directives without those that are left out, and in order."""
        named = [(line.removeprefix("--").partition("=")[0], line) for line in lines]
        kept = [(name, line) for name, line in named if name not in self.omit]
        order = {name: number for number, name in enumerate(self.first)}
        return [line for _, line in sorted(kept, key=lambda one: order.get(one[0], len(order)))]


def restricting_option(options: Mapping[str, object]) -> tuple[str, int] | None:
    """Find the option that leaves a job or step only some threads of each core, and how many.

    sbatch(1), --hint: one thread with all hints but `multithread`.
    """
    hint, threads = options.get("hint"), str(options.get("threads-per-core", ""))
    if hint in ("nomultithread", "compute_bound", "memory_bound"):
        return "hint", 1
    return ("threads-per-core", int(threads)) if threads.isdecimal() and int(threads) else None


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


def _name_problem(
    command: str,
    name: str,
    value: OptionValue,
    plugins: tuple[str, ...],
    fields: Mapping[str, object],
) -> tuple[str, str] | None:
    available = available_options(command)
    if name in owned_options(command):
        refused = _REFUSED["both"] | _REFUSED[command]
        same = name in _FIELDS and value == fields.get(name)
        if name in _LEFT_OUT[command] or name not in refused or same:
            return None
        if value in _USUAL.get((command, name), ()) or name in _BY_CONTINUATION:
            return None
        return "hpctrain sets this itself", refused[name]
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
