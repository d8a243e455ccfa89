"""The words that start a container around each rank, for every launcher, as bash reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError
from specimen_scripts import (
    PROFILE,
    SPEC,
    make_run_directory,
    profile_with,
    render,
    shell_texts,
    spec_with,
)
from stand_ins import python_program

from hpctrain.job.render.containers import container_problems, run_container
from hpctrain.spec.profile.software import ContainerProfile

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
    return arguments_of(directory, script, **variables)


def arguments_of(directory: Path, script: str, **variables: str) -> list[str]:
    make_run_directory(directory)
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
    from hpctrain.job.render.containers import container_words

    site = type(PROFILE).model_validate(values)
    words = container_words(site.software.container, site, ()).command
    end = words.index("--bind")
    assert words[:2] == ("bash", "container.sh")
    assert list(words[2:end]) == ["singularity", "exec", *expected]
    assert words[-1] == "$HOME/pt.sif"


# Starts its command with what apptainer 1.4.5 gives it (tests/slurm/test_apptainer.py has the real
# one): the image's NCCL_DEBUG wins over the job's, a shell evaluates what has the prefix.
APPTAINER = """\
import os, subprocess, sys
passed = {k.removeprefix("APPTAINERENV_"): v for k, v in os.environ.items()
          if k.startswith("APPTAINERENV_")}
if "APPTAINER_NO_EVAL" not in os.environ:
    passed = {k: subprocess.getoutput(f'printf %s "{v}"') for k, v in passed.items()}
own = {} if "--cleanenv" in sys.argv else dict(os.environ)
own.pop("LD_LIBRARY_PATH", None)
own |= {"NCCL_DEBUG": "of the image", **passed, "PATH": os.environ["PATH"]}
os.execvpe(sys.argv[-1], [sys.argv[-1]], own)
"""
OUTSIDE = {"SLURM_PROCID": "3", "SLURMD_NODENAME": "n3", "MASTER_ADDR": "it's $(x)",
           "STRANGER": "1", "HPCTRAIN_EPOCH": "2", "NCCL_DEBUG": "WARN",
           "LD_LIBRARY_PATH": "/plugin"}  # fmt: skip


def seen_inside(directory: Path, *options: str) -> dict[str, str]:
    """Return the variables that the ranks of a spec with two variables have in a container."""
    python_program(directory / "bin/apptainer", APPTAINER)
    python_program(directory / "bin/show", "import json, os; print(json.dumps(dict(os.environ)))")
    container = {"launcher": "apptainer", "image": "pt.sif", "options": options}
    site = profile_with(software={"container": container})
    spec = spec_with(environment={"variables": {"NCCL_DEBUG": "x", "LD_LIBRARY_PATH": "x"}})
    python = str(python_program(directory / "bin/python", STUB))
    words = arguments_of(directory, render(spec, site, python=python))
    command = [*words[words.index("bash") : words.index("pt.sif")], "show"]
    outside = {**OUTSIDE, "PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}
    (directory / "container.sh").write_text(shell_texts(spec, site)["container.sh"])
    done = subprocess.run(command, cwd=directory, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_a_clean_environment_still_has_what_ranks_need(tmp_path: Path) -> None:
    seen = seen_inside(tmp_path, "--cleanenv")
    assert {name: seen.get(name) for name in OUTSIDE} == {**OUTSIDE, "STRANGER": None}


def test_the_variables_of_the_run_win_over_those_of_the_image(tmp_path: Path) -> None:
    seen = seen_inside(tmp_path)
    assert {name: seen.get(name) for name in OUTSIDE} == OUTSIDE


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"launcher": "pyxis", "options": ["--container-image=x"]}, "use `image`"),
        ({"launcher": "pyxis", "options": ["--nv"]}, "use `gpu: nv`"),
        ({"launcher": "apptainer", "options": ["--env=A=b"]}, "all users of a node can read"),
        ({"launcher": "apptainer", "options": ["--containall"]}, "share memory"),
        ({"launcher": "apptainer", "options": ["--contain"]}, "use `--no-mount=home,tmp`"),
        ({"launcher": "apptainer", "options": ["--compat"]}, "use `--cleanenv` and `--no-mount"),
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
    container = run_container(spec.container, site.software.container)
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
    line = script[script.index("hpctrain.data.making.container_image") :].split("exec ")[0]
    assert "'docker://nvcr.io#nvidia/pytorch:25.04-py3'" in line
    assert f'"{image}"' in line
    other = {**container, "image": "nvcr.io#nvidia/pytorch+25.04-py3"}
    assert image not in render(profile=profile_with(software={"container": other}))
