"""Turn a spec with a trainer of its own, and a profile, into everything that would be submitted.

Belongs here: what differs from runs of hpctrain's engines (`prepare`): plan, settings of the agent,
the words of the script, checks before the queue, the lines that `plan` and `submit` print. Does not
belong here: rendering (`hpctrain.job.render`), what the agent does (`hpctrain.trainer`).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import InvalidInputError
from hpctrain.base.printable_text import printable_line
from hpctrain.base.units import short_duration
from hpctrain.engines.trainer import TrainerSettings, trainer_settings
from hpctrain.job.prepare import (
    Prepared,
    PreparedRun,
    digested_with,
    load_any_inputs,
    load_knowledge,
    prepare,
    rendered,
    setup_file,
    site_templates,
    templates_digest,
    untaken,
)
from hpctrain.job.render.containers import run_container
from hpctrain.job.render.environment import environment_of
from hpctrain.job.render.job_options import continuation_sentence
from hpctrain.job.render.script import (
    LOGS_OF_NODES,
    MOST_LOGS_OF_RANKS,
    JobTask,
    Script,
    ScriptFacts,
    SrunTasks,
    job_script,
    wrapped_comment,
)
from hpctrain.job.site_warnings import (
    refuse_ended_reservation,
    registry_warnings,
    ungiven_warnings,
    unmounted_warnings,
)
from hpctrain.job.supervisor_settings import (
    run_supervision,
    tracking_of,
)
from hpctrain.judge.catalogue import load_signatures
from hpctrain.plan.job import TrainerJob
from hpctrain.plan.trainer_plan import TrainerPlan, plan_trainer
from hpctrain.records.find import new_run_id
from hpctrain.records.jobs import run_comment
from hpctrain.records.layout import RunLayout
from hpctrain.records.supervise_config import LaunchShape
from hpctrain.spec.loader import Loaded, load_catalogue, profile_search_path
from hpctrain.spec.positions import write_resolved
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.trainer import (
    LEVELS,
    TrainerRunSpec,
    TrainerSpec,
    levels_of,
    without_resume,
)

_SETTINGS = "train.json"
# slurmctld looks every 30 s (sbatch(1), --signal: up to 60 s early), and then the end is judged.
_SLURM_SECONDS = 60.0
# Without a signal by which the trainer saves, a stop ends it: so long for that.
_END_SECONDS = 30.0
_LONGEST_SECONDS = 65535  # sbatch(1), --signal
_AGENT = "hpctrain.trainer.agent"
_LONGEST_COMMAND = 80


@dataclass(frozen=True, kw_only=True)
class PreparedTrainerRun(PreparedRun):
    """A run with a trainer of its own that is ready to be submitted."""

    spec: Loaded[TrainerRunSpec]
    plan: TrainerPlan
    settings: TrainerSettings

    @property
    def job(self) -> TrainerJob:
        return TrainerJob(self.spec.document, self.profile.document, self.plan)

    @property
    def resolved_spec(self) -> str:
        return write_resolved(self.spec)

    @property
    def checkout(self) -> str | None:
        return None

    def build_script(self, facts: ScriptFacts) -> Script:
        return trainer_script(self.job, facts)

    def own_texts(self, layout: RunLayout) -> list[tuple[Path, str]]:
        tracking = tracking_of(layout, self.job.spec.tracking, _description(self.job, layout))
        return [
            (layout.train_config, self.settings.model_dump_json(indent=1, by_alias=True)),
            *(
                (layout.train_config_for(shape.nodes), self.settings.model_dump_json(by_alias=True))
                for shape in self.supervise.shapes[1:]
            ),
            *(
                []
                if tracking is None
                else [(layout.tracking_config, tracking.model_dump_json(indent=1))]
            ),
        ]


def prepare_any(
    spec: Path,
    profile: str,
    overrides: Sequence[str] = (),
    *,
    runs: Path,
    template_directory: Path | None = None,
) -> Prepared | PreparedTrainerRun:
    """Plan and render one run of either kind.

    Raises InvalidInputError, DoesNotFitError, LimitError.
    """
    loaded, site = load_any_inputs(spec, profile, overrides)
    if not isinstance(loaded.document, TrainerRunSpec):
        return prepare(spec, profile, overrides, runs=runs, template_directory=template_directory)
    return prepare_trainer(
        loaded,
        site,
        spec.absolute().parent,
        runs=runs,
        template_directory=template_directory,
    )


def prepare_trainer(
    spec: Loaded[TrainerRunSpec],
    profile: Loaded[ClusterProfile],
    directory: Path,
    *,
    runs: Path,
    template_directory: Path | None,
) -> PreparedTrainerRun:
    """Plan and render one run. `directory`: that of the spec.

    Raises InvalidInputError, LimitError.
    """
    document, site = spec.document, profile.document
    if problems := untaken(spec, profile):
        raise InvalidInputError(problems)
    with spec.placing():
        plan = plan_trainer(document, site)
    templates = template_directory or site_templates(profile)
    template_sha256 = None if templates is None else templates_digest(templates)
    profile = digested_with(profile, template_sha256)
    job = TrainerJob(document, site, plan)
    refuse_ended_reservation(job, datetime.now(UTC))
    run_id = new_run_id(runs, document.name, spec.digest, profile.digest)
    gpu = load_knowledge(profile).gpu
    variables = (
        load_catalogue(profile_search_path()).variables_for(
            gpu, document.engine.name, model_parallel=False
        )
        if gpu is not None
        else ()
    )
    facts = ScriptFacts(
        run_id,
        run_comment(run_id),
        spec.digest,
        profile.digest,
        sys.executable,
        variables,
        setup_file(profile),
        template_sha256,
    )
    settings = trainer_settings(job, directory, logs_by(job))
    environment = environment_of(job, sys.executable, facts.setup, variables)
    container = run_container(document.container, site.software.container)
    warnings = (
        *ungiven_warnings(job, environment),
        *unmounted_warnings(container, [settings.directory], runs / run_id),
        *registry_warnings(container, plan.nodes.nodes),
    )
    script = trainer_script(job, facts)
    checkpoint, silence = document.trainer.checkpoint, document.trainer.silence
    return PreparedTrainerRun(
        spec=spec,
        profile=profile,
        plan=plan.model_copy(update={"warnings": (*plan.warnings, *warnings)}),
        settings=settings,
        supervise=run_supervision(
            job,
            run_id,
            runs,
            _shapes(job),
            (settings.directory,),
            target_step=document.trainer.done.step,
            launcher="agent",
            warning_seconds=float(warning_seconds(job)),
            verify=checkpoint.verify if checkpoint is not None else "auto",
            **({} if silence is None else {"life": "output", "stall_seconds": float(silence)}),
        ),
        script=rendered(script, templates),
        facts=facts,
        template_directory=templates,
        signatures=load_signatures(profile_search_path()).to_json(),
        shells=script.shell_files,
    )


def _shapes(job: TrainerJob) -> tuple[LaunchShape, ...]:
    """List the sizes of a launch: the planned one, and smaller ones if the trainer bears them."""
    nodes, per_node = job.plan.nodes.nodes, job.plan.nodes.gpus_per_node
    ranks = per_node if job.spec.launcher == "srun" else 1
    least = job.spec.resources.min_nodes or nodes
    return tuple(
        LaunchShape(
            nodes=count,
            tasks=count * ranks,
            train_config=_SETTINGS if count == nodes else f"train-n{count:06d}.json",
        )
        for count in range(nodes, least - 1, -1)
    )


def logs_by(job: TrainerJob) -> Literal["rank", "node"]:
    """Choose whether each rank or each node has a log, according to `logging.files`."""
    if job.spec.logging.files != "auto":
        return job.spec.logging.files
    return "rank" if job.plan.world_size <= MOST_LOGS_OF_RANKS else "node"


def trainer_script(job: TrainerJob, facts: ScriptFacts) -> Script:
    """Build the job script of a run. Raises InvalidInputError for what sbatch cannot take."""
    trainer, plan, seconds = job.spec.trainer, job.plan, warning_seconds(job)
    name = trainer.framework or "a trainer of its own"
    until = f"step {plan.target_step}" if plan.target_step else f"file {trainer.done.file}"
    words = "a script for bash" if trainer.script is not None else " ".join(trainer.words)
    shown = printable_line(words)  # in a comment: on one line, and not without end
    shown = shown if len(shown) <= _LONGEST_COMMAND else f"{shown[:_LONGEST_COMMAND]} ..."
    save = trainer.signal
    how = (
        f"{short_duration(float(save.seconds))} for a save on {save.save} and the end after it"
        if save is not None
        else "the trainer saves on no signal and is ended"
    )
    task = JobTask(
        title=f"{printable_line(job.spec.name)} on {job.profile.name}: {plan.nodes}, {name}, "
        f"until {until}",
        layout=f"{plan.world_size} ranks · {shown}",
        settings=_SETTINGS,
        tasks=_tasks(job),
        warning_seconds=seconds,
        warning_note=(
            f"USR1 comes {seconds} s before the time limit: {_SLURM_SECONDS:.0f} s for Slurm, {how}"
        ),
        continuation_note=continuation_sentence(job.profile),
        job_texts=tuple(
            (f"trainer.{field}", word)
            for field, words in (
                ("command", trainer.command or ()),
                ("launcher_arguments", trainer.launcher_arguments),
            )
            for word in words
        ),
    )
    return job_script(job, facts, task)


def _tasks(job: TrainerJob) -> SrunTasks:
    """Choose what srun starts: an agent for each GPU, or one for each node."""
    nodes, gpus = job.plan.nodes.nodes, job.plan.nodes.gpus_per_node
    by_rank, by_node = job.spec.launcher == "srun", logs_by(job) == "node"
    kinds = {
        "srun": "One task per GPU: an agent, whose process below is the rank.",
        "torchrun": f"One task per node: an agent, which starts {gpus} ranks with the variables of "
        "torchrun.",
        "accelerate": "One task per node: an agent, which starts `accelerate launch`.",
        "ray": "One task per node: an agent, which starts Ray; the first one has its head, and "
        "then the command.",
        "self": "One task per node: an agent, which starts the command.",
    }
    logs = f"{LOGS_OF_NODES}." if by_node else "Logs of each attempt and rank are kept apart."
    return SrunTasks(
        tasks=nodes * gpus if by_rank else nodes,
        tasks_per_node=gpus if by_rank else 1,
        gpus_per_task=1 if by_rank else gpus,
        module=(_AGENT,),
        task_kind="node" if by_node or not by_rank else "rank",
        log_number="%4n" if by_node else "%4t",
        labelled=by_node and by_rank,
        note=wrapped_comment(
            f"{kinds[job.spec.trainer.starts_by]} It hands signals on, publishes checkpoints and "
            f"says how the ranks have ended. {logs}"
        ),
    )


def warning_seconds(job: TrainerJob) -> int:
    """Return how long before the time limit Slurm warns: what a save takes, at most half of it."""
    save = job.spec.trainer.signal
    wanted = _SLURM_SECONDS + (float(save.seconds) if save is not None else _END_SECONDS)
    most = min(round(float(job.walltime) / 2), _LONGEST_SECONDS)
    return max(1, min(round(wanted / 10) * 10, most))


def _description(job: TrainerJob, layout: RunLayout) -> dict[str, str | int | None]:
    """What is worth comparing between runs in TensorBoard and W&B."""
    return {
        "run_id": layout.run_id,
        "framework": job.spec.trainer.framework,
        "nodes": job.plan.nodes.nodes,
        "gpus": job.plan.world_size,
    }


# -- What people are told before the queue -------------------------------------------------------


def trainer_lines(prepared: PreparedTrainerRun) -> Iterator[tuple[str, str]]:
    """Yield label and text of what `plan` and `submit` print of a run."""
    trainer, plan = prepared.spec.document.trainer, prepared.plan
    name = trainer.framework or "of its own"
    yield "Plan", f"{plan.run_name} -> {plan.profile_name} ({plan.nodes}), trainer {name}"
    yield from supervision_lines(trainer)
    yield "Memory", "unknown: hpctrain does not know what this trainer needs"


def supervision_lines(trainer: TrainerSpec) -> Iterator[tuple[str, str]]:
    """Yield label and text of what the spec alone says: level, end, and what is started."""
    yield "Level", level_words(trainer)
    if trainer.level + 1 < len(LEVELS):
        level = LEVELS[trainer.level + 1]
        yield "Next", f"level {level.number} (`{level.field}`): {level.gives}"
    if trainer.silence is not None:
        for_long = short_duration(float(trainer.silence))
        yield "Hangs", f"after {for_long} without a line or a changed file (`trainer.silence`)"
    elif not trainer.tells_steps:
        yield "Unseen", "hangs: it tells no steps, and `trainer.silence` is not set"
    done = trainer.done
    if done.step is None:
        yield "Done", f"when it exits with 0 and has written {done.file}"
    else:
        yield "Done", f"when it exits with 0 and step {done.step:,} is reported or saved"
    fresh, later = (command_line(trainer, resumes=resumes) for resumes in (False, True))
    yield "First", fresh
    if later != fresh:
        yield "Later", later
    for need in trainer.needs:
        yield "Needs", need


def level_words(trainer: TrainerSpec) -> str:
    """Say how far a run is supervised, and what it does by that: `1 of 4: restarts, resumes`."""
    reached, above = levels_of(trainer)
    words = ", ".join(level.does for level in reached)
    more = f"; also {', '.join(level.does for level in above)}" if above else ""
    return f"{trainer.level} of {len(LEVELS) - 1}: {words}{more}"


def command_line(trainer: TrainerSpec, *, resumes: bool) -> str:
    """Write the command as a launch would have it, with the names of what is put in."""
    if trainer.script is not None:
        state = "the checkpoint" if resumes else "empty"
        return f"the script, $HPCTRAIN_CHECKPOINT is {state}"
    words = trainer.words if resumes else without_resume(trainer.words)
    if trainer.starts_by == "accelerate":
        words = ("accelerate", "launch", *trainer.launcher_arguments, *words)
    return " ".join(f"'{word}'" if not word or re.search(r"\s", word) else word for word in words)


def command_problem(prepared: PreparedTrainerRun) -> str | None:
    """Say what would keep the command from starting, as far as it can be seen from here."""
    directory, words = prepared.settings.directory, prepared.spec.document.trainer.words
    if not os.path.isdir(directory):
        return f"its directory {directory} is not there"
    for word in words:
        if word.endswith((".py", ".sh")) and not os.path.isabs(word) and "$" not in word:
            if not os.path.exists(os.path.join(directory, word)):
                return f"{word} is not in {directory}"
            break
    return None
