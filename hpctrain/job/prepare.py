"""Turns two YAML files into everything that would be submitted, without touching runs/ or Slurm.

`--dry-run`, `--check` and `submit` all use `prepare`, so that what is shown is what is submitted.
Belongs here: combining the pure rooms, and the paths that a job reads. Does not belong here:
writing files, looking for inputs (`hpctrain.supervise.evidence.node_checks`,
`hpctrain.train.preflight`).
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.engines.module import ModuleConfig
from hpctrain.engines.train_json import train_config
from hpctrain.engines.training import SpeedCheckConfig, TrainConfig, speed_check_config
from hpctrain.job.elastic_sizes import SizedConfig, shapes_of, smaller_sizes
from hpctrain.job.evaluation_files import profiles_of_jobs
from hpctrain.job.job_documents import JobDocuments
from hpctrain.job.render.containers import container_problems
from hpctrain.job.render.script import ScriptFacts, build_script
from hpctrain.job.render.software import prologue_text
from hpctrain.job.render.template import (
    refuse_dropped_directives,
    render_script,
)
from hpctrain.job.site_files import setup_file, site_templates, templates_digest
from hpctrain.job.site_warnings import refuse_ended_reservation, site_warnings
from hpctrain.job.supervisor_settings import training_supervision
from hpctrain.judge.catalogue import load_signatures
from hpctrain.plan.abilities.trainable import untrainable_fields, untrainable_layout
from hpctrain.plan.documents import Plan
from hpctrain.plan.job import TrainingJob
from hpctrain.records.datasets import bin_path, idx_path, npz_path
from hpctrain.records.find import new_run_id
from hpctrain.records.jobs import run_comment
from hpctrain.spec.calibration import (
    Calibration,
    SiteCalibration,
    constants_digest,
    measured_rates,
)
from hpctrain.spec.loader import (
    Loaded,
    load_calibration,
    load_catalogue,
    load_run_spec,
    load_uncertainty,
    partition_profile,
)
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.profiles import load_named_profile, profile_search_path
from hpctrain.spec.run import DataSource, RunSpec
from hpctrain.spec.uncertainty import SiteLearning, Uncertainty

if TYPE_CHECKING:
    from hpctrain.plan.request import Knowledge
    from hpctrain.spec.catalogue import Gpu, GpuVariable
    from hpctrain.spec.uncertainty import SiteLearning, Uncertainty


@dataclass(frozen=True)
class Prepared(JobDocuments):
    """A run that is ready to be submitted.

    `facts` and `template_directory` are the inputs of rendering. `evaluation_profiles`: the profile
    in the partition of each evaluation job.
    """

    spec: Loaded[RunSpec]
    profile: Loaded[ClusterProfile]
    plan: Plan
    train: TrainConfig
    facts: ScriptFacts
    template_directory: Path | None = None
    smaller: tuple[SizedConfig, ...] = ()
    evaluation_profiles: tuple[ClusterProfile, ...] = ()

    @property
    def run_id(self) -> str:
        return self.facts.run_id

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
    problems: list[Problem] = []
    loaded_spec: Loaded[RunSpec] | None = None
    loaded_profile: Loaded[ClusterProfile] | None = None
    try:
        loaded_spec = load_run_spec(spec, overrides)
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
    from hpctrain.plan.cost.constants import calibrated_at_site
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
    hint = "`hpctrain plan` can plan it; to submit, change this field"
    problems = [spec.problem(field, f"`{field}`: {message}", hint) for field, message in found]
    if problems:
        raise InvalidInputError(problems)


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
    from hpctrain.plan.planner import make_plan  # with NumPy, which only planning needs

    document, site = loaded_spec.document, loaded_profile.document
    refuse_untrainable(loaded_spec, untrainable_fields(document))
    impossible = container_problems(document, site)
    if impossible:
        raise InvalidInputError(
            [
                loaded_spec.problem(path, f"`{path}`: {text}", hint)
                for path, text, hint in impossible
            ]
        )
    knowledge = load_knowledge(loaded_profile)
    plan = make_plan(document, site, knowledge)
    refuse_untrainable(loaded_spec, untrainable_layout(plan))
    templates = template_directory or site_templates(loaded_profile)
    template_sha256 = None if templates is None else templates_digest(templates)
    if template_sha256 is not None:
        both = f"{loaded_profile.digest}{template_sha256}".encode()
        loaded_profile = replace(loaded_profile, digest=hashlib.sha256(both).hexdigest())
    job = TrainingJob(document, site, plan)
    refuse_ended_reservation(job, datetime.now(UTC))
    run_id = new_run_id(runs, document.name, loaded_spec.digest, loaded_profile.digest)
    facts = ScriptFacts(
        run_id,
        run_comment(run_id),
        loaded_spec.digest,
        loaded_profile.digest,
        python,
        _gpu_variables(knowledge.gpu, plan),
        setup_file(loaded_profile),
        template_sha256,
    )
    absolute = replace(job, spec=_with_scratch(_with_absolute_paths(document), loaded_spec, site))
    check = _speed_check(job, knowledge)
    smaller = tuple(
        replace(size, train=size.train.model_copy(update=check))
        for size in smaller_sizes(absolute, knowledge)
    )
    train = train_config(absolute).model_copy(update=check)
    inputs = input_paths(train)
    warnings = site_warnings(absolute, loaded_spec, inputs, runs / run_id)
    return Prepared(
        spec=loaded_spec,
        profile=loaded_profile,
        plan=plan.model_copy(update={"warnings": (*plan.warnings, *warnings)}),
        train=train,
        supervise=training_supervision(job, run_id, runs, shapes_of(plan, smaller), inputs),
        script=_rendered(job, facts, templates),
        facts=facts,
        template_directory=templates,
        smaller=smaller,
        signatures=load_signatures(profile_search_path()).to_json(),
        prologue=prologue_text(job),
    )


def _rendered(job: TrainingJob, facts: ScriptFacts, templates: Path | None) -> str:
    script = build_script(job, facts)
    text = render_script(script, templates)
    if templates is not None:
        refuse_dropped_directives(script, text, templates)
    return text


def _speed_check(job: TrainingJob, knowledge: Knowledge) -> dict[str, SpeedCheckConfig | None]:
    """Make the settings of the check before training, as an update of the trainer's document."""
    from hpctrain.plan.cost.expected_speed import expected_speed
    from hpctrain.plan.request import PlanRequest

    expected = expected_speed(PlanRequest(job.spec, job.profile, knowledge), job.plan)
    return {"speed_check": speed_check_config(job, expected)}


def _gpu_variables(gpu: Gpu | None, plan: Plan) -> tuple[GpuVariable, ...]:
    """Select the catalogue's variables for this GPU, engine and layout."""
    if gpu is None:
        return ()
    model_parallel = plan.layout.tp * plan.layout.cp > 1
    catalogue = load_catalogue(profile_search_path())
    return catalogue.variables_for(gpu, plan.engine, model_parallel=model_parallel)


def with_free_run_id(prepared: Prepared, runs: Path) -> Prepared:
    """Give the job the next free run id: two submits of one spec may choose the same one."""
    name = prepared.spec.document.name
    run_id = new_run_id(runs, name, prepared.spec.digest, prepared.profile.digest)
    return with_run_id(prepared, run_id)


def with_run_id(prepared: Prepared, run_id: str) -> Prepared:
    """Give the job another run id."""
    facts = replace(prepared.facts, run_id=run_id, comment=run_comment(run_id))
    return replace(
        prepared,
        facts=facts,
        supervise=prepared.supervise.model_copy(update={"run_id": run_id}),
        script=_rendered(prepared.job, facts, prepared.template_directory),
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
