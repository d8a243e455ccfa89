"""Checks one file, a run spec or a cluster profile."""

from __future__ import annotations

from pathlib import Path


def validate_file(path: Path, kind: str | None = None) -> str:
    """Load a run spec or a profile; returns its kind.

    Without `kind` a document with a top-level `model` or `budget` counts as a spec, one with
    `nodes`, `gpu` or `extends` as a profile. Raises InvalidInputError with every problem.
    """
    from hpctrain.actions.profiles import profile_search_path
    from hpctrain.errors import InvalidInputError, Problem
    from hpctrain.render.continuation import continuation_problems
    from hpctrain.spec.loader import load_profile, load_run_spec, read_text

    if kind is None:
        # The unindented keys suffice; the loader reports all problems.
        lines = read_text(path).splitlines()
        keys = {line.partition(":")[0] for line in lines if line and line[0].isalpha()}
        kind = "profile" if keys & {"nodes", "gpu", "nvlink", "slurm", "extends"} else "spec"
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
        return "cluster profile"
    load_run_spec(path)
    return "run spec"
