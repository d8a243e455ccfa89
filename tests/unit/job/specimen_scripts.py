"""Scripts of the tiny example on the sandbox's profile, with some values replaced."""

from __future__ import annotations

import shlex
from pathlib import Path

from planned_job import planned_job

from hpctrain.job.render.script import ScriptFacts, build_script, render_script
from hpctrain.spec.catalogue import GpuVariable
from hpctrain.spec.loader import find_profile, load_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec

ROOT = Path(__file__).resolve().parents[3]
SPEC = load_run_spec(ROOT / "examples/gpt-tiny.yaml").document
PROFILE = load_profile(find_profile("sandbox")).document
PYTHON = "/opt/hpctrain/bin/python3"


def make_run_directory(directory: Path) -> None:
    """What a script that is run here finds of its run: an archive of code, with nothing in it."""
    kept = directory / "software"
    kept.mkdir(exist_ok=True)
    (kept / "kept.zip").touch()
    (kept / "current").unlink(missing_ok=True)
    (kept / "current").symlink_to("kept.zip")


def with_values(
    section: dict[str, dict[str, object]], document: RunSpec | ClusterProfile
) -> RunSpec | ClusterProfile:
    """A copy with some values of some sections replaced, checked like a file."""
    values = document.model_dump(mode="json", by_alias=True)
    for name, changes in section.items():
        values[name] = {**(values[name] or {}), **changes}
    return type(document).model_validate(values)


def spec_with(**section: dict[str, object]) -> RunSpec:
    changed = with_values(section, SPEC)
    assert isinstance(changed, RunSpec)
    return changed


def profile_with(**section: dict[str, object]) -> ClusterProfile:
    changed = with_values(section, PROFILE)
    assert isinstance(changed, ClusterProfile)
    return changed


def shell_texts(spec: RunSpec = SPEC, profile: ClusterProfile = PROFILE) -> dict[str, str]:
    """The shell files of the run directory, by name."""
    facts = ScriptFacts("gpt-tiny-0000", "hpctrain:gpt-tiny-0000", "a" * 64, "b" * 64, PYTHON)
    files = build_script(planned_job(spec, profile), facts).shell_files
    return {file.name: file.text for file in files}


def render(
    spec: RunSpec = SPEC,
    profile: ClusterProfile = PROFILE,
    *,
    python: str = PYTHON,
    gpu_variables: tuple[GpuVariable, ...] = (),
) -> str:
    digests = ("a" * 64, "b" * 64)
    facts = ScriptFacts("gpt-tiny-0000", "hpctrain:gpt-tiny-0000", *digests, python, gpu_variables)
    return render_script(build_script(planned_job(spec, profile), facts))


def directives(script: str) -> list[str]:
    """The options of the #SBATCH lines, without quotes."""
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH ")]
    return [shlex.split(line)[1] for line in lines]
