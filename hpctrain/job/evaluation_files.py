"""Makes the files of a run from which its evaluation jobs are submitted.

Belongs here: the profile in each job's partition, scripts, settings. Does not belong here: the
script itself (`hpctrain.job.render.evaluation_script`), submitting (`hpctrain.supervise`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.render.evaluation_script import evaluation_problems, evaluation_script
from hpctrain.job.render.job_environment import submit_variables
from hpctrain.job.render.script import build_script
from hpctrain.records.evaluations import EvaluationJob, EvaluationSettings
from hpctrain.records.layout import RunLayout
from hpctrain.spec.loader import load_named_profile, partition_profile
from hpctrain.spec.profile import ClusterProfile

if TYPE_CHECKING:
    from hpctrain.job.prepare import Prepared


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
    )
    return [*files, (layout.evaluation_config, settings.model_dump_json(indent=1) + "\n")]
