"""Checks one file: the spec of a run or a service, or a cluster profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.spec.loader import Loaded
    from hpctrain.spec.reference import Kind
    from hpctrain.spec.run import RunSpec
    from hpctrain.spec.service import ServiceSpec


def validate_file(path: Path, kind: Kind | None = None) -> str:
    """Load a spec or a profile; returns what it is called.

    Without `kind` a document with one of the sections that only profiles have counts as a profile,
    one with a top-level `kind` as the spec of a service, any other one as that of a run. Raises
    InvalidInputError with every problem.
    """
    from hpctrain.base.errors import InvalidInputError, Problem
    from hpctrain.job.render.job_options import continuation_problems
    from hpctrain.spec.loader import (
        load_profile,
        load_run_spec,
        load_service_spec,
        profile_search_path,
    )
    from hpctrain.spec.reference import TITLES

    if kind is None:
        kind = kind_of_file(path)
    if kind == "profile":
        profile = load_profile(path, profile_search_path())
        site = profile.document
        problems = [
            Problem(message, profile.file)
            for partition in site.slurm.partitions
            for message in continuation_problems(site, partition)
        ]
        if problems:
            raise InvalidInputError(problems)
    elif kind == "service":
        load_service_spec(path)
    else:
        load_run_spec(path)
    return TITLES[kind]


def load_spec(path: Path) -> Loaded[RunSpec] | Loaded[ServiceSpec]:
    """Load the spec of a run or of a service, whichever it is. Raises InvalidInputError."""
    from hpctrain.spec.loader import load_run_spec, load_service_spec

    return load_service_spec(path) if kind_of_file(path) == "service" else load_run_spec(path)


def kind_of_file(path: Path) -> Kind:
    """Tell what a file describes by its unindented keys; the loader reports all problems.

    Raises InvalidInputError for a file that cannot be read.
    """
    from hpctrain.spec.loader import read_text

    lines = read_text(path).splitlines()
    keys = {line.partition(":")[0] for line in lines if line and line[0].isalpha()}
    if keys & {"nodes", "gpu", "nvlink", "slurm", "extends"}:
        return "profile"
    return "service" if "kind" in keys else "spec"
