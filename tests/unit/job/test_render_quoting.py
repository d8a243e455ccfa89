"""Hostile values in a job script: bash must see exactly what the user wrote, and run none of it.

The scripts are really run, with an interpreter that writes down its argv and environment.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from specimen_scripts import PROFILE, SPEC, make_run_directory, profile_with, render, spec_with
from stand_ins import python_program

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.render.environment import FIXED_VARIABLES, OWN_VARIABLES
from hpctrain.job.render.quoting import directive_value, sh
from hpctrain.spec.profile import ClusterProfile

ONE_LINE = (
    *("", "two words", "it's", 'say "hi"', "$(touch pwned)", "`touch pwned`", "a;touch pwned"),
    *(
        "# no comment",
        "a#b",
        "100%",
        "%j",
        "gr\u00fcn \u2260 \u9ed2",
        "-rf",
        "--",
        "a\\b",
        "\\",
        "\\n",
    ),
    *("'; touch pwned; '", '"; touch pwned; "', "$HOME", "${HOME}", "!x", "*", "~", "a\tb", " "),
    *(
        "&",
        "|touch pwned",
        ">pwned",
        "{a,b}",
        "[a]",
        "=",
        "\r",
        "\x1b[31m",
        "\u2028",
        "{{ 7 * 7 }}",
    ),
)
HOSTILE = (*ONE_LINE, "line\nbreak", "x\n#SBATCH --account=other\ntouch pwned", "\n")

STUB = """\
import json, os, sys
json.dump({"argv": sys.argv, "environment": dict(os.environ)}, open("seen.json", "w"))
"""
MODULE_STUB = """\
import json, sys
print(json.dumps(sys.argv[1:]), file=open("modules.jsonl", "a"))
"""


def run_script(directory: Path, script: str) -> dict[str, Any]:
    """Run it as Slurm would, and return what the interpreter has seen."""
    python_program(directory / "bin/module", MODULE_STUB)
    make_run_directory(directory)
    (directory / "job.sbatch").write_text(script)
    environment = {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "HOME": "/home-of-nobody",
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "2",
    }
    done = subprocess.run(
        ["bash", "job.sbatch"],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, f"{done.stderr}\n{script}"
    strangers = [path for path in directory.rglob("*pwned*") if path.name == "pwned"]
    assert not strangers, f"a value was run as a command\n{script}"
    seen: dict[str, Any] = json.loads((directory / "seen.json").read_text())
    return seen


def stub(directory: Path) -> str:
    return str(python_program(directory / "bin/stub-python", STUB))


def fabric(values: tuple[str, ...], reasons: tuple[str, ...]) -> ClusterProfile:
    variables = [
        {"name": f"SITE_{n}", "value": value.replace("$", "$$"), "reason": reason}
        for n, (value, reason) in enumerate(zip(values, reasons, strict=True))
    ]
    return PROFILE.model_copy(
        update={
            "environment": ClusterProfile.model_validate(
                {**PROFILE.model_dump(mode="json"), "environment": variables}
            ).environment
        }
    )


def test_variables_of_the_spec_arrive_as_written(tmp_path: Path) -> None:
    values = {f"OWN_{n}": value for n, value in enumerate(HOSTILE)}
    written = {name: value.replace("$", "$$") for name, value in values.items()}
    spec = spec_with(environment={"variables": written})
    seen = run_script(tmp_path, render(spec, python=stub(tmp_path)))["environment"]
    assert {name: seen.get(name) for name in values} == values


def test_variables_and_reasons_of_the_site_arrive_as_written(tmp_path: Path) -> None:
    reasons = tuple(f"because {value} of it" for value in HOSTILE)
    script = render(profile=fabric(HOSTILE, reasons), python=stub(tmp_path))
    seen = run_script(tmp_path, script)["environment"]
    assert tuple(seen.get(f"SITE_{n}") for n in range(len(HOSTILE))) == HOSTILE
    comments = [line for line in script.splitlines() if line.startswith("# because")]
    assert len(comments) == len(HOSTILE), "a reason must stay on its one line"


def test_nothing_invisible_hides_in_a_comment() -> None:
    """An escape sequence could show an admin another script than bash runs."""
    script = render(profile=fabric(("1",), ("red \x1b[31m and \x07 bell",)))
    assert "\x1b" not in script and "\x07" not in script


@pytest.mark.parametrize("name", ["it's (new)", "$(touch pwned)", "a;b #c", "gr\u00fcn \u2260"])
def test_path_of_the_interpreter(tmp_path: Path, name: str) -> None:
    python = python_program(tmp_path / name / "python 3", STUB)
    profile = profile_with(software={"python": str(python).replace("$", "$$")})
    seen = run_script(tmp_path, render(profile=profile))
    assert seen["argv"][0] == str(python)
    assert seen["argv"][-4:] == [str(python), "-m", "hpctrain.train", "train.json"]


def test_the_whole_command_line(tmp_path: Path) -> None:
    python = stub(tmp_path)
    argv = run_script(tmp_path, render(python=python))["argv"]
    own, _, srun = " ".join(argv[1:]).partition(" -- ")
    assert own == "-m hpctrain.supervise --run-directory ."
    assert srun.startswith("srun --nodes=2 --ntasks=4 --ntasks-per-node=2 ")
    assert "--output=logs/7.2/step%s-rank%4t.log" in srun
    assert srun.endswith(f" {python} -m hpctrain.train train.json")
    assert (tmp_path / "logs/7.2").is_dir()


def test_modules(tmp_path: Path) -> None:
    names = [value for value in HOSTILE if value]
    init = tmp_path / "it's $(touch pwned).sh"
    init.write_text("export INIT_WAS_READ=yes\n")
    modules = {"init": str(init), "purge": "force", "load": names}
    profile = profile_with(software={"modules": escaped(modules)})
    seen = run_script(tmp_path, render(profile=profile, python=stub(tmp_path)))
    calls = [json.loads(line) for line in (tmp_path / "modules.jsonl").read_text().splitlines()]
    assert calls == [["--force", "purge"], *(["load", name] for name in names), ["list"]]
    assert seen["environment"]["INIT_WAS_READ"] == "yes"


def escaped(texts: dict[str, Any]) -> dict[str, Any]:
    """The same texts for fields in which `$NAME` is put in by the job."""
    values: dict[str, Any] = json.loads(json.dumps(texts).replace("$", "$$"))
    return values


def test_container_of_pyxis(tmp_path: Path) -> None:
    image = "registry.example/it's#$(touch pwned):1 2"
    mounts = ["/data $(touch pwned):/d", "/it's:/x", "`touch pwned`:/y;z"]
    texts = {"image": image, "mounts": mounts}
    container = {**escaped(texts), "launcher": "pyxis", "python": "py $$(id)"}
    profile = profile_with(software={"container": container})
    spec = spec_with(environment={"variables": {"OWN": "1"}, "inherit": ["WANDB_API_KEY"]})
    argv = run_script(tmp_path, render(spec, profile, python=stub(tmp_path)))["argv"]
    assert f"--container-image={image}" in argv
    here = f"{tmp_path}:{tmp_path}"
    assert f"--container-mounts={','.join((here, *mounts))}" in argv
    assert argv[-4:] == ["py $(id)", "-m", "hpctrain.train", "train.json"]
    (names,) = [word for word in argv if word.startswith("--container-env=")]
    assert {"OWN", "WANDB_API_KEY", "MASTER_ADDR"} <= set(names.partition("=")[2].split(","))


def test_container_of_apptainer(tmp_path: Path) -> None:
    mounts = ["/data $(touch pwned):/d", "`touch pwned`"]
    texts = {"image": "/it's a $(x).sif", "mounts": mounts}
    container = {**escaped(texts), "launcher": "apptainer", "gpu": "nv"}
    profile = profile_with(software={"container": container})
    argv = run_script(tmp_path, render(profile=profile, python=stub(tmp_path)))["argv"]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    command = ["python3", "-m", "hpctrain.train", "train.json"]
    here = ["--bind", str(tmp_path), "--pwd", str(tmp_path)]
    expected = ["apptainer", "exec", "--nv", *here, *binds, "/it's a $(x).sif", *command]
    assert argv[-len(expected) :] == expected


DIRECTIVES = {
    "account": lambda value: (spec_with(resources={"account": value}), PROFILE),
    "qos": lambda value: (spec_with(resources={"qos": value}), PROFILE),
    "reservation": lambda value: (spec_with(resources={"reservation": value}), PROFILE),
    "constraint": lambda value: (SPEC, profile_with(slurm={"constraint": value})),
    "partition": lambda value: (
        SPEC,
        profile_with(slurm={"partitions": [{"name": value, "default": True}]}),
    ),
    "gres": lambda value: (
        SPEC,
        profile_with(gpu={"type": value}, slurm={"gpu_request": "gres-typed"}),
    ),
}


@pytest.mark.parametrize("option", DIRECTIVES)
@pytest.mark.parametrize("value", [value for value in ONE_LINE if value and value != "\r"])
def test_no_value_breaks_out_of_its_directive(option: str, value: str) -> None:
    """sbatch's rules for quotes, backslashes and # are those of a POSIX shell inside quotes;
    tests/slurm asks the real sbatch.
    """
    script = render(*DIRECTIVES[option](value))
    directives = [line for line in script.split("\n") if line.startswith("#SBATCH")]
    (mine,) = [line for line in directives if line.startswith(f"#SBATCH --{option}=")]
    expected = f"gpu:{value}:2" if option == "gres" else value
    assert shlex.split(mine.removeprefix("#SBATCH"), comments=True) == [f"--{option}={expected}"]
    plain = render(*DIRECTIVES[option]("plain"))
    assert len(directives) == plain.count("#SBATCH --"), "a value has made a line of its own"


@pytest.mark.parametrize("option", DIRECTIVES)
@pytest.mark.parametrize("value", ["a\nb", "a\n#SBATCH --account=x", "a\rb", "a\0b"])
def test_line_breaks_in_directives_are_refused(option: str, value: str) -> None:
    with pytest.raises(InvalidInputError, match="line break") as caught:
        render(*DIRECTIVES[option](value))
    assert caught.value.exit_code == 3


def test_nul_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="NUL"):
        render(spec_with(environment={"variables": {"OWN": "a\0b"}}))
    with pytest.raises(InvalidInputError, match="NUL"):
        sh("\0")
    with pytest.raises(InvalidInputError, match="account"):
        directive_value("account", "a\0b")


@pytest.mark.parametrize("name", ["UID", "BASHOPTS", "ALL", "none", "SLURM_JOB_ID", "HPCTRAIN_X"])
def test_names_that_bash_or_slurm_keep_for_themselves(name: str) -> None:
    for environment in ({"variables": {name: "1"}}, {"inherit": [name]}):
        with pytest.raises(InvalidInputError, match=f"`{name}` cannot be set"):
            render(spec_with(environment=environment))
    with pytest.raises(InvalidInputError, match=f"`{name}` cannot be set"):
        values = {"name": name, "value": "1", "reason": "no reason"}
        document = {**PROFILE.model_dump(mode="json"), "environment": [values]}
        render(profile=ClusterProfile.model_validate(document))


def test_an_interpreter_that_reads_as_an_option() -> None:
    with pytest.raises(InvalidInputError, match="reads as an option"):
        render(python="-c")


# Names of variables in the rooms of jobs and ranks that a document may set all the same, and why.
FREE = {
    "a document's value counts": (
        *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "GLOO_SOCKET_IFNAME", "NCCL_ALGO"),
        *("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"),
        *("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED"),
        *("TORCH_EXTENSIONS_DIR", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
    ),
    "it is behind what hpctrain adds": ("PATH", "PYTHONPATH"),
    "for a moment, or in a process of its own": (
        *("DS_ACCELERATOR", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"),
    ),
    "where there are no GPUs": ("ACCELERATE_USE_CPU",),
    "no variables": ("GPU", "NCCL"),
}


def set_names(tree: ast.AST) -> Iterator[str]:
    """Find what may be names of variables: keys of mappings, of assignments, of updates."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from (key.value for key in node.keys if isinstance(key, ast.Constant))
        elif isinstance(node, ast.Assign):
            places = [one.slice for one in node.targets if isinstance(one, ast.Subscript)]
            yield from (one.value for one in places if isinstance(one, ast.Constant))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg
    # `_NAME = "NAME"` at the top, which stands for it
    yield from (
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    )


def test_what_hpctrain_sets_itself_is_refused() -> None:
    """The code of jobs and ranks is the list of names; one more is refused, or has its reason."""
    root = Path(__file__).parents[3]
    rooms = (root / "hpctrain" / name for name in ("train", "trainer", "supervise"))
    files = [file for room in rooms for file in room.rglob("*.py")]
    names = {str(name) for file in files for name in set_names(ast.parse(file.read_text()))}
    template = (root / "templates/job.sbatch.j2").read_text()
    names |= {*re.findall(r"^(?:export )?([A-Z_]+)=", template, re.MULTILINE)}
    found = {name for name in names if re.fullmatch("[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|[A-Z]{3,}", name)}
    found &= {name for name in found if name.split("_")[0] not in ("HPCTRAIN", "SLURM")}
    ours = {*OWN_VARIABLES, *FIXED_VARIABLES}
    assert ours <= found, "nobody sets these"
    free = {name for names in FREE.values() for name in names}
    assert found - ours == free
    for name in ours:
        with pytest.raises(InvalidInputError, match=f"`{name}` cannot be set"):
            render(spec_with(environment={"variables": {name: "7"}}))
    same = {name: value for name, (value, _) in FIXED_VARIABLES.items()}
    render(spec_with(environment={"variables": same | {"PYTHONUNBUFFERED": "x"}}))
