"""Turns two YAML files into everything that would be submitted, without touching runs/ or Slurm.

`--dry-run`, `--check` and `submit` all use `prepare`, so that what is shown is what is submitted.
Belongs here: combining the pure rooms, and the paths that a job reads. Does not belong here:
writing files, looking for inputs (`hpctrain.supervise.preflight`,
`hpctrain.train.preflight`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from hpctrain.base.errors import DoesNotFitError, InvalidInputError, LimitError, Problem
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.train_json import train_config
from hpctrain.engines.training import TrainConfig, speed_check_config
from hpctrain.job.render.containers import container_problems
from hpctrain.job.render.environment import (
    SetupFile,
    environment_of,
    submit_variables,
    variable_problems,
)
from hpctrain.job.render.evaluation_script import evaluation_problems, evaluation_script
from hpctrain.job.render.script import (
    TEMPLATE,
    Script,
    ScriptFacts,
    build_script,
    refuse_dropped_directives,
    render_script,
)
from hpctrain.job.render.shell_files import ShellFile
from hpctrain.job.site_warnings import refuse_ended_reservation, site_warnings
from hpctrain.job.supervisor_settings import (
    submit_settings,
    tracking_settings,
    training_supervision,
)
from hpctrain.judge.catalogue import load_signatures
from hpctrain.plan.abilities.trainable import untrainable_fields, untrainable_layout
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import TrainerJob, TrainingJob, parallel_as_planned
from hpctrain.plan.trainer_plan import TrainerPlan
from hpctrain.records.datasets import bin_path, idx_path, npz_path
from hpctrain.records.evaluations import EvaluationJob, EvaluationSettings
from hpctrain.records.find import new_run_id
from hpctrain.records.jobs import run_comment
from hpctrain.records.layout import RunLayout
from hpctrain.records.supervise_config import LaunchShape, SuperviseConfig
from hpctrain.spec.calibration import (
    Calibration,
    SiteCalibration,
    SiteLearning,
    Uncertainty,
    constants_digest,
    measured_rates,
)
from hpctrain.spec.loader import (
    Loaded,
    load_any_run_spec,
    load_calibration,
    load_catalogue,
    load_named_profile,
    load_run_spec,
    load_uncertainty,
    partition_profile,
    profile_search_path,
)
from hpctrain.spec.positions import write_resolved
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import DataSource, RunSpec
from hpctrain.spec.trainer import TrainerRunSpec

if TYPE_CHECKING:
    from hpctrain.plan.request import Knowledge
    from hpctrain.spec.catalogue import Gpu, GpuVariable


# -- The documents that every job has in its run directory, whatever it runs --------------------


@dataclass(frozen=True)
class JobDocuments:
    """`script` is the exact text, `signatures` is JSON."""

    script: str
    supervise: SuperviseConfig
    signatures: str
    shells: tuple[ShellFile, ...]

    def texts(self, run: RunLayout) -> Mapping[Path, str]:
        """The files of a run directory with these documents."""
        found = {
            run.script: self.script,
            run.supervise_config: self.supervise.model_dump_json(indent=1),
            run.signatures: self.signatures,
        }
        return {**found, **{run.directory / one.name: one.text for one in self.shells}}


# ----------------------------------------------------------------------------------------------
# Plans the sizes at which a run can be launched: the planned one, and smaller ones if allowed.
# On fewer nodes only the data-parallel size shrinks and accumulation grows, so the global batch and
# the order of samples stay. Planned when the run is submitted, because nothing that plans is on the
# compute nodes.


PLANNED_FILE = "train.json"


@dataclass(frozen=True)
class SizedConfig:
    """One size and the trainer's settings for it."""

    shape: LaunchShape
    train: TrainConfig


def smaller_sizes(job: TrainingJob, knowledge: Knowledge) -> tuple[SizedConfig, ...]:
    """Plan each node count from one less down to `resources.min_nodes`, if it has a valid plan.

    All sizes keep the model-parallel layout of the job's plan.
    """
    least, plan = job.spec.resources.min_nodes, job.plan
    if least is None:
        return ()
    from hpctrain.plan.planner import make_plan  # with NumPy, which only planning needs

    sizes = []
    for nodes in range(plan.nodes.nodes - 1, least - 1, -1):
        for micro in (plan.batch.micro_batch, "auto"):
            try:
                fewer = _on_fewer_nodes(job, nodes, micro)
                small = make_plan(fewer, job.profile, knowledge)
            except (DoesNotFitError, LimitError):
                continue
            file, tasks = f"train-n{nodes:06d}.json", small.layout.world_size
            shape = LaunchShape(nodes=nodes, tasks=tasks, train_config=file)
            sizes.append(SizedConfig(shape, train_config(TrainingJob(fewer, job.profile, small))))
            break
    return tuple(sizes)


def shapes_of(plan: Plan, smaller: tuple[SizedConfig, ...]) -> tuple[LaunchShape, ...]:
    """List the shapes of all sizes, the planned one first."""
    planned = LaunchShape(
        nodes=plan.nodes.nodes, tasks=plan.layout.world_size, train_config=PLANNED_FILE
    )
    return (planned, *(size.shape for size in smaller))


def _on_fewer_nodes(job: TrainingJob, nodes: int, micro: int | str) -> RunSpec:
    """Change the spec to `nodes` nodes, with the plan's model-parallel layout."""
    spec, plan = job.spec, job.plan
    resources = spec.resources.model_copy(
        update={
            "gpus": nodes * plan.nodes.gpus_per_node,
            "spare_nodes": 0,
            "segment": None,  # of the job, which stays as it is
        }
    )
    batch = spec.batch.model_copy(update={"micro": micro})
    # a checkpoint of DeepSpeed belongs to a ZeRO stage
    stage = {} if spec.engine.abilities.resumes_other_stage else {"zero": plan.zero}
    changed = dict(
        parallel=parallel_as_planned(spec, plan),
        resources=resources,
        batch=batch,
        optimizer=spec.optimizer.model_copy(update=stage),
    )
    return spec.model_copy(update=changed)


# ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreparedRun(JobDocuments, ABC):
    """A run that is ready to be submitted, of hpctrain's engines or of a trainer of its own.

    `facts` and `template_directory` are the inputs of rendering.
    """

    spec: Loaded[RunSpec] | Loaded[TrainerRunSpec]
    profile: Loaded[ClusterProfile]
    plan: Plan | TrainerPlan
    facts: ScriptFacts
    template_directory: Path | None = None

    @property
    @abstractmethod
    def job(self) -> TrainingJob | TrainerJob:
        """The three documents together."""

    @property
    def run_id(self) -> str:
        return self.facts.run_id

    @property
    @abstractmethod
    def resolved_spec(self) -> str:
        """The text of the spec with all values and their origins."""

    @property
    @abstractmethod
    def checkout(self) -> str | None:
        """The directory whose code trains, of which uncommitted changes are kept."""

    @abstractmethod
    def build_script(self, facts: ScriptFacts) -> Script:
        """Build the script of this run with other facts, such as another run id."""

    @abstractmethod
    def own_texts(self, layout: RunLayout) -> list[tuple[Path, str]]:
        """The files of the run directory that this kind of run has, beside those of every run."""


@dataclass(frozen=True, kw_only=True)
class Prepared(PreparedRun):
    """A run of hpctrain's engines that is ready to be submitted.

    `evaluation_profiles`: the profile in the partition of each evaluation job.
    """

    spec: Loaded[RunSpec]
    plan: Plan
    train: TrainConfig
    smaller: tuple[SizedConfig, ...] = ()
    evaluation_profiles: tuple[ClusterProfile, ...] = ()

    @property
    def resolved_spec(self) -> str:
        return write_resolved(self.spec)

    @property
    def checkout(self) -> str | None:
        return self.train.checkout_directory

    def build_script(self, facts: ScriptFacts) -> Script:
        return build_script(self.job, facts)

    def own_texts(self, layout: RunLayout) -> list[tuple[Path, str]]:
        wanted = tracking_settings(layout, self.job)
        tracking = [] if wanted is None else [wanted]
        sizes = [(layout.ds_config, self.train)]
        sizes += [(layout.ds_config_for(one.shape.nodes), one.train) for one in self.smaller]
        return [
            (layout.train_config, self.train.model_dump_json(indent=1)),
            *evaluation_files(self, layout),
            *((layout.tracking_config, one.model_dump_json(indent=1)) for one in tracking),
            *(
                (layout.train_config_for(one.shape.nodes), one.train.model_dump_json(indent=1))
                for one in self.smaller
            ),
            *(  # the configuration of the engine's own library, if it has one
                (path, json.dumps(config.library_config, indent=1) + "\n")
                for path, config in sizes
                if config.library_config is not None
            ),
        ]

    @property
    def job(self) -> TrainingJob:
        """The three documents together."""
        return TrainingJob(self.spec.document, self.profile.document, self.plan)


def load_inputs(
    spec: Path, profile: str, overrides: Sequence[str] = ()
) -> tuple[Loaded[RunSpec], Loaded[ClusterProfile]]:
    """Read both documents, the profile as it is for jobs in the spec's partition.

    Raises InvalidInputError with the problems of both at once.
    """
    return _load_both(lambda: load_run_spec(spec, overrides), profile)


def load_any_inputs(
    spec: Path, profile: str, overrides: Sequence[str] = ()
) -> tuple[Loaded[RunSpec] | Loaded[TrainerRunSpec], Loaded[ClusterProfile]]:
    """Read both documents as `load_inputs` does, also of a run with a trainer of its own."""
    return _load_both(lambda: load_any_run_spec(spec, overrides), profile)


SpecT = TypeVar("SpecT", Loaded[RunSpec], Loaded[RunSpec] | Loaded[TrainerRunSpec])


def _load_both(load: Callable[[], SpecT], profile: str) -> tuple[SpecT, Loaded[ClusterProfile]]:
    problems: list[Problem] = []
    loaded_spec: SpecT | None = None
    loaded_profile: Loaded[ClusterProfile] | None = None
    try:
        loaded_spec = load()
    except InvalidInputError as error:
        problems.extend(error.problems)
    try:
        loaded_profile = load_named_profile(profile)
    except InvalidInputError as error:
        problems.extend(error.problems)
    if loaded_spec is None or loaded_profile is None:
        raise InvalidInputError(problems)
    partition = loaded_spec.document.resources.partition
    return loaded_spec, partition_profile(loaded_profile, partition)


def load_knowledge(profile: Loaded[ClusterProfile]) -> Knowledge:
    """Load the catalogue's GPU for a profile, and the constants of the cost model.

    Figures that the site has measured replace the packaged ones. A profile that leaves `gpu.peak`
    empty on purpose (`peak: {}`) may have an unknown GPU: then there is none, and time is not
    predicted. Where partitions have GPUs of their own, figures count on the GPU that they were
    measured on alone. Raises InvalidInputError for any other GPU that is not in the catalogue, and
    for a calibration of another GPU where the cluster has one kind.
    """
    from hpctrain.plan.request import Knowledge
    from hpctrain.spec.catalogue import cluster_gpu, match_gpu

    catalogue, given = load_catalogue(profile_search_path()), profile.document.gpu
    unknown_on_purpose = "peak" in given.model_fields_set and not given.peak
    nameless = given.model is None and match_gpu(catalogue, given.type, given.memory) is None
    gpu = None
    if not (unknown_on_purpose and nameless):
        gpu = cluster_gpu(catalogue, profile.document, profile.origin)
    site, calibration, uncertainty = (
        profile.document.calibration,
        load_calibration(),
        load_uncertainty(),
    )
    several = any(one.gpu is not None for one in profile.document.slurm.partitions)
    if not isinstance(site, SiteCalibration) or gpu is None or (several and site.gpu != gpu.name):
        return Knowledge(gpu, calibration, uncertainty)

    if site.gpu != gpu.name:
        message = f"`calibration` was measured on `{site.gpu}`, and this cluster has `{gpu.name}`"
        hint = "measure this cluster (docs/gpu.md), or take its calibration away"
        raise InvalidInputError([profile.problem("calibration.gpu", message, hint)])
    return site_knowledge(gpu, calibration, uncertainty, site)


def site_knowledge(
    gpu: Gpu, calibration: Calibration, uncertainty: Uncertainty | None, site: SiteCalibration
) -> Knowledge:
    """Put what a site has measured and learned in place of packaged figures."""
    from hpctrain.plan.cost.from_spec import calibrated_at_site
    from hpctrain.plan.request import Knowledge

    measured = measured_rates(site)
    if measured:
        calibration = calibrated_at_site(calibration, site, gpu)
    digest = constants_digest(calibration) if site.learned else ""
    holds = {name: one for name, one in site.learned.items() if _holds(one, digest, uncertainty)}
    return Knowledge(
        gpu,
        calibration,
        uncertainty,
        learned=holds,
        outdated=tuple(name for name in site.learned if name not in holds),
        measured=measured,
    )


def _holds(learned: SiteLearning, constants: str, uncertainty: Uncertainty | None) -> bool:
    """Tell whether runs have corrected these constants, in all multipliers that the planner has."""
    if learned.constants != constants or uncertainty is None:
        return learned.constants == constants
    time, memory = uncertainty.time, uncertainty.memory
    if set(learned.time.multipliers) != {*time.multipliers, *time.classes}:
        return False
    return learned.memory is None or set(learned.memory.multipliers) == set(memory.multipliers)


def refuse_untrainable(spec: Loaded[RunSpec], found: Iterable[tuple[str, str]]) -> None:
    """Raise InvalidInputError for fields that hpctrain can plan but not train, each with why."""
    if problems := _untrainable(spec, found):
        raise InvalidInputError(problems)


def _untrainable(spec: Loaded[RunSpec], found: Iterable[tuple[str, str]]) -> list[Problem]:
    hint = "`hpctrain plan` can plan it; to submit, change this field"
    return [spec.problem(field, f"`{field}`: {message}", hint) for field, message in found]


def refuse_fields(spec: Loaded[RunSpec], profile: Loaded[ClusterProfile]) -> None:
    """Raise InvalidInputError for fields that the trainer or jobs of the site do not take."""
    problems = _untrainable(spec, untrainable_fields(spec.document)) + untaken(spec, profile)
    if problems:
        raise InvalidInputError(problems)


def untaken(
    spec: Loaded[RunSpec] | Loaded[TrainerRunSpec], profile: Loaded[ClusterProfile]
) -> list[Problem]:
    """List what containers of the site lack, and variables that a job does not take."""
    document, site = spec.document, profile.document
    lacking = [
        spec.problem(path, f"`{path}`: {text}", hint)
        for path, text, hint in container_problems(document, site)
    ]
    return lacking + [
        (spec if of_spec else profile).problem(field, message, "remove it")
        for of_spec, field, message in variable_problems(document.environment, site)
    ]


def prepare(
    spec: Path,
    profile: str,
    overrides: Sequence[str] = (),
    *,
    runs: Path,
    template_directory: Path | None = None,
    python: str = sys.executable,
) -> Prepared:
    """Plan and render one run. Raises InvalidInputError, DoesNotFitError, LimitError."""
    loaded_spec, loaded_profile = load_inputs(spec, profile, overrides)
    with loaded_spec.placing():
        prepared = _prepared(loaded_spec, loaded_profile, runs, template_directory, python)
        return replace(prepared, evaluation_profiles=profiles_of_jobs(prepared, profile))


def _prepared(
    loaded_spec: Loaded[RunSpec],
    loaded_profile: Loaded[ClusterProfile],
    runs: Path,
    template_directory: Path | None,
    python: str,
) -> Prepared:
    # with NumPy, which only planning needs
    from hpctrain.plan.cost.prediction import expected_speed
    from hpctrain.plan.planner import make_plan
    from hpctrain.plan.request import PlanRequest

    document, site = loaded_spec.document, loaded_profile.document
    refuse_fields(loaded_spec, loaded_profile)
    knowledge = load_knowledge(loaded_profile)
    plan = make_plan(document, site, knowledge)
    refuse_untrainable(loaded_spec, untrainable_layout(plan))
    templates = template_directory or site_templates(loaded_profile)
    template_sha256 = None if templates is None else templates_digest(templates)
    loaded_profile = digested_with(loaded_profile, template_sha256)
    job = TrainingJob(document, site, plan)
    refuse_ended_reservation(job, datetime.now(UTC))
    run_id = new_run_id(runs, document.name, loaded_spec.digest, loaded_profile.digest)
    gpu_variables: tuple[GpuVariable, ...] = ()
    if knowledge.gpu is not None:
        gpu_variables = load_catalogue(profile_search_path()).variables_for(
            knowledge.gpu, plan.engine, model_parallel=plan.layout.tp * plan.layout.cp > 1
        )
    facts = ScriptFacts(
        run_id,
        run_comment(run_id),
        loaded_spec.digest,
        loaded_profile.digest,
        python,
        gpu_variables,
        setup_file(loaded_profile),
        template_sha256,
    )
    absolute = replace(job, spec=_with_scratch(_with_absolute_paths(document), loaded_spec, site))
    speed = expected_speed(PlanRequest(document, site, knowledge), plan)
    check = {"speed_check": speed_check_config(job, speed)}  # in every trainer's document
    smaller = tuple(
        replace(size, train=size.train.model_copy(update=check))
        for size in smaller_sizes(absolute, knowledge)
    )
    train = train_config(absolute).model_copy(update=check)
    inputs = input_paths(train)
    environment = environment_of(job, python, facts.setup, gpu_variables)
    warnings = site_warnings(absolute, loaded_spec, inputs, runs / run_id, environment)
    script = build_script(job, facts)
    return Prepared(
        spec=loaded_spec,
        profile=loaded_profile,
        plan=plan.model_copy(update={"warnings": (*plan.warnings, *warnings)}),
        train=train,
        supervise=training_supervision(job, run_id, runs, shapes_of(plan, smaller), inputs),
        script=rendered(script, templates),
        facts=facts,
        template_directory=templates,
        smaller=smaller,
        signatures=load_signatures(profile_search_path()).to_json(),
        shells=script.shell_files,
    )


def rendered(script: Script, templates: Path | None) -> str:
    """Render a script. Raises InvalidInputError for a template of the site that drops too much."""
    text = render_script(script, templates)
    if templates is not None:
        refuse_dropped_directives(script, text, templates)
    return text


RunT = TypeVar("RunT", bound=PreparedRun)


def with_free_run_id(prepared: RunT, runs: Path) -> RunT:
    """Give the job the next free run id: two submits of one spec may choose the same one."""
    name = prepared.spec.document.name
    run_id = new_run_id(runs, name, prepared.spec.digest, prepared.profile.digest)
    return with_run_id(prepared, run_id)


def with_run_id(prepared: RunT, run_id: str) -> RunT:
    """Give the job another run id."""
    facts = replace(prepared.facts, run_id=run_id, comment=run_comment(run_id))
    return replace(
        prepared,
        facts=facts,
        supervise=prepared.supervise.model_copy(update={"run_id": run_id}),
        script=rendered(prepared.build_script(facts), prepared.template_directory),
    )


def _with_absolute_paths(spec: RunSpec) -> RunSpec:
    """Make the paths of a spec absolute: they are relative to where `submit` runs."""
    data = spec.data
    sources = tuple(
        DataSource(path=os.path.abspath(source.path), weight=source.weight)
        for source in data.sources
    )
    paths = {name: getattr(data, name) for name in ("tokenizer", "cache", "validation")}
    absolute = data.model_copy(
        update={
            "sources": sources,
            **{name: os.path.abspath(path) if path else None for name, path in paths.items()},
        }
    )
    weights = spec.model.pretrained
    starting = {"pretrained": os.path.abspath(weights) if weights else None}
    model = spec.model.model_copy(update=starting)
    checkout = spec.engine.checkout
    program = {"checkout": os.path.abspath(checkout) if checkout else None}
    engine = spec.engine.model_copy(update=program)
    return spec.model_copy(update={"data": absolute, "model": model, "engine": engine})


def _with_scratch(document: RunSpec, spec: Loaded[RunSpec], site: ClusterProfile) -> RunSpec:
    """Fill in the engine's directory (`nvme_directory`) if something is offloaded to NVMe.

    Raises InvalidInputError where neither the spec nor the profile names a directory.
    """
    abilities = document.engine.abilities
    homes = ("optimizer.offload", abilities.weight_home)
    fields = [field for field in homes if field and attrgetter(field)(document) == "nvme"]
    target = abilities.nvme_directory
    if target is None or not fields or attrgetter(target)(document):
        return document
    local = next((system.path for system in site.filesystems if system.kind == "local"), None)
    if local is None:
        message = (
            f"`{fields[0]}`: profile {site.name} has no file system of kind `local` to offload to"
        )
        hint = f"name a directory on each node's NVMe: `{target}`"
        raise InvalidInputError([spec.problem(fields[0], message, hint)])
    section, _, name = target.rpartition(".")
    value: object = local
    while name:  # copy each section that contains the field, from the innermost outwards
        inside = attrgetter(section)(document) if section else document
        value = inside.model_copy(update={name: value})
        section, _, name = section.rpartition(".")
    return cast(RunSpec, value)


def input_paths(config: TrainConfig) -> tuple[str, ...]:
    """List the files and directories that every launch reads on every node.

    This excludes what only the first launch reads (initial weights for megatron-core), and what
    each node has for itself (caches, NVMe).
    """
    paths: list[Path] = []
    if isinstance(config, ModuleConfig) and config.data_format != "tokens":
        sources = [path for _, path in config.data_blend]
        sources += [config.data_validation] if config.data_validation is not None else []
        images = config.data_format == "images"
        for source in map(Path, sources):
            paths.append(source if images and source.is_dir() else npz_path(source))
    else:
        prefixes = [Path(prefix) for _, prefix in config.data_blend]
        paths += [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix))]
    return tuple(dict.fromkeys([*map(str, paths), *config.needed_paths]))


# -- Finds the files of a site that a profile names, and computes their digests -----------------


def templates_digest(directory: Path) -> str:
    """Compute the SHA-256 (hex) of the names and texts of all templates in a site's directory.

    Raises InvalidInputError if one cannot be read.
    """
    total = hashlib.sha256()
    try:
        for file in sorted(directory.rglob("*.j2")):
            text = hashlib.sha256(file.read_bytes()).hexdigest()
            total.update(f"{text}  {file.relative_to(directory)}\n".encode())
    except OSError as error:
        problem = Problem(f"cannot be read: {error.strerror}", str(error.filename or directory))
        raise InvalidInputError([problem]) from error
    return total.hexdigest()


def digested_with(
    profile: Loaded[ClusterProfile], template_sha256: str | None
) -> Loaded[ClusterProfile]:
    """Return the profile with the digest of its templates in its own; None: it has none."""
    if template_sha256 is None:
        return profile
    both = f"{profile.digest}{template_sha256}".encode()
    return replace(profile, digest=hashlib.sha256(both).hexdigest())


def site_templates(profile: Loaded[ClusterProfile]) -> Path | None:
    """Find the directory of `slurm.template`. Raises InvalidInputError if it is not there."""
    name = profile.document.slurm.template
    if name is None:
        return None
    path = Path(profile.places["slurm.template"].file).absolute().parent / name
    if path.is_file() and path.name == TEMPLATE:
        return path.parent
    if path.is_dir():
        return path
    message = f"`slurm.template`: {path} is neither a directory nor a file called {TEMPLATE}"
    raise InvalidInputError([profile.problem("slurm.template", message)])


def setup_file(profile: Loaded[ClusterProfile]) -> SetupFile | None:
    """Read the digest of the site's setup file. Raises InvalidInputError if it cannot be read."""
    path = profile.document.software.setup
    if path is None:
        return None
    try:
        if not os.path.isabs(path):
            raise OSError(0, "needs an absolute path, because jobs run in other directories")
        return SetupFile(path, hashlib.sha256(Path(path).read_bytes()).hexdigest())
    except OSError as error:
        message = f"`software.setup` {path}: {error.strerror}"
        raise InvalidInputError([profile.problem("software.setup", message)]) from error


# -- Makes the files of a run from which its evaluation jobs are submitted ----------------------


def profiles_of_jobs(prepared: Prepared, profile: str) -> tuple[ClusterProfile, ...]:
    """Load the profile as it is in the partition of each evaluation of a run.

    Raises InvalidInputError for a partition, a time limit or GPUs that the site has not.
    """
    others, problems = [], []
    spec = prepared.spec
    for index, job in enumerate(spec.document.evaluation.jobs):
        other = prepared.profile.document
        if job.partition is not None:
            loaded = load_named_profile(profile)
            if loaded.document.slurm.partition(job.partition) is None:
                other = loaded.document
            else:
                other = partition_profile(loaded, job.partition).document
        found = evaluation_problems(job, prepared.job, other, f"evaluation.jobs[{index}]")
        problems += [spec.problem(one.field, f"`{one.field}`: {one}") for one in found]
        others.append(other)
    if problems:
        raise InvalidInputError(problems)
    return tuple(others)


def evaluation_files(prepared: Prepared, layout: RunLayout) -> list[tuple[Path, str]]:
    """Render settings and scripts; nothing for a spec without evaluation jobs."""
    training, spec = prepared.job, prepared.spec.document
    if not spec.evaluation.jobs:
        return []
    script = build_script(training, prepared.facts)
    files, jobs = [], []
    for job, other in zip(spec.evaluation.jobs, prepared.evaluation_profiles, strict=True):
        every_steps = job.every_steps or spec.checkpoint.keep_every_steps
        entry = EvaluationJob(name=job.name, every_steps=every_steps)
        there = replace(training, profile=other)
        text = evaluation_script(script, there, job, prepared.template_directory)
        jobs.append(entry)
        files.append((layout.evaluation_script(entry.name), text))
    settings = EvaluationSettings(
        jobs=tuple(jobs),
        last_step=spec.train_steps,
        submit_variables=submit_variables(training),
        submission=submit_settings(training.profile),
    )
    return [*files, (layout.evaluation_config, settings.model_dump_json(indent=1) + "\n")]
