"""Builds the sbatch script from spec, profile and plan. Same input, same bytes.

Belongs here: which directives, variables and srun options a job needs, and filling the template
with them. Does not belong here: the trainer's settings (see `hpctrain.engines`), files but
templates, clocks, or any path of the submitting machine except the interpreter that is passed in.
"""

from __future__ import annotations

import functools
import os
import shlex
import textwrap
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.base.printable_text import printable_line
from hpctrain.job.render.containers import container_words, run_container
from hpctrain.job.render.environment import (
    JobEnvironment,
    SetupFile,
    environment_of,
    inheritance_problems,
    inherited_names,
    per_rank_variables,
    variable_problems,
)
from hpctrain.job.render.job_options import (
    cancel_waiting,
    continuation_options,
    continuation_problems,
    continuation_sentence,
    exclusive_option,
    gpu_request,
    job_comment,
    job_constraint,
    memory_options,
    memory_problems,
    node_options,
    node_problems,
    requeue_flag,
    sbatch_options,
    srun_options,
    step_resources,
    survives_node_failure,
    topology_options,
)
from hpctrain.job.render.quoting import directive_value, sh, sh_expanded
from hpctrain.job.render.shell_files import ShellFile, prologue_words, shell_files
from hpctrain.job.render.warning_lead import warning_lead
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import Job, TrainingJob
from hpctrain.plan.layout_words import DEFAULT_ORDER
from hpctrain.spec.slurm_options import written_options
from hpctrain.version import __version__

if TYPE_CHECKING:
    from jinja2 import BaseLoader, Environment

    from hpctrain.spec.catalogue import GpuVariable


# -- Decides what srun starts: one task per GPU, or one agent per node. Pure -------


# Up to so many ranks each has a log of its own, which is easier to read. Above, most of them have
# the same warnings or nothing, and a launch would leave thousands of files.
MOST_LOGS_OF_RANKS = 64
LOGS_OF_NODES = (
    "Logs of each attempt and node are kept apart, in step*-node*.log; each line of a rank begins "
    "with its number"
)


@dataclass(frozen=True)
class SrunTasks:
    """Tasks of a launch at the planned size and the module that each of them runs.

    `task_kind` and `log_number` name the logs that srun writes: `rank` and `%4t`, one per task, or
    `node` and `%4n`, one per node. `labelled`: srun puts the number of the task before each line.
    `note` is the comment above the launch, wrapped.
    """

    tasks: int
    tasks_per_node: int
    gpus_per_task: int
    module: tuple[str, ...]
    task_kind: Literal["rank", "node"]
    log_number: Literal["%4t", "%4n"]
    labelled: bool
    note: str


def logs_by(job: TrainingJob) -> Literal["rank", "node"]:
    """Choose whether each rank or each node has a log, according to `logging.files`."""
    if job.spec.logging.files != "auto":
        return job.spec.logging.files
    return "rank" if job.plan.layout.world_size <= MOST_LOGS_OF_RANKS else "node"


def log_files(job: TrainingJob) -> int:
    """Count the logs of one launch: of ranks or nodes, and of agents beside those of ranks."""
    nodes, ranks = job.plan.nodes.nodes, job.plan.layout.world_size
    if logs_by(job) == "node":
        return nodes
    return ranks + (nodes if job.spec.launcher == "torchrun" else 0)


def choose_tasks(job: TrainingJob) -> SrunTasks:
    """Choose tasks, module and logs according to `launcher` and `logging.files` of the spec."""
    nodes, gpus = job.plan.nodes.nodes, job.plan.nodes.gpus_per_node
    by_node = logs_by(job) == "node"
    if job.spec.launcher == "torchrun":
        processes = f"{gpus} processes, one per GPU," if gpus > 1 else "one process"
        return SrunTasks(
            tasks=nodes,
            tasks_per_node=1,
            gpus_per_task=gpus,
            module=(
                "hpctrain.train.agent",
                f"--nnodes={nodes}",
                f"--nproc-per-node={gpus}",
                *(["--logs=node"] if by_node else []),
            ),
            task_kind="node",
            log_number="%4n" if by_node else "%4t",
            labelled=False,  # the agent puts the rank before each line itself
            note=wrapped_comment(
                f"One task per node: an agent. It starts {processes} with torchrun's variables, "
                "and hands signals on to them; it never restarts them: only the supervisor starts "
                f"launches.{_node_range(job, 'srun and agent')} "
                + (
                    f"{LOGS_OF_NODES}."
                    if by_node
                    else "Logs of each attempt are kept apart: of agents in step*-node*.log, of "
                    "ranks in step*-rank*.log."
                )
            ),
        )
    return SrunTasks(
        tasks=job.plan.layout.world_size,
        tasks_per_node=gpus,
        gpus_per_task=1,
        module=("hpctrain.train",),
        task_kind="node" if by_node else "rank",
        log_number="%4n" if by_node else "%4t",
        labelled=by_node,
        note=wrapped_comment(
            f"One task per GPU, no torchrun.{_node_range(job, 'srun')} "
            + (f"{LOGS_OF_NODES}." if by_node else "Logs of each attempt and rank are kept apart.")
        ),
    )


def _node_range(job: TrainingJob, programs: str) -> str:
    """Explain that a launch may have fewer nodes than the script shows; empty if it may not."""
    nodes = job.plan.nodes.nodes
    least = min(job.least_nodes, nodes)
    if least == nodes:
        return ""
    return (
        f" A launch has {least} to {nodes} nodes: the supervisor puts the number into the options "
        f"of {programs}."
    )


def wrapped_comment(text: str) -> str:
    """Wrap a text into comment lines of the script, without the first `#`."""
    return "\n# ".join(textwrap.wrap(text, 98))


# ----------------------------------------------------------------------------------------------


_LOG = "logs/slurm-%j.out"
# Set by the supervisor; variables of the image would override them otherwise (pyxis README).
_TRAINER_VARIABLES = (
    "HPCTRAIN_EPOCH",
    "HPCTRAIN_RESUME",
    "HPCTRAIN_MTTF_SECONDS",
    "HPCTRAIN_PINNED_STEPS",
    "HPCTRAIN_VERSION",
    "HPCTRAIN_SPEED_CHECK",
    "HPCTRAIN_IMAGE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class ScriptFacts:
    """Inputs of rendering besides spec, profile and plan.

    `comment` is the job's comment; `gpu_variables` are those that the catalogue lists for the
    cluster's GPU, this engine and this layout. `setup` is the file of `software.setup`,
    `template_sha256` (hex) that of the site's templates; None: the packaged one.
    """

    run_id: str
    comment: str
    spec_digest: str
    profile_digest: str
    python: str
    gpu_variables: tuple[GpuVariable, ...] = ()
    setup: SetupFile | None = None
    template_sha256: str | None = None


@dataclass(frozen=True)
class Script(JobEnvironment):
    """The values that the template fills in (docs/templates.md); commands are argument lists."""

    title: str
    version: str
    run_id: str
    spec_digest: str
    profile_name: str
    profile_digest: str
    template_digest: str | None
    layout: str
    submit_command: str
    directives: tuple[str, ...]
    shell_files: tuple[ShellFile, ...]
    start_note: str
    task_kind: str
    log_number: str
    signal_note: str
    cancel_waiting: tuple[str, ...]
    on_exit: str
    continuation_note: str
    failures_without_progress: int
    supervisor: tuple[str, ...]
    srun: tuple[str, ...]
    srun_options: tuple[str, ...]
    container_srun: tuple[str, ...]
    container_command: tuple[str, ...]
    container_import: tuple[str, ...] | None
    image_import: tuple[str, ...]
    trainer: tuple[str, ...]


@dataclass(frozen=True)
class JobTask:
    """What a job starts below the supervisor, and what its script says about that.

    `settings`: the file that the module of `tasks` reads. Slurm warns `warning_seconds` before the
    time limit. The notes are sentences, not wrapped, without a full stop. `job_texts` are fields
    with the JobText that the settings contain.
    """

    title: str
    layout: str
    settings: str
    tasks: SrunTasks
    warning_seconds: int
    warning_note: str
    continuation_note: str
    job_texts: tuple[tuple[str, str], ...] = ()


def build_script(job: TrainingJob, facts: ScriptFacts) -> Script:
    """Build the job script of a run. Raises InvalidInputError for what sbatch cannot take."""
    lead, tasks, plan = warning_lead(job), choose_tasks(job), job.plan
    task = JobTask(
        title=f"{printable_line(job.spec.name)} on {job.profile.name}: {plan.nodes}, "
        f"{plan.engine}, {plan.batch.train_steps} steps",
        layout=_layout(plan),
        settings="train.json",
        tasks=tasks,
        warning_seconds=lead.seconds,
        warning_note=lead.sentence,
        continuation_note=continuation_sentence(job.profile),
    )
    return job_script(job, facts, task)


def job_script(job: Job, facts: ScriptFacts, task: JobTask) -> Script:
    """Build the script of a job that runs `task`. Raises InvalidInputError as `build_script`."""
    spec, profile = job.spec, job.profile
    python = profile.software.interpreter(facts.python)
    if python.startswith("-"):
        raise InvalidInputError([Problem(f"software.python: `{python}` reads as an option")])
    contradictions = [
        *(message for _, _, message in variable_problems(spec.environment, profile)),
        *continuation_problems(profile, job.partition),
        *inheritance_problems(job),
        *memory_problems(job),
        *node_problems(job, job_constraint(job)),
    ]
    if contradictions:  # Slurm would accept them, and never do what they ask for
        raise InvalidInputError([Problem(message) for message in contradictions])
    behind = cancel_waiting(profile, facts.run_id)
    container = run_container(spec.container, profile.software.container)
    environment = environment_of(
        job, facts.python, facts.setup, facts.gpu_variables, task.job_texts
    )
    names = (*(variable.name for variable in environment.variables), *inherited_names(job))
    per_rank = (variable.name for variable in per_rank_variables(job))
    passed = dict.fromkeys((*names, *per_rank, "PYTHONPATH", *_TRAINER_VARIABLES))
    words = container_words(container, profile, tuple(passed))
    files = shell_files(job, words.environment)
    # What begins a task is outside of its container, unless srun starts that around the task.
    prologue, command = prologue_words(files), words.command
    if words.environment is not None:
        prologue, command = (), (*prologue, *command)
    return Script(
        **{**vars(environment), "inheritance_note": _comment(f"{environment.inheritance_note}.")},
        # Comments end at a line break, so none may come in with a value.
        title=task.title,
        version=__version__,
        run_id=facts.run_id,
        spec_digest=facts.spec_digest[:12],
        profile_name=profile.name,
        profile_digest=facts.profile_digest[:12],
        template_digest=facts.template_sha256 and facts.template_sha256[:12],
        layout=task.layout,
        submit_command=_comment(shlex.join(profile.slurm.submit_words)),
        directives=_directives(job, facts, task.warning_seconds),
        shell_files=files,
        start_note=task.tasks.note,
        task_kind=task.tasks.task_kind,
        log_number=task.tasks.log_number,
        signal_note=_comment(f"{task.warning_note}."),
        cancel_waiting=behind,
        on_exit="leave" if behind else "-",
        continuation_note=_comment(f"{task.continuation_note}."),
        failures_without_progress=spec.supervise.failures_without_progress,
        supervisor=(python, "-m", "hpctrain.supervise", "--run-directory", "."),
        srun=_srun(job, task.tasks),
        srun_options=tuple(
            f"--{name}" if value is None else f"--{name}={value}"
            for name, value in written_options(srun_options(job))
        ),
        container_srun=words.srun,
        container_command=command,
        container_import=words.image_import,
        image_import=(python, "-m", "hpctrain.data.making.container_image"),
        trainer=(
            *prologue,
            container.python if container else python,
            "-m",
            *task.tasks.module,
            task.settings,
        ),
    )


def _comment(sentence: str) -> str:
    """Wrap a sentence into comment lines of at most 100 characters."""
    return "\n# ".join(textwrap.wrap(sentence, 98, break_on_hyphens=False))


def _lines(words: Iterable[str]) -> str:
    """Join quoted words to a command of lines of at most 120 characters, where words allow it.

    An option stays with its value.
    """
    lines: list[list[str]] = [[]]
    for word in words:
        line = lines[-1]
        if line and len(" ".join((*line, word))) > 110:
            option = len(line) > 1 and line[-1].startswith("--") and "=" not in line[-1]
            lines.append([line.pop()] if option else [])
        lines[-1].append(word)
    return " \\\n    ".join(map(" ".join, lines))


def _layout(plan: Plan) -> str:
    """Describe the axes, the batch, and the rank order and islands if they are unusual."""
    batch = f"micro-batch {plan.batch.micro_batch} x {plan.batch.accumulation} accumulation"
    parts = [str(plan.layout), batch]
    if plan.layout.order != DEFAULT_ORDER:
        parts.append(f"order {plan.layout.order}")
    if sum(nodes > 0 for nodes in plan.nodes.island_nodes) > 1:
        islands = " + ".join(map(str, plan.nodes.island_nodes))
        parts.append(f"nodes of islands {islands}")
    return " · ".join(parts)


def _directives(job: Job, facts: ScriptFacts, warning_seconds: int) -> tuple[str, ...]:
    """List the options of the #SBATCH lines."""
    spec, profile, nodes = job.spec, job.profile, node_options(job)
    one_gpu_per_task = "ntasks-per-node" in nodes and spec.launcher == "srun"
    options: dict[str, str | None] = {
        "job-name": facts.run_id,
        "comment": job_comment(job, facts.comment),
        "account": spec.resources.account or profile.slurm.account,
        "partition": job.partition.name if job.partition.request else None,
        "qos": spec.resources.qos or profile.slurm.qos,
        "reservation": spec.resources.reservation or profile.slurm.reservation,
        **topology_options(job),
        "constraint": job_constraint(job),
        **nodes,
        **gpu_request(job, counts_tasks=one_gpu_per_task),
        **memory_options(job),
        "time": job.walltime.slurm(),
        "signal": f"B:USR1@{warning_seconds}",
        "open-mode": "append",
        "output": "logs/slurm-%A_%a.out" if profile.continuation == "array" else _LOG,
        **continuation_options(profile),
        "export": "NONE" if profile.slurm.export == "none" else None,
    }
    lines = [*directive_lines(job, options), *exclusive_option(job)]
    if survives_node_failure(job):
        lines.append("--no-kill")
    lines.append(requeue_flag(profile))
    return tuple(profile.slurm.directives.applied_to(lines))


def directive_lines(job: Job, options: Mapping[str, str | None]) -> list[str]:
    """List the chosen options that have a value, then those that the site adds."""
    lines = [f"--{name}={directive_value(name, value)}" for name, value in options.items() if value]
    return lines + [
        f"--{name}" if value is None else f"--{name}={directive_value(name, value)}"
        for name, value in written_options(sbatch_options(job))
    ]


def _srun(job: Job, start: SrunTasks) -> tuple[str, ...]:
    """List the arguments of srun, up to the options that the template adds."""
    arguments = [
        "srun",
        f"--nodes={job.plan.nodes.nodes}",
        f"--ntasks={start.tasks}",
        f"--ntasks-per-node={start.tasks_per_node}",
        # Ranks in order over nodes and, within a node, over sockets: srun(1) deals CPUs out to the
        # sockets in turn by default, which takes every other rank away from its GPU.
        "--distribution=block:block",
        "--export=ALL",
        # The supervisor ends the step itself after it has found out which rank failed first;
        # srun's own kill would mask the exit codes. --wait acts if the supervisor does not.
        "--kill-on-bad-exit=0",
        "--wait=120",
    ]
    if start.labelled:
        arguments.append("--label")
    # Not inherited from sbatch since 22.05 (srun(1)).
    arguments.append(f"--cpus-per-task={job.cpus_per_gpu * start.gpus_per_task}")
    return (*arguments, *step_resources(job, counts_tasks=job.spec.launcher == "srun"))


# -- Fills the job template: the packaged one, or one of the site that extends or replaces it ---


TEMPLATE = "job.sbatch.j2"
# `hpctrain/job.sbatch.j2` is the packaged template, whatever a site's directory contains.
PACKAGED = "hpctrain"
# Without them there is no warning before the time limit, or a requeued job loses its log.
_NEEDED = ("--signal", "--open-mode", "--requeue", "--no-requeue")
_FORMER_NAME = "sbatch/megatron.sbatch.j2"


@dataclass(frozen=True)
class ServiceWords:
    """What the template of a service's job has beside the values of every job."""

    service_id: str
    progress_words: str


def render_script(script: Script, template_directory: Path | None = None) -> str:
    """Render the job script, with `job.sbatch.j2` of `template_directory` if one is given.

    Raises InvalidInputError for a directory without that file, and for a mistake in it.
    """
    return render_template(TEMPLATE, template_directory, script)


def render_service_script(
    part: Literal["replica", "router"],
    script: Script,
    words: ServiceWords,
    template_directory: Path | None,
) -> str:
    """Render the script of a job of a service, whose template has `words` under the name `part`."""
    return render_template(
        f"{PACKAGED}/{part}.sbatch.j2", template_directory, script, **{part: words}
    )


def render_template(
    name: str, template_directory: Path | None, script: Script, **more: object
) -> str:
    """Render a template by its name; `more` are values besides `script`. Raises as above."""
    from jinja2 import FileSystemLoader

    if template_directory is None:
        return _packaged_environment().get_template(name).render(script=script, **more)
    site = FileSystemLoader(template_directory)
    environment = template_environment(site)
    _refuse_missing(template_directory, site, environment)
    try:
        return environment.get_template(name).render(script=script, **more)
    except InvalidInputError:
        raise  # a value that no shell can take: not the template's mistake
    except Exception as error:  # a template can raise anything, such as ZeroDivisionError
        raise InvalidInputError([_template_problem(error, template_directory)]) from error


def refuse_dropped_directives(script: Script, text: str, directory: Path) -> None:
    """Raise InvalidInputError for a template of the site without what the supervisor relies on."""
    lines = {line.removeprefix("#SBATCH").strip() for line in text.splitlines()}
    dropped = [
        directive
        for directive in script.directives
        if directive.partition("=")[0] in _NEEDED and directive not in lines
    ]
    if dropped:
        message = f"this template drops {', '.join(dropped)}, which the supervisor relies on"
        hint = "keep `{{ super() -}}` in the block `directives`"
        raise InvalidInputError([Problem(message, str(directory / TEMPLATE), hint=hint)])


@functools.cache
def _packaged_environment() -> Environment:
    """Build the environment without a site's templates once: it keeps what it has compiled."""
    return template_environment()


def template_environment(site: BaseLoader | None = None) -> Environment:
    """Build jinja2's environment for the packaged templates and those of a site."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader, StrictUndefined

    class JobTemplates(Environment):
        """A template that extends its own name gets the packaged one, not itself."""

        def join_path(self, template: str, parent: str) -> str:
            return f"{PACKAGED}/{template}" if template == parent else template

    packaged = PackageLoader("hpctrain", "templates")
    environment = JobTemplates(
        loader=ChoiceLoader([PrefixLoader({PACKAGED: packaged}), site or packaged]),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["sh"] = sh
    environment.filters["sh_expanded"] = sh_expanded
    environment.filters["printable_line"] = printable_line
    environment.filters["wrapped"] = _comment
    environment.filters["lines"] = _lines
    return environment


def _refuse_missing(directory: Path, site: BaseLoader, environment: Environment) -> None:
    """Raise InvalidInputError where the directory has no `job.sbatch.j2` that could be used."""
    from jinja2 import TemplateNotFound

    def has(name: str) -> bool:
        try:
            site.get_source(environment, name)
        except TemplateNotFound:
            return False
        except (OSError, UnicodeDecodeError):
            pass  # rendering reads it again, and reports why it cannot
        return True

    if has(TEMPLATE):
        return
    hint = f"`{{% extends 'hpctrain/{TEMPLATE}' %}}` and the blocks that differ: docs/templates.md"
    for former in (_FORMER_NAME, Path(_FORMER_NAME).name):
        if has(former):
            message = f"no longer read: the job template is called {TEMPLATE} now"
            raise InvalidInputError([Problem(message, str(directory / former), hint=hint)])
    message = f"this template directory has no {TEMPLATE}"
    raise InvalidInputError([Problem(message, str(directory), hint=hint)])


def _template_problem(error: Exception, directory: Path) -> Problem:
    """Describe an error with the file and line of the site's template that it comes from."""
    from jinja2 import TemplateNotFound, TemplateSyntaxError

    if isinstance(error, TemplateSyntaxError):
        return Problem(f"job template: {error.message}", error.filename, error.lineno)
    file: str | None = str(directory / TEMPLATE)
    line = None
    root = os.path.normpath(directory)  # as jinja2 normalizes the names of files
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename).is_relative_to(root) and not frame.filename.endswith(".py"):
            file, line = frame.filename, frame.lineno
    if isinstance(error, TemplateNotFound):
        message = f"there is no template `{error.name}` to extend or include"
    elif isinstance(error, UnicodeDecodeError):
        message = "not UTF-8"
    elif isinstance(error, RecursionError):
        message = "templates extend or include each other without end"
    else:
        message = str(error) or type(error).__name__
    return Problem(f"job template: {message}", file, line)
