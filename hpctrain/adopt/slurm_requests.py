"""Turn the options of sbatch and srun in a script into fields of a spec and of a profile.

Belongs here: which field an option becomes, quantities as Slurm writes them. Does not belong here:
reading the lines (`adoption`), the names of options (`hpctrain.spec.slurm_options`, `words.yaml`).

Source: sbatch(1), srun(1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hpctrain.adopt.draft import Draft
from hpctrain.adopt.known_words import WORDS, Option, value_text
from hpctrain.adopt.variables import shell_text
from hpctrain.base.units import ByteSize, Duration
from hpctrain.site.profile_text import Stated
from hpctrain.spec.profile.software import container_option_problem
from hpctrain.spec.slurm_options import available_options, owned_options

# sbatch(1), --time
_TIMES = (
    re.compile(r"(?P<minutes>\d+)"),
    re.compile(r"(?P<minutes>\d+):(?P<seconds>\d+)"),
    re.compile(r"(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)"),
    re.compile(r"(?P<days>\d+)-(?P<hours>\d+)(:(?P<minutes>\d+)(:(?P<seconds>\d+))?)?"),
)
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
# sbatch(1), --mem: default units are megabytes, and a megabyte is 1024 x 1024 bytes
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTkmgt]?)(?:[iI]?[bB])?")
_UNITS = {"": "MiB", "K": "KiB", "M": "MiB", "G": "GiB", "T": "TiB"}
_GPU = re.compile(r"(?:gres[:/])?gpu(?::(?P<type>[A-Za-z][\w.-]*))?(?::(?P<count>\d+))?")
_SIGNAL = re.compile(r"(?P<batch>B:|R:|BR:|RB:)?(?:SIG)?(?P<name>\w+)(?:@(?P<seconds>\d+))?")
_SIGNALS = {"1": "HUP", "2": "INT", "10": "USR1", "12": "USR2", "15": "TERM"}
# Options with a field of the spec of the same meaning.
_OF_SPEC = {
    "reservation": "resources.reservation",
    "licenses": "resources.licenses",
    "nodelist": "resources.nodelist",
    "exclude": "resources.exclude",
    "gpu-bind": "resources.gpu_bind",
    "segment": "resources.segment",
    "cpus-per-gpu": "resources.cpus_per_gpu",
}
_OF_PROFILE = {
    "account": "slurm.account",
    "qos": "slurm.qos",
    "constraint": "slurm.constraint",
    "comment": "slurm.comment",
}


@dataclass
class Size:
    """How large the script wants its job, as far as it says so, and the lines that say it."""

    nodes: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: tuple[int, int] | None = None  # with its line
    memory: tuple[str, str, int] | None = None  # option, value, line
    lines: list[int] = field(default_factory=list)

    @property
    def per_node(self) -> int | None:
        """GPUs of a node."""
        if self.gpus_per_node is not None:
            return self.gpus_per_node
        if self.gpus_per_task is not None:
            return self.gpus_per_task * (self.node_tasks or 1)
        if self.gpus is not None and self.nodes:
            return self.gpus // self.nodes or None
        return None

    @property
    def node_tasks(self) -> int | None:
        """Tasks of a node."""
        if self.tasks_per_node is not None:
            return self.tasks_per_node
        if self.tasks is not None:
            return max(self.tasks // (self.nodes or 1), 1)
        return None

    @property
    def all_nodes(self) -> int:
        """Nodes of the job: one where the script names no number (sbatch(1), --nodes)."""
        if self.nodes is None and self.tasks and self.tasks_per_node:
            return -(-self.tasks // self.tasks_per_node)
        return self.nodes or 1

    @property
    def total(self) -> int | None:
        """GPUs of the job."""
        if self.gpus is not None:
            return self.gpus
        if self.gpus_per_task is not None and self.tasks is not None:
            return self.gpus_per_task * self.tasks
        return None if self.per_node is None else self.per_node * self.all_nodes


def read_directives(draft: Draft, size: Size, options: Sequence[tuple[int, Option]]) -> None:
    """Report what becomes of all `#SBATCH` options; the later one of a name wins, as for sbatch."""
    last = {option.name: number for number, (_, option) in enumerate(options)}
    mails = [value_text(option) or "" for _, option in options if option.name == "mail-type"]
    order = sorted(range(len(options)), key=lambda number: options[number][1].name != "partition")
    for number in order:
        draft.line, option = options[number]
        part = " ".join(shell_text(word) for word in option.written)
        if option.name == "mail-type":  # all of them count
            draft.need("slurm.options.sbatch.mail-type", ",".join(mails), part=part)
        elif last[option.name] != number and option.name != "gres":
            draft.say("needless", "a later line has another value", part=part)
        elif "$" in part:
            draft.say("dropped", "sbatch expands no variables in these lines", part=part)
        else:
            _directive(draft, size, option, part)


def _directive(draft: Draft, size: Size, option: Option, part: str) -> None:
    name, value = option.name, value_text(option) or ""
    if _asks_for_size(draft, size, name, value, part):
        return
    if name == "job-name":
        draft.put("name", run_name(value), part=part)
    elif name == "time":
        seconds = _seconds(value)
        if seconds:
            draft.put("resources.walltime", str(Duration(seconds)), part=part)
        else:
            draft.say("dropped", f"`{value}` is no time limit that can be written", part=part)
    elif name == "partition":
        _partition(draft, value, part)
    elif name == "exclusive":
        wanted: bool | str = value if value in ("user", "topo") else True
        draft.need("slurm.exclusive", wanted, part=part)
    elif name == "export":
        kind = {"ALL": "all", "NONE": "none"}.get(value)
        if kind is not None:
            draft.need("slurm.export", kind, part=part)
        else:
            draft.say("dropped", "name what is passed on in `environment.inherit`", part=part)
    elif name == "chdir" and value in (".", "./"):
        draft.say("needless", "a trainer runs in the directory of its spec", part=part)
    elif name == "chdir":
        draft.put("trainer.directory", value, part=part)
    elif name == "signal":
        _signal(draft, value, part)
    elif name == "dependency" and value == "singleton":
        reason = "hpctrain goes on in the same job, or as `continuation` of the profile says"
        draft.say("needless", reason, part=part)
    elif name == "array" and value.endswith("%1"):
        reason = "a chain by an array: hpctrain goes on by itself until `trainer.done`"
        draft.say("needless", reason, part=part)
    elif name in _OF_SPEC:
        draft.put(_OF_SPEC[name], int(value) if value.isdecimal() else value, part=part)
    elif name in _OF_PROFILE:
        draft.need(_OF_PROFILE[name], value, part=part)
    elif name.startswith("container-"):
        container_option(draft, "pyxis", option, part)
    else:
        _other_option(draft, "sbatch", option, part)


def _other_option(
    draft: Draft, command: Literal["sbatch", "srun"], option: Option, part: str
) -> None:
    """Put an option into the site's options, or report why hpctrain does it otherwise."""
    name, value = option.name, value_text(option)
    owned = owned_options(command)
    lost = ("array", "begin", "dependency", "switches", "hold", "wrap", "multi-prog", "clusters")
    if name in WORDS.slurm.sentences or name in owned:
        reason = WORDS.slurm.sentences.get(name) or owned[name]
        draft.say("dropped" if name in lost else "needless", reason, part=part)
    elif name in available_options(command):
        given: str | bool | int = True if option.value is None else value or ""
        if option.value is not None and (value is None or (command == "sbatch" and "$" in value)):
            draft.say("dropped", "its value is not known before the job", part=part)
            return
        draft.need(f"slurm.options.{command}.{name}", given, part=part)
    else:
        draft.say("dropped", f"{command} has no such option: one of a plugin?", part=part)


def read_srun(draft: Draft, size: Size, options: Sequence[Option]) -> None:
    """Report what becomes of the options of the srun that starts the trainer."""
    for option in options:
        name, value = option.name, value_text(option) or ""
        part = " ".join(shell_text(word) for word in option.written)
        if not name:
            draft.say("dropped", "options that a block of the script decides", part=part)
        elif name in ("ntasks", "nodes", "ntasks-per-node", "gpus-per-task") and value.isdecimal():
            _asks_for_size(draft, size, name, value, part)
        elif name.startswith("container-"):
            container_option(draft, "pyxis", option, part)
        elif name in ("environment", "uenv"):
            container_option(draft, "edf" if name == "environment" else "uenv", option, part)
        elif name in ("gres", "gpus", "gpus-per-node", "gpus-per-task", "mem", "exclusive"):
            draft.say("needless", "the step has what the job has", part=part)
        elif name in ("chdir",) and value:
            draft.put("trainer.directory", value, part=part)
        else:
            _other_option(draft, "srun", option, part)


def _asks_for_size(draft: Draft, size: Size, name: str, value: str, part: str) -> bool:
    """Note an option that says how many nodes, tasks, GPUs, CPUs or bytes; False for any other."""
    number = int(value) if value.isdecimal() else None
    said = WORDS.slurm.sentences
    if name == "nodes":
        first = re.match(r"\d+", value)
        size.nodes = int(first[0]) if first else None
    elif name == "ntasks":
        size.tasks = number
    elif name == "ntasks-per-node":
        size.tasks_per_node = number
    elif name == "cpus-per-task" and number:
        size.cpus_per_task = (number, draft.line)
        draft.say("spec", "for each GPU", field="resources.cpus_per_gpu", part=part)
        return True
    elif name in ("mem", "mem-per-gpu", "mem-per-cpu"):
        size.memory = (name, value, draft.line)
        return True
    elif name in ("gpus", "gpus-per-node", "gpus-per-task", "gres"):
        found = _GPU.fullmatch(value) or re.fullmatch(
            r"(?:(?P<type>[A-Za-z][\w.-]*):)?(?P<count>\d+)", value
        )
        if found is None or (name == "gres" and not value.startswith(("gpu", "gres"))):
            draft.say("dropped", "no field asks for this", part=part)
            return True
        count = int(found["count"] or 1)
        if name == "gpus":
            size.gpus = count
        elif name == "gpus-per-task":
            size.gpus_per_task = count
        else:
            size.gpus_per_node = count
        if found["type"]:
            _typed(draft, name, found["type"], part)
    else:
        return False
    size.lines.append(draft.line)
    counts = name == "nodes" or name.startswith("g")
    if counts or name not in said:
        draft.say("spec", "a factor of the number of GPUs", field="resources.gpus", part=part)
    else:
        draft.say("needless", said[name], part=part)
    return True


def _typed(draft: Draft, name: str, kind: str, part: str) -> None:
    """Ask for a type of GPU as the script does, unless the profile has no other one."""
    own = draft.profile.for_partition(draft.partition) if draft.profile is not None else None
    if own is not None and kind in (own.gpu.gres, own.gpu.type) and own.slurm.asks_for_a_type:
        return
    draft.need("gpu.gres", kind, part=part, why="the type in Slurm's GRES")
    if own is None or not own.slurm.asks_for_a_type:
        request = "gres-typed" if name == "gres" else "gpus-per-node-typed"
        draft.need("slurm.gpu_request", request, part=part)


def finish_size(draft: Draft, size: Size) -> None:
    """Set the fields that follow from several options together."""
    draft.line = size.lines[0] if size.lines else 0
    total = size.total
    if total is None:
        draft.ask("resources.gpus", "how many GPUs in all? The script does not say it")
    else:
        lines = ", ".join(map(str, sorted(set(size.lines))))
        draft.spec["resources.gpus"] = Stated(total, f"line {lines}")
    if size.cpus_per_task is not None:
        cpus, draft.line = size.cpus_per_task
        tasks, gpus = size.node_tasks or 1, size.per_node
        if gpus and cpus * tasks % gpus == 0:
            draft.spec["resources.cpus_per_gpu"] = Stated(
                cpus * tasks // gpus, f"line {draft.line}"
            )
        else:
            field_name = "resources.cpus_per_gpu"
            draft.parts[draft.line] = [
                one for one in draft.parts[draft.line] if one.field != field_name
            ]
            reason = "no whole number for each GPU; each has its share of the node"
            draft.say("needless", reason, part=f"--cpus-per-task={cpus}")
    if size.memory is not None:
        _memory(draft, size, *size.memory)


def _memory(draft: Draft, size: Size, name: str, value: str, line: int) -> None:
    draft.line, part = line, f"--{name}={value}"
    found = _MEMORY.fullmatch(value)
    factor: int | None = 1
    if name == "mem-per-gpu":
        factor = size.per_node
    elif name == "mem-per-cpu":
        cpus = size.cpus_per_task[0] if size.cpus_per_task else 1
        factor = cpus * (size.node_tasks or 1)
    if found is not None and float(found[1]) == 0:
        draft.say("needless", "whole nodes have all of their memory", part=part)
    elif found is None or factor is None:
        draft.say("dropped", "no size of memory that can be written", part=part)
    else:
        unit = _UNITS[found[2].upper()]
        memory = ByteSize(float(ByteSize.parse(f"{found[1]}{unit}")) * factor)
        draft.put("resources.memory_per_node", str(memory), part=part)


def _partition(draft: Draft, value: str, part: str) -> None:
    """Choose the partition of the run; the first of several."""
    first, _, others = value.partition(",")
    if others:
        draft.say("dropped", "a run has one partition", part=others)
    known = draft.profile.slurm.partition(first) if draft.profile is not None else None
    if known is not None and known.default:
        reason = f"it is the default of profile {draft.profile_name}"
        draft.say("needless", reason, part=part)
        return
    draft.partition = first
    draft.put("resources.partition", first, part=part)
    if known is None:
        draft.new_partition = draft.profile is not None
        draft.say("profile", "a partition of that name", field="slurm.partitions", part=part)


def _signal(draft: Draft, value: str, part: str) -> None:
    found = _SIGNAL.fullmatch(value)
    name = _SIGNALS.get(found["name"], found["name"]) if found else ""
    if found is None or found["batch"] or name not in _SIGNALS.values():
        reason = (
            "the signal was for the script: hpctrain has its own before the time limit, and gives "
            "the trainer `trainer.signal`"
        )
        draft.say("needless", reason, part=part)
        return
    why = "the trainer gets it before the time limit, preemption and `hpctrain stop`"
    draft.put("trainer.signal.save", name, part=part, why=why)
    if found["seconds"]:
        draft.put("trainer.signal.seconds", f"{found['seconds']}s", part=part)


def container_option(
    draft: Draft, launcher: Literal["pyxis", "apptainer", "singularity", "edf", "uenv"],
    option: Option, part: str,
) -> None:  # fmt: skip
    """Turn an option of a container into a field of its section."""
    name, value = option.name, shell_text(option.value) if option.value is not None else None
    section = "software.container"
    if name in ("container-image", "environment", "uenv"):
        draft.need(f"{section}.launcher", launcher, part=part)
        draft.need(f"{section}.image", value or "", part=part)
    elif name in ("container-mounts", "bind", "mount") and value and name != "mount":
        mounts = tuple(one if ":" in one else f"{one}:{one}" for one in value.split(",") if one)
        draft.need_more(f"{section}.mounts", *mounts, part=part)
    elif name in ("nv", "rocm"):
        draft.need(f"{section}.gpu", name, part=part)
    elif name in ("container-workdir", "pwd", "cwd"):
        if value and "trainer.directory" not in draft.spec:
            draft.put("trainer.directory", value, part=part)
        else:
            draft.say("needless", WORDS.slurm.sentences["container-workdir"], part=part)
    else:
        written = f"--{name}" if value is None else f"--{name}={value}"
        problem = container_option_problem(launcher, written)
        if name in WORDS.slurm.sentences or problem:
            reason = WORDS.slurm.sentences.get(name) or problem or ""
            draft.say("needless" if name == "container-env" else "dropped", reason, part=part)
            return
        draft.need_more(f"{section}.options", written, part=part)


def run_name(text: str) -> str:
    """Make a name of a run of what the script calls itself."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text.strip("\"' ")).strip("-._")
    return plain[:40].rstrip("-._") or "adopted"


def _seconds(text: str) -> int | None:
    for form in _TIMES:
        found = form.fullmatch(text)
        if found is not None:
            return sum(int(found[unit] or 0) * _SECONDS[unit] for unit in form.groupindex)
    return None
