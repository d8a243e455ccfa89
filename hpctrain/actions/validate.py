"""Checking one file, whatever it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.spec.loader import Loaded
    from hpctrain.spec.profile import ClusterProfile


def validate_file(path: Path, kind: str | None = None) -> str:
    """Load a run spec or a profile; returns which of them it is.

    Without `kind` a document with a top-level `model` or `budget` counts as a spec, one with
    `nodes` or `gpu` as a profile. Raises InvalidInputError with every problem.
    """
    from hpctrain.spec.loader import load_profile, load_run_spec

    if (kind or _guess(path)) == "profile":
        _refuse_contradictions(load_profile(path))
        return "cluster profile"
    load_run_spec(path)
    return "run spec"


def _refuse_contradictions(profile: Loaded[ClusterProfile]) -> None:
    """What each value allows and all together do not. Raises InvalidInputError."""
    from hpctrain.errors import InvalidInputError, Problem
    from hpctrain.render.continuation import continuation_problems

    site = profile.document
    problems = [
        Problem(words, profile.file)
        for partition in site.slurm.partitions
        for words in continuation_problems(site, partition)
    ]
    if problems:
        raise InvalidInputError(problems)


def _guess(path: Path) -> str:
    """Look at the unindented keys only; the loader says what is wrong with the rest."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "spec"
    keys = {line.partition(":")[0] for line in lines if line and line[0].isalpha()}
    return "profile" if keys & {"nodes", "gpu", "nvlink", "slurm"} else "spec"
