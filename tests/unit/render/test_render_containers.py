"""The words that start a container around each rank, for every launcher, as bash reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError
from specimen_scripts import PROFILE, SPEC, profile_with, render, spec_with
from stand_ins import python_program

from hpctrain.render.containers import container_problems, run_container
from hpctrain.spec.profile.container import ContainerProfile

# README of NVIDIA/pyxis 0.20 (usage), CSCS documentation of the Container Engine and of uenv.
SRUN_OPTIONS = {
    "pyxis": re.compile(
        r"--container-(image|mounts|workdir|name|env)=.+|--(no-)?container-(mount-home|remap-root|"
        r"entrypoint)|--container-(writable|readonly|entrypoint-log)"
    ),
    "edf": re.compile(r"--environment=.+"),
    "uenv": re.compile(r"--(uenv|view|repo)=.+"),
}
STUB = "import json, sys; json.dump(sys.argv[1:], open('argv.json', 'w'))"


def arguments(directory: Path, container: dict[str, object], **variables: str) -> list[str]:
    """Return what the supervisor gets behind `--` from the script, as bash expands it."""
    python = str(python_program(directory / "bin/python", STUB))
    script = render(profile=profile_with(software={"container": container}), python=python)
    (directory / "job.sbatch").write_text(script)
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", **variables}
    done = subprocess.run(
        ["bash", "job.sbatch"], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words: list[str] = json.loads((directory / "argv.json").read_text())
    return words[words.index("--") + 1 :]


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (
            {
                "launcher": "pyxis",
                "image": "/images/pt.sqsh",
                "mounts": ["$SCRATCH:/data"],
                "options": ["--container-name=train", "--no-container-remap-root"],
            },
            ["--container-image=/images/pt.sqsh", "--container-mounts={here}:{here},/s 1:/data",
             "--container-workdir={here}", "--container-name=train", "--no-container-remap-root",
             "--no-container-mount-home"],
        ),
        (
            {"launcher": "pyxis", "image": "x", "options": ["--container-mount-home"]},
            ["--container-image=x", "--container-mount-home"],
        ),
        ({"launcher": "edf", "image": "$SCRATCH/pt.toml"}, ["--environment=/s 1/pt.toml"]),
        (
            {"launcher": "uenv", "image": "prgenv-gnu/24.11:v1", "options": ["--view=default"]},
            ["--uenv=prgenv-gnu/24.11:v1", "--view=default"],
        ),
    ],
)  # fmt: skip
def test_options_of_srun(tmp_path: Path, container: dict[str, object], expected: list[str]) -> None:
    words = arguments(tmp_path, container, SCRATCH="/s 1")
    assert {word.format(here=tmp_path) for word in expected} <= set(words)
    output = next(n for n, word in enumerate(words) if word.startswith("--output="))
    end = words.index("env") if "env" in words else words.index("python3")
    launcher = str(container["launcher"])
    assert all(SRUN_OPTIONS[launcher].fullmatch(word) for word in words[output + 1 : end])
    if launcher == "pyxis":
        assert ("--no-container-mount-home" in words) != ("--container-mount-home" in words)
    if launcher == "edf":
        assert words[end:][:2] == ["env", f"--chdir={tmp_path}"]


@pytest.mark.parametrize(
    ("gpu_type", "fields", "expected"),
    [
        ("h100", {}, ["--nv"]),
        ("mi250x", {}, ["--rocm"]),
        ("mi250x", {"gpu": "none"}, []),
        ("h100", {"options": ["--no-home", "--overlay=/s/$USER/$$x.img"]},
         ["--nv", "--no-home", "--overlay=/s/$USER/$$x.img"]),
    ],
)  # fmt: skip
def test_singularity_and_apptainer(
    tmp_path: Path, gpu_type: str, fields: dict[str, object], expected: list[str]
) -> None:
    container = {"launcher": "singularity", "image": "$HOME/pt.sif", **fields}
    values = PROFILE.model_dump(mode="json", by_alias=True)
    values["gpu"] |= {"type": gpu_type, "emulated": False, "peak": {}}
    values["software"] = {"container": container}
    from hpctrain.render.containers import container_words

    site = type(PROFILE).model_validate(values)
    words = container_words(site.software.container, site, ()).command
    end = words.index("--bind")
    assert list(words[:end]) == ["singularity", "exec", *expected]
    assert words[-1] == "$HOME/pt.sif"


def test_a_clean_environment_still_has_what_ranks_need(tmp_path: Path) -> None:
    """The stand-in starts its command with the prefixed variables only, as --cleanenv does."""
    stand_in = (
        "import os, sys; own = {k.removeprefix('APPTAINERENV_'): v for k, v in os.environ.items()"
        " if k.startswith('APPTAINERENV_')}; own['PATH'] = os.environ['PATH'];"
        "os.execvpe(sys.argv[-1], [sys.argv[-1]], own)"
    )
    python_program(tmp_path / "bin/apptainer", stand_in)
    python_program(tmp_path / "bin/show", "import json, os; print(json.dumps(dict(os.environ)))")
    container = {"launcher": "apptainer", "image": "pt.sif", "options": ["--cleanenv"]}
    words = arguments(tmp_path, container)
    start = words.index("bash")
    command = [*words[start : words.index("pt.sif")], "show"]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    outside = {"PATH": path, "SLURM_PROCID": "3", "MASTER_ADDR": "it's $(x)", "STRANGER": "1",
               "HPCTRAIN_EPOCH": "2"}  # fmt: skip
    done = subprocess.run(command, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {name: seen.get(name) for name in ("SLURM_PROCID", "MASTER_ADDR", "HPCTRAIN_EPOCH")} == {
        name: outside[name] for name in ("SLURM_PROCID", "MASTER_ADDR", "HPCTRAIN_EPOCH")
    }
    assert "STRANGER" not in seen


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"launcher": "pyxis", "options": ["--container-image=x"]}, "use `image`"),
        ({"launcher": "pyxis", "options": ["--nv"]}, "use `gpu: nv`"),
        ({"launcher": "apptainer", "options": ["--env=A=b"]}, "all users of a node can read"),
        ({"launcher": "apptainer", "options": ["--containall"]}, "share memory"),
        ({"launcher": "apptainer", "options": ["--tty"]}, "apptainer takes no option `--tty`"),
        ({"launcher": "apptainer", "options": ["no-home"]}, "is no option"),
        ({"launcher": "pyxis", "gpu": "nv"}, "`gpu` is for apptainer"),
        ({"launcher": "edf", "mounts": ["/a:/a"]}, "stand in the environment definition"),
        ({"launcher": "apptainer", "cache": "/x"}, "`cache` is for images that enroot imports"),
        ({"launcher": "pyxis", "image": "$(id)"}, "only variables are expanded"),
    ],
)
def test_what_a_launcher_does_not_take_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        ContainerProfile.model_validate({"image": "x", **fields})


def test_a_spec_has_its_own_image_and_more_mounts() -> None:
    site = profile_with(
        software={"container": {"launcher": "pyxis", "image": "a", "mounts": ["/s:/s"]}}
    )
    spec = spec_with(container={"image": "b", "mounts": ["/d:/d"]})
    container = run_container(spec, site)
    assert container is not None
    assert (container.image, container.mounts) == ("b", ("/s:/s", "/d:/d"))
    assert "--container-image=b" in render(spec, site)
    assert container_problems(SPEC, PROFILE) == []
    assert "no `software.container`" in container_problems(spec, PROFILE)[0][1]


def test_an_image_of_a_registry_is_imported_once_into_the_cache(tmp_path: Path) -> None:
    container: dict[str, object] = {
        "launcher": "pyxis",
        "image": "nvcr.io#nvidia/pytorch:25.04-py3",
        "cache": "$SCRATCH/images",
    }
    script = render(profile=profile_with(software={"container": container}))
    (image,) = re.findall(r'--container-image=([^"]*sqsh)"', script)
    line = script[script.index("hpctrain.prepare.container_image") :].split("exec ")[0]
    assert "'docker://nvcr.io#nvidia/pytorch:25.04-py3'" in line
    assert f'"{image}"' in line
    other = {**container, "image": "nvcr.io#nvidia/pytorch+25.04-py3"}
    assert image not in render(profile=profile_with(software={"container": other}))
