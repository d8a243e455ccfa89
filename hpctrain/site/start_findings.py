"""Judge what a job with the profile's real environment has reported: does a first start work?

One sentence per question, with the field of the profile to change where something fails. A job that
never reported is judged from Slurm's record of it and the end of its log; exit codes are those of
bash(1), EXIT STATUS, and sysexits.h. Pure. Belongs here: questions, thresholds, sentences. Does
not belong here: what is looked at (`start_survey`), making, submitting and watching the job
(`first_start`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from hpctrain.base.units import short_bytes, short_duration
from hpctrain.job.render.containers import has_amd_gpus
from hpctrain.runs.why import waiting_words
from hpctrain.site.doctor import (
    LEAST_FREE_BYTES,
    LEAST_FREE_INODES,
    LEAST_PYTHON,
    MOST_CLOCK_SECONDS,
    SiteFinding,
    State,
)
from hpctrain.site.facts import mounts
from hpctrain.slurm.records import JobRecord
from hpctrain.spec.profile import INTERFACE_VARIABLES, ClusterProfile

# sysexits.h, EX_CONFIG: with it the script ends where the environment cannot be had.
_CONFIG_EXIT = 78
# bash(1), EXIT STATUS: found and not executable; not found.
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127
# A rank imports torch at each start, from a file system that all nodes read at once.
_SLOW_IMPORT_SECONDS = 60.0
_SLOW_WRITE_SECONDS = 1.0
# PyTorch's data loaders and NCCL keep their buffers in /dev/shm
# (hpctrain.supervise.preflight).
_LEAST_SHARED_BYTES = 64 * 2**20
# Fabrics whose cards need memory that is locked (ibv_reg_mr(3)).
_RDMA = frozenset({"infiniband", "roce", "efa"})
_UNLIMITED = -1
_LONGEST_EVIDENCE = 400
_FIELD = re.compile(
    r"\b(?:software|slurm|environment|network|filesystems)\.[a-z_.\[\]0-9]*[a-z_0-9]"
)
# Which field of the profile is behind an option of sbatch.
FIELD_OF_OPTION = {
    "cpus-per-task": "nodes.cpus",
    "ntasks-per-node": "nodes.cpus",
    "gres": "slurm.gpu_request",
    "gpus-per-node": "slurm.gpu_request",
    "gpus-per-task": "slurm.gpu_request",
    "mem": "nodes.memory",
    "mem-per-gpu": "slurm.memory_per_gpu",
    "constraint": "slurm.constraint",
    "account": "slurm.account",
    "qos": "slurm.qos",
    "reservation": "slurm.reservation",
    "exclusive": "slurm.exclusive",
    "time": "slurm.partitions",
    "nodes": "nodes.count",
    "switches": "network.switches",
    "segment": "network.switches",
    "partition": "slurm.partitions",
}
_THREAD_OPTIONS = ("hint", "threads-per-core")


class _Report(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Called(_Report):
    """A program that was run there: `returncode` None if it is missing or took too long."""

    returncode: int | None
    text: str = ""
    seconds: float = 0.0
    came: bool = False
    log: str = ""

    @property
    def works(self) -> bool:
        return self.returncode == 0

    @property
    def last_line(self) -> str:
        """What it ended with."""
        return last_lines(self.text, 1) or f"exit code {self.returncode}"


class ProcessReport(_Report):
    """What a process of the job says of itself and its node."""

    host: str
    machine: str
    clock: float
    python: str
    version: tuple[int, ...]
    elf: str | None = None
    loaded: str = ""
    module_system: str = ""
    cpus: int
    node_cpus: int
    threads_per_core: int
    gpu_devices: int
    run_directory: str
    digests: Mapping[str, str | None] = {}


class BatchReport(ProcessReport):
    """What stands where the supervisor would: `complete` once all but the requeue was tried."""

    shell: Mapping[str, str]
    names: Mapping[str, bool]
    supervisor: Called
    step: Called | None = None
    warned: Called | None = None
    successor: Called | None = None
    requeue: Called | None = None
    complete: bool = False


class InterfaceReport(_Report):
    """A network interface of the node."""

    up: bool
    addressed: bool


class FilesystemReport(_Report):
    """A file system as the task sees it; None is unknown, or was not tried."""

    path: str
    place: str
    there: bool
    mount: str = ""
    kind: str = ""
    free_bytes: int | None = None
    free_inodes: int | None = None
    inodes: int = 0
    write_seconds: float | None = None
    error: str = ""


class TaskReport(ProcessReport):
    """What stands where a rank would."""

    interfaces: Mapping[str, InterfaceReport]
    interface_variables: Mapping[str, str]
    filesystems: tuple[FilesystemReport, ...]
    memlock: int
    nofile: int
    shared_memory_bytes: int
    memory_limit_bytes: int | None
    torch: Called
    packages: Called


@dataclass(frozen=True)
class Interpreter:
    """The profile's interpreter, as this machine sees it; None where it cannot tell."""

    path: str
    machine: str | None


@dataclass(frozen=True)
class StartExpectation:
    """What the job asks for: CPUs of its task, whether to be requeued; and fields of the profile:
    those of the file systems that it looks at, in its order, and those that have a `$NAME`."""

    cpus: int
    requeue: bool
    filesystem_fields: tuple[str, ...]
    names: Mapping[str, str]


@dataclass(frozen=True)
class StartOutcome:
    """All that is known about the job when it has ended, or is not waited for any more.

    `submit_time` and `seen_time` by the
    clock of this machine, whose processor is `machine`. `record`: None once Slurm has forgotten it.
    """

    job_id: int
    submit_time: float
    seen_time: float
    machine: str
    interpreter: Interpreter
    directory: str
    expected: StartExpectation
    record: JobRecord | None
    log: str | None = None
    batch: BatchReport | None = None
    task: TaskReport | None = None
    restarts: int | None = None
    gave_up: bool = False

    @property
    def is_confirmed(self) -> bool:
        """Whether the job has reported, or ended: something can be said about the start."""
        return self.batch is not None or not self.gave_up


def last_lines(text: str, count: int) -> str:
    """Return the last lines of a text that are not empty, in one line of bounded length."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-count:])[-_LONGEST_EVIDENCE:]


def _found(
    topic: str,
    state: State,
    sentence: str,
    source: str,
    field: str | None = None,
    change: str | None = None,
) -> SiteFinding:
    return SiteFinding(
        topic=topic, state=state, sentence=sentence, source=source, field=field, change=change
    )


def judge_start(profile: ClusterProfile, outcome: StartOutcome) -> tuple[SiteFinding, ...]:
    """Answer all questions about the job; without its report only why there is none."""
    batch, task = outcome.batch, outcome.task
    if batch is None:
        return tuple(_unreported(profile, outcome))
    start_time = outcome.record.start_time if outcome.record is not None else None
    waited = ""
    if start_time is not None and outcome.restarts is None and start_time > outcome.submit_time:
        waited = f", after {short_duration(start_time - outcome.submit_time)} in the queue"
    sentence = f"job {outcome.job_id} started on {batch.host}{waited}, in {batch.run_directory}"
    found = [
        _found("started", "works", sentence, "the job's report"),
        *_environment(profile, batch),
        *_interpreter(outcome, batch),
        *_unset_names(outcome, batch),
        *_signals(batch),
        *_continuation(profile, outcome, batch),
        *_clock(outcome, batch),
        *_step(profile, batch, task),
    ]
    if task is not None:
        found += [
            *_passed(batch, task),
            *_libraries(profile, task),
            *_network(profile, task),
            *(
                _filesystem(profile, field, one)
                for field, one in zip(
                    outcome.expected.filesystem_fields, task.filesystems, strict=True
                )
            ),
            *_processors(profile, outcome, task),
            *_limits(profile, task),
        ]
    return tuple(found)


def judge_request(
    profile: ClusterProfile, words: str, refused: str | None, culprit: str | None
) -> SiteFinding:
    """Judge whether Slurm would ever start what a run asks for.

    `refused` is Slurm's answer to `sbatch --test-only`, None if it accepts; without the option
    `culprit` it accepts, too.
    """
    source = "sbatch --test-only"
    if refused is None:
        return _found("request", "works", f"Slurm accepts what a run asks for: {words}", source)
    sentence = f"Slurm refuses what a run asks for ({words}): {last_lines(refused, 1)}"
    name = culprit.partition("=")[0] if culprit is not None else ""
    field = FIELD_OF_OPTION.get(name)
    change = None
    if culprit is not None:
        sentence += f"; without `--{culprit}` it accepts"
        change = f"correct what `--{name}` is made of"
    threads = [one for one in _THREAD_OPTIONS if one in profile.slurm.options.sbatch]
    if field == "nodes.cpus" and threads:
        change = (
            f"with `{threads[0]}` in `slurm.options` a job gets one CPU of each core: state the "
            f"cores of a node, not its {profile.nodes.cpus} threads"
        )
    elif field == "nodes.cpus":
        change = f"a node has fewer than {profile.nodes.cpus} CPUs for one job"
    return _found("request", "fails", sentence, source, field, change)


# -- A job that has not reported ------------------------------------------------------------------


def _unreported(profile: ClusterProfile, outcome: StartOutcome) -> Iterator[SiteFinding]:
    record, job = outcome.record, f"job {outcome.job_id}"
    log = outcome.log or ""
    evidence = last_lines(log, 3)
    if record is not None and not record.state.is_ended:
        if not record.state.is_active:
            words = waiting_words(record, outcome.seen_time)
            yield _found("started", "unknown", f"{job} has not started: {words}", "squeue")
            return
        where = f" on {record.node_list}" if record.node_list else ""
        sentence = f"{job} runs{where} and has not reported"
        yield _found("started", "unknown", _with(sentence, evidence), "squeue, the job's log")
        return
    code = record.exit_code if record is not None else None
    source = "exit code and log of the job"
    host = record.node_list if record is not None and record.node_list else "the node"
    named = _named_field(outcome, log)
    python, interpreter = "software.python", outcome.interpreter
    # bash's `exec` ends with 1 for a program of another processor
    foreign = interpreter.machine not in (None, outcome.machine)
    if not log.strip() and code != 0:
        sentence = (
            f"{job} ended on {host} without a line in its log: {host} does not see "
            f"{outcome.directory}, or the batch shell could not be started"
        )
        change = "put the directory of runs (`--runs`, $HPCTRAIN_RUNS) where all nodes see it"
        yield _found("run directory", "fails", sentence, source, None, change)
    elif code == _CONFIG_EXIT:
        ours = [line for line in log.splitlines() if line.startswith("hpctrain: ")]
        words = ours[-1].removeprefix("hpctrain: ") if ours else evidence
        sentence = f"the environment of the job could not be made: {words}"
        if ours and last_lines(log, 1) != ours[-1].strip():
            sentence = _with(sentence, evidence)
        yield _found(
            "environment", "fails", sentence, source, *_of_environment(profile, ours, named)
        )
    elif code == _NOT_EXECUTABLE or (code and foreign and interpreter.path in evidence):
        built = f"it is built for {interpreter.machine}" if interpreter.machine else ""
        sentence = f"{host} cannot execute the interpreter {interpreter.path}"
        sentence += f": {built}, and this machine is {outcome.machine}" if foreign else ""
        change = f"name an interpreter that is built for {host}, and may be executed"
        yield _found("interpreter", "fails", _with(sentence, evidence), source, python, change)
    elif code == _NOT_FOUND and named in (None, python):
        sentence = f"the interpreter {interpreter.path} is not on {host}"
        change = "name one that the nodes have, or make this one visible there"
        yield _found("interpreter", "fails", _with(sentence, evidence), source, python, change)
    elif code:
        sentence = f"{job} ended with exit code {code} before anything was started"
        yield _found("environment", "fails", _with(sentence, evidence), source, named)
    else:
        how = ""
        if record is not None:
            named_reason = record.reason not in (None, "None")
            how = f" ({record.state.value}{f', {record.reason}' if named_reason else ''})"
        sentence = f"{job} has ended{how} and left no report"
        yield _found("started", "unknown", _with(sentence, evidence), source)


def _with(sentence: str, evidence: str) -> str:
    return f"{sentence}; its log ends: {evidence}" if evidence else sentence


def _named_field(outcome: StartOutcome, log: str) -> str | None:
    """Find the field that the last line of a log is about: by its name, or by a `$NAME` in it."""
    last = last_lines(log, 1)
    named = _FIELD.search(last)
    if named is not None:
        return named[0]
    by_name = (
        field for name, field in outcome.expected.names.items() if re.search(rf"\b{name}\b", last)
    )
    return next(by_name, None)


def _of_environment(
    profile: ClusterProfile, ours: list[str], named: str | None
) -> tuple[str | None, str | None]:
    """Find the field, and its change, behind our own line that ends an environment."""
    last, software = ours[-1] if ours else "", profile.software
    if named is not None:
        return named, None
    if software.modules is not None and "module" in last:
        change = "name modules that the node has"
        if software.modules.init is None:
            change += "; where its shells lack `module`, name the file that defines it: `init`"
        return "software.modules", change
    if software.setup is not None and software.setup in last:
        return "software.setup", "correct the line of that file"
    return None, None


# -- What the batch shell found -------------------------------------------------------------------


def _environment(profile: ClusterProfile, batch: BatchReport) -> Iterator[SiteFinding]:
    shell = batch.shell
    login = "a login shell" if shell.get("LOGIN") else "no login shell"
    module = shell.get("MODULE")
    has = f"; `module` is a {module}" if module else "; there is no `module`"
    system = f" of {batch.module_system}" if batch.module_system else ""
    loaded = batch.loaded.replace(":", ", ")
    loads = f", loaded: {loaded}" if loaded else ", nothing is loaded"
    sentence = f"the job has bash {shell.get('BASH')}, {login}{has}"
    sentence += f"{system}{loads}" if module else ""
    yield _found("shell", "works", sentence, "the batch shell")
    wanted = profile.software.modules
    missing = (
        []
        if wanted is None
        else [one for one in wanted.load if one.partition("/")[0] not in loaded]
    )
    if missing and module:
        sentence = (
            f"after the environment is made these modules are not loaded: {', '.join(missing)}"
        )
        yield _found(
            "modules", "limited", sentence, "LOADEDMODULES", "software.modules.load",
            "a later module or `software.setup` may have replaced them",
        )  # fmt: skip


def _interpreter(outcome: StartOutcome, batch: BatchReport) -> Iterator[SiteFinding]:
    version = ".".join(map(str, batch.version))
    old = batch.version[:2] < LEAST_PYTHON
    sentence = f"{batch.python} of the job is Python {version}, for {batch.elf or batch.machine}"
    if batch.machine != outcome.machine:
        sentence += f"; {batch.host} is {batch.machine}, and this machine is {outcome.machine}"
    change = None
    if old:
        least = ".".join(map(str, LEAST_PYTHON))
        sentence, change = (
            f"{sentence}; hpctrain needs {least}",
            f"name a Python of {least} or newer",
        )
    yield _found(
        "interpreter", "fails" if old else "works", sentence, "the job's report",
        "software.python" if old else None, change,
    )  # fmt: skip
    took = short_duration(batch.supervisor.seconds)
    if batch.supervisor.works:
        own = batch.supervisor.text.startswith(f"{batch.run_directory}/")
        where = "the run's own copy" if own else f"{batch.supervisor.last_line}, not the run's copy"
        sentence = f"the supervisor can be imported there, from {where}, in {took}"
        state: State = "works" if own else "limited"
        yield _found("supervisor", state, sentence, "import hpctrain.supervise")
        return
    sentence = f"the supervisor cannot be imported there: {batch.supervisor.last_line}"
    yield _found(
        "supervisor", "fails", sentence, "import hpctrain.supervise", "software.python",
        f"`{batch.python} -m pip install hpctrain` puts there what it needs, or name another one",
    )  # fmt: skip


def _unset_names(outcome: StartOutcome, batch: BatchReport) -> Iterator[SiteFinding]:
    unset = [name for name, is_set in batch.names.items() if not is_set]
    if batch.names and not unset:
        names = ", ".join(f"${name}" for name in batch.names)
        yield _found("variables", "works", f"set in the job: {names}", "the batch shell")
    for name in unset:
        field = outcome.expected.names.get(name, "the profile")
        sentence = f"${name} of `{field}` is not set in the job"
        change = f"pass it on: `slurm.inherit: [{name}]`, or write the path out in `{field}`"
        yield _found("variables", "fails", sentence, "the batch shell", field, change)


def _signals(batch: BatchReport) -> Iterator[SiteFinding]:
    source = "scancel --signal=USR1 --batch"
    if batch.warned is None:
        yield _found("warning", "unknown", "the warning signal was not tried", source)
    elif batch.warned.came:
        yield _found("warning", "works", "Slurm's warning (USR1) reaches the batch shell", source)
    else:
        words = "" if batch.warned.works else f": {batch.warned.last_line}"
        sentence = f"Slurm's warning (USR1) does not reach the batch shell{words}"
        yield _found("warning", "fails", sentence, source)


def _continuation(
    profile: ClusterProfile, outcome: StartOutcome, batch: BatchReport
) -> Iterator[SiteFinding]:
    how, asked = profile.continuation, batch.requeue
    if how == "chain" and batch.successor is not None:
        source = f"sbatch --test-only on {batch.host}"
        if batch.successor.works:
            sentence = "a job can submit the next one: continuation `chain` works"
            yield _found("successor", "works", sentence, source)
        else:
            sentence = f"a job cannot submit the next one: {batch.successor.last_line}"
            change = "use requeue or singleton"
            yield _found("successor", "fails", sentence, source, "continuation", change)
    if not outcome.expected.requeue or not batch.complete:
        return
    source = "scontrol requeue on the node"
    if outcome.restarts is not None:
        sentence = f"requeue: Slurm has started the job again (Restarts={outcome.restarts})"
        yield _found("requeue", "works", sentence, source)
    elif asked is not None and asked.returncode is not None:
        sentence = f"requeue: refused: {asked.last_line}"
        change = "continue by chain, singleton or array"
        yield _found("requeue", "fails", sentence, source, "continuation", change)
    elif outcome.record is not None and not outcome.record.state.is_ended:
        words = waiting_words(outcome.record, outcome.seen_time)
        sentence = f"requeue: the job is back in the queue, and was not waited for: {words}"
        yield _found("requeue", "unknown", sentence, source)
    else:
        sentence = "requeue: asked for, and the job has not started again"
        change = "ask the site whether jobs may be requeued, else continue by chain or singleton"
        yield _found("requeue", "fails", sentence, source, "continuation", change)


def _clock(outcome: StartOutcome, batch: BatchReport) -> Iterator[SiteFinding]:
    """Compare with what is certain: written after the job was submitted, and before it was read."""
    behind = outcome.submit_time - batch.clock
    ahead = batch.clock - outcome.seen_time
    off = max(behind, ahead)
    if off > MOST_CLOCK_SECONDS:
        side = "behind" if behind > ahead else "ahead of"
        sentence = f"the clock of {batch.host} is {short_duration(off)} {side} this machine's"
        yield _found("clock", "limited", sentence, "the job's report")
        return
    sentence = f"the clock of {batch.host} agrees with this machine's"
    yield _found("clock", "works", sentence, "the job's report")


def _step(
    profile: ClusterProfile, batch: BatchReport, task: TaskReport | None
) -> Iterator[SiteFinding]:
    step, source = batch.step, "srun in the job"
    if step is None:
        sentence = "the step of the job had not ended when its report was read"
        yield _found("step", "unknown", sentence, source)
        return
    if task is not None and step.works:
        sentence = f"srun started a task on {task.host} in {short_duration(step.seconds)}"
        yield _found("step", "works", sentence, source)
        return
    words = " | ".join(filter(None, (last_lines(step.log, 2), last_lines(step.text, 2))))
    container = profile.software.container
    field = "software.container" if container is not None else None
    sentence = f"srun cannot start a task in the job: {words or step.last_line}"
    yield _found("step", "fails", sentence, source, field)


# -- What a rank would find -----------------------------------------------------------------------


def _passed(batch: BatchReport, task: TaskReport) -> Iterator[SiteFinding]:
    other = [name for name, seen in batch.digests.items() if task.digests.get(name) != seen]
    if not other:
        count = len(batch.digests)
        sentence = f"a task has the environment of the batch shell ({count} variables compared)"
        yield _found("task environment", "works", sentence, "digests of both")
        return
    sentence = f"a task has other values than the batch shell: {', '.join(other[:8])}"
    yield _found("task environment", "limited", sentence, "digests of both")


def _libraries(profile: ClusterProfile, task: TaskReport) -> Iterator[SiteFinding]:
    torch, took = task.torch, short_duration(task.torch.seconds)
    container = profile.software.container
    field = "software.python" if container is None else "software.container.image"
    if not torch.works:
        sentence = f"{task.python} cannot import torch: {torch.last_line}"
        change = "name one that has it, or install it there"
        yield _found("torch", "fails", sentence, "import torch in a task", field, change)
    else:
        facts = json.loads(torch.text)
        kind = "CUDA" if facts["cuda"] else "ROCm" if facts["hip"] else "CPUs only"
        build = facts["cuda"] or facts["hip"] or ""
        slow = torch.seconds > _SLOW_IMPORT_SECONDS
        sentence = f"torch {facts['version']} for {kind} {build}".rstrip() + f", imported in {took}"
        if slow:
            sentence += "; slow, and all ranks read it at once: put it on a faster file system"
        state: State = "limited" if slow else "works"
        yield _found("torch", state, sentence, "import torch in a task")
        yield from _gpu_build(profile, task, kind, field)
    if task.packages.works:
        there = {name: v for name, v in json.loads(task.packages.text).items() if v is not None}
        words = ", ".join(f"{name} {version}".strip() for name, version in there.items())
        sentence = f"libraries of engines: {words}" if there else "no library of an engine is there"
        yield _found("engines", "works" if there else "limited", sentence, "the task's interpreter")


def _gpu_build(
    profile: ClusterProfile, task: TaskReport, kind: str, field: str
) -> Iterator[SiteFinding]:
    """Compare what torch is built for with the GPUs that the profile describes."""
    if profile.gpu.emulated:
        return
    wanted = "ROCm" if has_amd_gpus(profile) else "CUDA"
    seen = f"{task.gpu_devices} GPUs are visible to the task"
    if kind == wanted:
        yield _found("GPUs", "works", f"torch is built for {profile.gpu.type}; {seen}", "torch")
        return
    sentence = f"torch is built for {kind}, and {profile.gpu.type} needs {wanted}; {seen}"
    change = f"name an environment whose torch is built for {wanted}"
    yield _found("GPUs", "fails", sentence, "torch.version", field, change)


def _network(profile: ClusterProfile, task: TaskReport) -> Iterator[SiteFinding]:
    usable = [name for name, one in task.interfaces.items() if one.up and one.addressed]
    shown = ", ".join(usable) or "none with an address"
    of_site = {variable.name: i for i, variable in enumerate(profile.environment)}
    wanted = profile.network.interface
    source = "/sys/class/net in a task"
    named: list[tuple[str, str, bool]] = []
    if wanted is not None:
        listed = wanted if isinstance(wanted, str) else ",".join(wanted)
        named.append(("network.interface", listed, False))
    for name in INTERFACE_VARIABLES:
        value = task.interface_variables.get(name)
        if value and (name in of_site or value != wanted or name != INTERFACE_VARIABLES[0]):
            field = (
                f"environment[{of_site[name]}].value" if name in of_site else "network.interface"
            )
            # gloo compares whole names (torch/csrc/distributed/c10d/init.cpp); NCCL beginnings
            # (NCCL's documentation of NCCL_SOCKET_IFNAME).
            named.append((field, value, "GLOO" in name))
    if not named:
        sentence = f"NCCL and gloo choose an interface themselves, of {shown}"
        yield _found("network", "works", sentence, source)
    said = set()
    for field, value, exact in named:
        finding = _interface(field, value, exact, usable, shown, source)
        if finding is not None and finding.sentence not in said:
            said.add(finding.sentence)
            yield finding


def _interface(
    field: str, value: str, exact: bool, usable: list[str], shown: str, source: str
) -> SiteFinding | None:
    """Judge one value; None for a list of what is not to be used, which fits any node."""
    if value.startswith("^"):
        return None
    words = [word.removeprefix("=") for word in value.split(",")]
    whole = [word for word in words if word in usable]
    begun = [name for name in usable if name.startswith(tuple(words))]
    if whole:
        sentence = f"interface {whole[0]} of `{field}` is there, of {shown}"
        return _found("network", "works", sentence, source)
    if begun and not exact:
        sentence = f"interface {begun[0]} is the first that begins as `{field}` says ({value})"
        return _found("network", "works", sentence, source)
    if begun:
        sentence = (
            f"`{field}` is `{value}`, the beginning of {', '.join(begun)}: gloo wants a whole name"
        )
        change = f"name `{begun[0]}`"
        return _found("network", "fails", sentence, source, field, change)
    sentence = f"the node has no interface of `{field}` ({value}); it has {shown}"
    change = f"name one of {shown}" if usable else "ask the site"
    return _found("network", "fails", sentence, source, field, change)


def _filesystem(profile: ClusterProfile, field: str, one: FilesystemReport) -> SiteFinding:
    shown, source = one.place, "a task"
    if not one.there:
        change = "correct the path, or ask why nodes do not mount it"
        sentence = f"{shown} of `{field}` is not there on the node"
        return _found("file system", "fails", sentence, source, field, change)
    if one.error:
        sentence = f"{shown} cannot be used: {one.error}"
        return _found("file system", "fails", sentence, source, field)
    parts = [f"{shown} is {one.kind}, mounted at {one.mount}"]
    state: State = "works"
    if one.free_bytes is not None:
        little = one.free_bytes < LEAST_FREE_BYTES and field.startswith("filesystems")
        parts.append(f"{short_bytes(one.free_bytes)} left" + (" only" if little else ""))
        state = "limited" if little else state
    if one.inodes and one.free_inodes is not None and one.free_inodes < LEAST_FREE_INODES:
        parts.append(f"only {one.free_inodes:,} files left")
        state = "limited"
    if one.write_seconds is None:
        parts.append("not written to: it is not yours at its top")
    else:
        slow = one.write_seconds > _SLOW_WRITE_SECONDS
        parts.append(f"a small write with fsync takes {one.write_seconds * 1000:.1f} ms")
        state = "limited" if slow else state
    told = next((fs.kind for fs in profile.filesystems if fs.path == one.path), None)
    real = next((mount.kind for mount in mounts(f"none {one.mount} {one.kind}")), None)
    if told not in (None, "other") and real is not None and real != told:
        words = ", ".join([*parts, f"the profile says {told}"])
        kind = field.replace(".path", ".kind")
        return _found("file system", "limited", words, source, kind, f"say `{real}`")
    return _found("file system", state, ", ".join(parts), source)


def _processors(
    profile: ClusterProfile, outcome: StartOutcome, task: TaskReport
) -> Iterator[SiteFinding]:
    source = "sched_getaffinity(2) and /sys in a task"
    threads, told = task.threads_per_core, profile.nodes.cpus
    few = task.cpus < outcome.expected.cpus
    asked = f"a task that asks for {outcome.expected.cpus} CPUs is bound to {task.cpus}"
    cores = f"{task.host} has {task.node_cpus} CPUs, {threads} per core"
    state: State = "works"
    field = change = None
    options = {**profile.slurm.options.sbatch, **profile.slurm.options.srun}
    halved = [name for name in _THREAD_OPTIONS if name in options]
    if few and not profile.gpu.emulated:
        state = "limited"
        field, change = "nodes.cpus", "look at how the site binds tasks, and counts CPUs"
    if not profile.gpu.emulated and halved and threads > 1 and told == task.node_cpus:
        state, field = "fails", "nodes.cpus"
        change = f"with `{halved[0]}` a job gets one CPU of each core: `cpus: {told // threads}`"
    sentence = f"{asked}; {cores}, and the profile says {told}"
    yield _found("CPUs", state, sentence, source, field, change)


def _limits(profile: ClusterProfile, task: TaskReport) -> Iterator[SiteFinding]:
    rdma = profile.network.fabric in _RDMA
    bounded = rdma and task.memlock != _UNLIMITED
    locked = "unlimited" if task.memlock == _UNLIMITED else short_bytes(task.memlock)
    sentence = f"a task may lock {locked} of memory and open {task.nofile} files"
    if bounded:
        sentence += f"; {profile.network.fabric} needs unlimited locked memory"
    field = "software.ulimits.memlock" if bounded else None
    change = "`memlock: unlimited`, if the site allows it" if bounded else None
    yield _found(
        "limits", "limited" if bounded else "works", sentence, "getrlimit(2)", field, change
    )
    small = task.shared_memory_bytes < _LEAST_SHARED_BYTES
    shared = short_bytes(task.shared_memory_bytes)
    limit = task.memory_limit_bytes
    memory = "no limit of memory is set" if limit is None else f"memory up to {short_bytes(limit)}"
    sentence = f"/dev/shm has {shared}, {memory}"
    if small:
        sentence += "; data loaders and NCCL need more of /dev/shm"
    yield _found("shared memory", "fails" if small else "works", sentence, "/dev/shm, cgroup")
