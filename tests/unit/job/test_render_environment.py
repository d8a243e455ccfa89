"""The environment of a job: `$NAME` in every field, the module system, and what is activated.

Scripts are run by bash, as a job would. Fields are found by their type, so that a new one is tested
too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from planned_job import planned_job
from pydantic import AfterValidator, BaseModel, ValidationError
from specimen_scripts import PROFILE, SPEC, make_run_directory, profile_with, render, spec_with
from stand_ins import python_program
from test_render_quoting import STUB, stub

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.preflight import checks_of
from hpctrain.job.prepare import prepare
from hpctrain.job.render.environment import (
    SetupFile,
    job_environment,
    submit_variables,
)
from hpctrain.job.render.script import (
    ScriptFacts,
    build_script,
    render_script,
    render_template,
)
from hpctrain.job.render.shell_files import commands_text, prologue_text
from hpctrain.slurm.process import with_only
from hpctrain.spec.job_text import ENVIRONMENT, JobText, SubmitText, expanded_text
from hpctrain.spec.loader import load_profile, load_run_spec
from hpctrain.spec.profile import ClusterProfile
from hpctrain.spec.run import RunSpec
from hpctrain.spec.service import ServiceSpec

ROOT = Path(__file__).resolve().parents[3]
SENTENCES = {
    JobText.__metadata__[0]: "the job puts in `$NAME`",
    SubmitText.__metadata__[0]: "`$NAME` is put in where you submit",
}


def expanding_fields(document: type[BaseModel], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Each field whose type puts in variables: its path, its rule and its description."""
    for name, field in document.model_fields.items():
        path = f"{above}{field.alias or name}"
        kinds: list[Any] = [field.annotation]
        marks = [mark for mark in field.metadata if isinstance(mark, AfterValidator)]
        while kinds:
            kind = kinds.pop()
            marks += getattr(kind, "__metadata__", ())
            kinds += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from expanding_fields(kind, f"{path}.")
        for mark in marks:
            if rule := next((text for known, text in SENTENCES.items() if mark is known), None):
                yield path, rule, field.description or ""


FIELDS = {
    kind.__name__: {path: (rule, words) for path, rule, words in expanding_fields(kind)}
    for kind in (ClusterProfile, RunSpec, ServiceSpec)
}


@pytest.mark.parametrize("kind", FIELDS)
def test_every_such_field_says_where_names_are_put_in(kind: str) -> None:
    assert len(FIELDS[kind]) > 10
    silent = [path for path, (rule, words) in FIELDS[kind].items() if rule not in words]
    assert not silent, f"add `{' or '.join(SENTENCES.values())}` to their descriptions: {silent}"


# -- What the job puts in ---------------------------------------------------------------------


PYXIS = {"launcher": "pyxis", "image": "/i", "python": "python3"}
REGISTRY = {**PYXIS, "image": "nvcr.io#x"}
VALUE = "$SITE_NAME/x"
REASON = {"name": "V", "reason": "of the site"}
# A profile with a name in one field; those of a spec follow.
IN_PROFILE: dict[str, dict[str, Any]] = {
    "software.python": {"software": {"python": VALUE}},
    "software.scratch": {"software": {"scratch": VALUE}},
    **{
        f"software.commands.{part}": {"software": {"commands": {part: [["cat", VALUE]]}}}
        for part in ("job", "node", "task", "node_after")
    },
    "software.commands.wrapper": {"software": {"commands": {"wrapper": [VALUE]}}},
    "software.container.image": {"software": {"container": {**PYXIS, "image": VALUE}}},
    "software.container.mounts": {"software": {"container": {**PYXIS, "mounts": [VALUE]}}},
    "software.container.python": {"software": {"container": {**PYXIS, "python": VALUE}}},
    "software.container.cache": {"software": {"container": {**REGISTRY, "cache": VALUE}}},
    "software.container.options": {
        "software": {"container": {**PYXIS, "options": [f"--container-name={VALUE}"]}}
    },
    **{
        f"software.modules.{field}": {"software": {"modules": {field: value}}}
        for field, value in {"init": VALUE, "use": [VALUE], "load": [VALUE]}.items()
    },
    **{
        f"software.activate.{kind}": {"software": {"activate": {kind: VALUE}}}
        for kind in ("conda", "mamba", "micromamba", "venv", "uv", "spack", "easybuild")
    },
    "software.activate.root": {"software": {"activate": {"conda": "ml", "root": VALUE}}},
    "slurm.options.srun.network": {"slurm": {"options": {"srun": {"network": VALUE}}}},
    "environment.value": {"environment": [{**REASON, "value": VALUE}]},
    "environment.per_local_rank": {"environment": [{**REASON, "per_local_rank": [VALUE] * 2}]},
}
IN_SPEC: dict[str, dict[str, Any]] = {
    "environment.variables": {"environment": {"variables": {"V": VALUE}}},
    "container.image": {"container": {"image": VALUE}},
    "container.mounts": {"container": {"mounts": [VALUE]}},
    "container.python": {"container": {"python": VALUE}},
}
# What the message calls it, where that is another path than the field's.
CALLED = {
    "environment.value": "environment.V",
    "environment.per_local_rank": "environment.V",
    "environment.variables": "environment.variables.V",
}


def profile_of(sections: Mapping[str, Any]) -> ClusterProfile:
    values = PROFILE.model_dump(mode="json", by_alias=True)
    for name, section in sections.items():
        values[name] = {**values[name], **section} if isinstance(section, dict) else section
    return ClusterProfile.model_validate(values)


def run(directory: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    make_run_directory(directory)
    (directory / "job.sbatch").write_text(script)
    usual = {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", "job.sbatch"],
        cwd=directory,
        env={**usual, "HOME": str(directory), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_no_field_that_the_job_puts_in_is_left_out() -> None:
    """Parts of partitions are those of the profile; the rest is put in by a service's programs."""
    in_job = {
        (kind, path)
        for kind, fields in FIELDS.items()
        for path, (rule, _) in fields.items()
        if rule == SENTENCES[JobText.__metadata__[0]] and not path.startswith("slurm.partitions.")
    }
    tested = {("ClusterProfile", path) for path in IN_PROFILE if "srun" not in path}
    tested |= {("RunSpec", path) for path in IN_SPEC}
    tested |= {("ServiceSpec", path) for path in ("environment.variables", "router.program")}
    tested |= {("ServiceSpec", path) for path in ("engine.python", "engine.arguments")}
    assert in_job == tested


@pytest.mark.parametrize("field", [*IN_PROFILE, *IN_SPEC])
def test_a_name_without_a_value_ends_the_job_with_its_field(tmp_path: Path, field: str) -> None:
    profile, spec = profile_of(IN_PROFILE.get(field, {})), SPEC
    if field in IN_SPEC and field.startswith("container"):
        profile = profile_of({"software": {"container": PYXIS}})
    if field in IN_SPEC:
        spec = spec_with(**IN_SPEC[field])
    (tmp_path / "known.sh").write_text("module() { :; }; export -f module; export MODULEPATH=/m\n")
    text = render(spec, profile, python=stub(tmp_path))
    part = field.removeprefix("software.commands.")
    if part in ("task", "wrapper") or field == "environment.per_local_rank":
        text = prologue_text(planned_job(spec, profile)) or ""
    elif part != field:
        text = (commands_text(planned_job(spec, profile)) or "").replace("case $1", f"case {part}")
    for value in ({}, {"SITE_NAME": ""}):
        ended = run(tmp_path, text, BASH_ENV=str(tmp_path / "known.sh"), **value)
        expected = f"hpctrain: {CALLED.get(field, field)}: SITE_NAME is not set in this job\n"
        assert ended.returncode == 78 and expected in ended.stdout + ended.stderr, ended
        assert not (tmp_path / "seen.json").exists(), "nothing is trained"
    with_value = run(
        tmp_path, text, BASH_ENV=str(tmp_path / "known.sh"), SITE_NAME="/s", SLURM_LOCALID="0"
    )
    assert "is not set in this job" not in with_value.stdout + with_value.stderr


def test_an_interpreter_below_a_directory_that_only_the_job_knows(tmp_path: Path) -> None:
    python_program(tmp_path / "it's $HOME/bin/python3", STUB)
    script = render(profile=profile_with(software={"python": "${WORK}/bin/python3"}))
    ended = run(tmp_path, script, WORK=str(tmp_path / "it's $HOME"))
    assert (ended.returncode, (tmp_path / "seen.json").exists()) == (0, True), ended.stderr


def test_names_that_the_script_sets_before_need_no_check() -> None:
    one = {"name": "A", "value": "/a", "reason": "of the site"}
    two = {"name": "B", "value": "$A/b", "reason": "of the site"}
    script = render(profile=profile_of({"environment": [one, two], "software": {"python": "$B/p"}}))
    assert "needs" not in script


# -- What is put in where somebody submits ----------------------------------------------------


def test_paths_that_hpctrain_opens_have_the_values_of_where_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "examples/gpt-tiny.yaml").read_text()
    own = tmp_path / "own.yaml"
    own.write_text(text)
    wanted = ("data.sources=[{path: $CORPUS/web}]", "data.cache=${CORPUS}/cache/$$1")
    monkeypatch.delenv("CORPUS", raising=False)
    with pytest.raises(InvalidInputError) as caught:
        load_run_spec(own, wanted)
    messages = [problem.message for problem in caught.value.problems]
    assert sorted(messages) == [
        "`data.cache`: CORPUS is not set here",
        "`data.sources[0].path`: CORPUS is not set here",
    ]
    assert {problem.hint for problem in caught.value.problems} == {"export it, or write its value"}
    monkeypatch.setenv("CORPUS", "/data/$HOME")
    data = load_run_spec(own, wanted).document.data
    assert (data.sources[0].path, data.cache) == ("/data/$HOME/web", "/data/$HOME/cache/$1")


def test_copies_of_documents_keep_what_was_put_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy in the run directory is read by others, in whose logins names have other values."""
    monkeypatch.setenv("CORPUS", "/data/$HOME")
    read = RunSpec.model_validate(
        {**SPEC.model_dump(mode="json", by_alias=True), "data": {"cache": "$CORPUS/$$c"}},
        context={ENVIRONMENT: os.environ},
    )
    assert read.data.cache == "/data/$HOME/$c"
    monkeypatch.delenv("CORPUS")
    copy = tmp_path / "spec.yaml"
    copy.write_text(yaml.safe_dump(read.model_dump(mode="json", by_alias=True)))
    assert load_run_spec(copy).document == read
    assert RunSpec.model_validate_json(read.model_dump_json(by_alias=True)) == read


def test_a_field_that_may_be_a_switch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CURVES", "/curves")
    spec = ROOT / "examples/gpt-tiny.yaml"
    for given, value in (("$CURVES/all", "/curves/all"), ("true", True)):
        document = load_run_spec(spec, (f"tracking.tensorboard={given}",)).document
        assert document.tracking.tensorboard == value
    with pytest.raises(InvalidInputError, match="NO_CURVES is not set here"):
        load_run_spec(spec, ("tracking.tensorboard=$NO_CURVES/all",))


def test_values_of_an_environment() -> None:
    assert expanded_text("$A/${B}$$", {"A": "a", "B": "$A"}) == "a/$A$"
    with pytest.raises(ValueError, match=r"^B is not set here"):
        expanded_text("$A/$B", {"A": "a", "B": ""})


# -- Said before the queue --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ({}, True),
        ({"slurm": {"inherit": ["OF_SITE"]}}, False),
        ({"slurm": {"inherit": ["OF_*"]}}, False),
        ({"slurm": {"export": "none"}}, False),
        ({"slurm": {"export": "all"}}, False),
        ({"software": {"login_shell": True}}, False),
        ({"software": {"modules": {"load": ["x"]}}}, False),
        ({"software": {"activate": {"venv": "/v"}}}, False),
        ({"environment": [{"name": "OF_SITE", "value": "1", "reason": "of it"}]}, False),
    ],
)
def test_a_name_that_nothing_gives_to_the_job_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], warned: bool
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("OF_SITE", raising=False)
    values: dict[str, Any] = {"extends": "sandbox", "name": "own", **more}
    values["software"] = {"python": "$OF_SITE/bin/python3", **values.get("software", {})}
    profile = tmp_path / "own.yaml"
    profile.write_text(yaml.safe_dump(values))
    spec = ROOT / "examples/gpt-tiny.yaml"
    prepared = prepare(spec, str(profile), runs=tmp_path)
    found = [text for text in prepared.plan.warnings if "OF_SITE" in text]
    assert [text.partition(":")[0] for text in found] == (["`software.python`"] if warned else [])
    assert all("`slurm.inherit: [OF_SITE]`" in text for text in found)
    failed = [check for check in checks_of(prepared, tmp_path) if check.subject == "environment"]
    inherited = "inherit" in more.get("slurm", {})
    assert bool(failed) == inherited, "what jobs inherit has to be set here"
    for check in failed:
        assert check.problems[0].line is not None
        assert "`software.python`: jobs inherit OF_SITE from here" in check.sentence


# -- What a job inherits ----------------------------------------------------------------------


def test_patterns_name_what_a_job_inherits_and_show_no_value() -> None:
    profile = profile_with(slurm={"inherit": ["*_proxy"]})
    spec = spec_with(environment={"inherit": ["KRB5*", "SSH_AUTH_SOCK"]})
    login = dict.fromkeys(("https_proxy", "KRB5CCNAME", "AWS_TOKEN"), "hidden")
    login |= dict.fromkeys(("no_proxy", "SSH_AUTH_SOCK", "PATH", "SLURM_X_proxy"), "/a")
    names = submit_variables(planned_job(spec, profile))
    kept = with_only(login, names)
    assert set(kept) == {"https_proxy", "no_proxy", "KRB5CCNAME", "SSH_AUTH_SOCK", "PATH"}
    assert with_only({**kept, "NCCL_DEBUG": "1"}, names) == kept, "successors get the same"
    script = render(spec, profile)
    assert "HOME, LANG, PATH, USER, *_proxy, KRB5*, SSH_AUTH_SOCK." in script.replace("\n#", "")
    assert "hidden" not in script


@pytest.mark.parametrize("pattern", ["*", "??", "A B", "$A", "1x", ""])
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ValidationError):
        profile_with(slurm={"inherit": [pattern]})


def test_containers_get_what_patterns_match(tmp_path: Path) -> None:
    spec = spec_with(environment={"inherit": ["*_proxy", "SSH_AUTH_SOCK"]})
    pyxis = render(spec, profile_of({"software": {"container": PYXIS}}))
    (names,) = [line for line in pyxis.splitlines() if "--container-env=" in line]
    assert "SSH_AUTH_SOCK," in names and "*" not in names, "pyxis takes names only"
    apptainer = {"launcher": "apptainer", "image": "/i.sif"}
    job = planned_job(spec, profile_of({"software": {"container": apptainer}}))
    facts = ScriptFacts("r-0", "hpctrain:r-0", "a" * 64, "b" * 64, "python3")
    (shell,) = [one for one in build_script(job, facts).shell_files if one.name == "container.sh"]
    assert " | *_proxy | " in shell.text


# -- The module system ------------------------------------------------------------------------


def module_init(file: Path, name: str, modulepath: str = "/modules") -> Path:
    """Write the init file of a module system that notes its calls."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        f'module() {{ echo "{name} $*" >> "$HOME/modules.log"; }}\n'
        f'export MODULEPATH="{modulepath}"\n[ -n "$NOT_SET_AT_ALL" ] && echo "no failure"\n'
    )
    return file


def test_a_job_finds_the_module_system_that_a_login_names(tmp_path: Path) -> None:
    script = render(profile=profile_with(software={"modules": {"load": ["cuda"]}}), python="true")
    assert "HOME, LANG, PATH, USER, MODULESHOME, LMOD_PKG." in script.replace("\n#", "")
    module_init(tmp_path / "lmod/init/bash", "lmod")
    module_init(tmp_path / "tcl/init/bash", "tcl")
    lmod, tcl = {"LMOD_PKG": str(tmp_path / "lmod")}, {"MODULESHOME": str(tmp_path / "tcl")}
    for environment, expected in ((lmod, "lmod"), ({**lmod, **tcl}, "tcl")):
        ended = run(tmp_path, script, **environment)
        assert ended.returncode == 0, ended.stderr
        log = tmp_path / "modules.log"
        assert log.read_text() == f"{expected} load cuda\n{expected} list\n"
        log.unlink()


def test_a_system_that_knows_no_modules_is_not_the_last_one(tmp_path: Path) -> None:
    """As Lmod's own init/bash, where another file of the site sets MODULEPATH."""
    module_init(tmp_path / "tcl/init/bash", "bare", modulepath="")
    module_init(tmp_path / "lmod/init/bash", "whole")
    script = render(profile=profile_with(software={"modules": {"load": ["cuda"]}}), python="true")
    places = {"MODULESHOME": str(tmp_path / "tcl"), "LMOD_PKG": str(tmp_path / "lmod")}
    assert run(tmp_path, script, **places).returncode == 0
    assert (tmp_path / "modules.log").read_text().startswith("whole load")


def test_a_named_init_file_is_read_and_has_to_be_there(tmp_path: Path) -> None:
    init = module_init(tmp_path / "site.sh", "site")
    modules = {"init": "$HOME/site.sh", "purge": "force", "use": ["/m"], "load": ["$STACK"]}
    script = render(profile=profile_with(software={"modules": modules}), python="true")
    other = {"MODULESHOME": "/never", "STACK": "a b"}
    assert run(tmp_path, script, **other).returncode == 0
    calls = (tmp_path / "modules.log").read_text().splitlines()
    assert calls == ["site --force purge", "site use /m", "site load a b", "site list"]
    init.unlink()
    ended = run(tmp_path, script, **other)
    assert ended.returncode == 78 and "site.sh` failed on " in ended.stderr


def test_no_module_system_ends_the_job_with_the_field_to_set(tmp_path: Path) -> None:
    script = render(profile=profile_with(software={"modules": {"load": ["x"]}}), python="true")
    ended = run(tmp_path, script)
    if ended.returncode == 0 or "failed on" in ended.stderr:
        pytest.skip("this machine has a module system where they usually are")
    assert ended.returncode == 78
    assert "hpctrain: software.modules: no module system was found on" in ended.stderr
    assert "software.modules.init" in ended.stderr


def test_purge_as_the_site_wants_it() -> None:
    found = {
        purge: "module purge" in script or ("module --force purge" in script and "force")
        for purge in (True, "force", False)
        for script in (render(profile=profile_with(software={"modules": {"purge": purge}})),)
    }
    assert found == {True: True, "force": "force", False: False}


def test_a_login_shell_says_so(tmp_path: Path) -> None:
    script = render(profile=profile_with(software={"login_shell": True}), python=stub(tmp_path))
    assert script.startswith("#!/bin/bash -l\n")
    assert "its login shell (-l)" in script.replace("\n# ", " ")
    (tmp_path / ".bash_profile").write_text("export OF_LOGIN=yes\n")
    make_run_directory(tmp_path)
    (tmp_path / "job.sbatch").write_text(script)
    (tmp_path / "job.sbatch").chmod(0o700)
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    subprocess.run([tmp_path / "job.sbatch"], cwd=tmp_path, env=environment, check=True)
    assert '"OF_LOGIN": "yes"' in (tmp_path / "seen.json").read_text()
    assert render().startswith("#!/bin/bash\n")


# -- Environments that are activated ----------------------------------------------------------


# What each tool has where it is installed; `activated` notes the name and puts its python first.
NOTE = 'activated() { export ACTIVE="$*"; PATH="$HOME/env/bin:$PATH"; }\n'
TOOLS = {
    "conda": {
        "etc/profile.d/conda.sh": NOTE + 'conda() { [ "$2" != gone ] && activated conda "$@"; }\n'
    },
    "mamba": {
        "etc/profile.d/conda.sh": NOTE,
        "etc/profile.d/mamba.sh": 'mamba() { [ "$2" != gone ] && activated mamba "$@"; }\n',
    },
    "micromamba": {
        "bin/micromamba": '#!/bin/sh\necho \'activated() { export ACTIVE="$*"; PATH=$HOME/env/bin:'
        '$PATH; }; micromamba() { [ "$2" != gone ] && activated micromamba "$@"; }\'\n'
    },
    "spack": {
        "share/spack/setup-env.sh": NOTE + 'spack() { [ "$3" != gone ] && activated spack "$@"; }\n'
    },
    "easybuild": {},
}


@pytest.mark.parametrize("kind", TOOLS)
def test_an_environment_below_the_directory_of_its_tool(tmp_path: Path, kind: str) -> None:
    python_program(tmp_path / "env/bin/python3", STUB)
    for name, text in TOOLS[kind].items():
        file = tmp_path / "a tool" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o700)
    module = (
        NOTE + 'module() { [ "$1" != load ] || { [ "$2" != gone ] && activated module "$@"; }; }\n'
        "export MODULEPATH=/m\n"
    )
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/init").mkdir()
    (tmp_path / "modules/init/bash").write_text(module)
    for name, code in (("ml 1", 0), ("gone", 78)):
        activate = {kind: name, "root": "$TOOLS/a tool"}
        script = render(profile=profile_with(software={"activate": activate}), python="/never")
        place = {"TOOLS": str(tmp_path), "MODULESHOME": str(tmp_path / "modules")}
        ended = run(tmp_path, script, **place)
        assert ended.returncode == code, ended.stderr
    assert f"{name}` failed on " in ended.stderr, "the line that failed"
    seen = yaml.safe_load((tmp_path / "seen.json").read_text())
    words = {"spack": "spack env activate ml 1", "easybuild": "module load ml 1"}
    assert seen["environment"]["ACTIVE"] == words.get(kind, f"{kind} activate ml 1")
    assert seen["argv"][0] == str(tmp_path / "env/bin/python3"), "the interpreter is that of it"
    prefix = seen["environment"].get("MAMBA_ROOT_PREFIX")
    assert prefix == (f"{tmp_path}/a tool" if kind == "micromamba" else None)


@pytest.mark.parametrize(("kind", "inside"), [("venv", "bin"), ("uv", ".venv/bin")])
def test_an_environment_that_is_a_directory(tmp_path: Path, kind: str, inside: str) -> None:
    script = render(profile=profile_with(software={"activate": {kind: "$HOME/e"}}), python="/never")
    missing = run(tmp_path, script)
    assert missing.returncode == 78
    assert f"`source {tmp_path}/e/{inside}/activate` failed on " in missing.stderr
    where = tmp_path / "e" / inside.removesuffix("bin").rstrip("/")
    subprocess.run(["python3", "-m", "venv", "--without-pip", where], check=True)
    (tmp_path / "e" / inside / "python3").unlink()
    python_program(tmp_path / "e" / inside / "python3", STUB)
    assert run(tmp_path, script).returncode == 0
    assert f'"VIRTUAL_ENV": "{where}"' in (tmp_path / "seen.json").read_text()


def test_tools_on_path_need_no_root() -> None:
    for kind in TOOLS:
        script = render(profile=profile_with(software={"activate": {kind: "ml"}}))
        assert "None" not in script and "{root}" not in script
    assert "must module load ml" in script


@pytest.mark.parametrize(
    ("activate", "words"),
    [
        ({}, "exactly one of conda, mamba,"),
        ({"conda": "a", "venv": "b"}, "exactly one"),
        ({"venv": "/v", "root": "/r"}, "`root` is not for venv"),
    ],
)
def test_one_environment_at_a_time(activate: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        profile_with(software={"activate": activate})


# -- software.setup ---------------------------------------------------------------------------


def with_setup(directory: Path, text: str) -> str:
    """The script of a job that reads a setup file with this text."""
    file = directory / "setup.sh"
    file.write_text(text)
    digest = sha256(file.read_bytes()).hexdigest()
    facts = ScriptFacts(
        *("r-0", "hpctrain:r-0", "a" * 64, "b" * 64, stub(directory)),
        setup=SetupFile(str(file), digest),
    )
    return render_script(build_script(planned_job(SPEC, PROFILE), facts))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("true\nfalse\ntrue\n", "{file}:2: `false`"),
        ("cd /none/at/all\n", "{file}:1: `cd /none/at/all`"),
        ("\n\nno-such-command --x\n", "{file}:3: `no-such-command --x`"),
        ("source /none/at/all\n", "{file}:1: `source /none/at/all`"),
        ("true\nreturn 4\n", "`source {file}`"),
        ("exit 3\n", "`exit 3`"),
    ],
)
def test_a_line_of_the_setup_that_fails_ends_the_job_with_its_place(
    tmp_path: Path, text: str, message: str
) -> None:
    ended = run(tmp_path, with_setup(tmp_path, text))
    expected = message.format(file=tmp_path / "setup.sh")
    last = ended.stderr.splitlines()[-1]
    assert ended.returncode == 78
    assert last.startswith("hpctrain: software.setup: ") and f"{expected} failed on " in last
    assert not (tmp_path / "seen.json").exists(), "nothing is trained in the wrong environment"


@pytest.mark.parametrize(
    "text",
    [
        "f() { false; true; }\nf\n",
        "[ -d /none ] && cd /none\ntrue\n",
        "if ! false; then :; fi\nfalse || true\n",
        'source "$HOME/other.sh"\n',
        "export SET=$(false; echo yes) NOT=$UNSET\n",
    ],
)
def test_what_a_setup_may_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.sh").write_text("false\ntrue\n")
    ended = run(tmp_path, with_setup(tmp_path, f"{text}export DONE=yes\n"))
    assert ended.returncode == 0, ended.stderr
    assert '"DONE": "yes"' in (tmp_path / "seen.json").read_text()


# -- Without a spec ---------------------------------------------------------------------------


def test_a_profile_alone_has_an_environment(tmp_path: Path) -> None:
    """What a job has that looks at a site before there is any run."""
    file = tmp_path / "own.yaml"
    file.write_text(
        "extends: sandbox\nname: own\nsoftware: {activate: {venv: $HOME/e}, scratch: /tmp/$USER}\n"
        "environment: [{name: A, value: $SCRATCH/a, reason: of it}]\n"
    )
    environment = job_environment(load_profile(file).document)
    template = tmp_path / "job.sbatch.j2"
    template.write_text(
        "{% extends 'hpctrain/job.sbatch.j2' %}{% block header %}{% endblock %}"
        "{% block directives %}{% endblock %}{% block signals %}{% endblock %}"
        "{% block logs %}{% endblock %}{% block preflight %}{% endblock %}"
        "{% block launch %}\npython3 -V\n{% endblock %}"
    )
    text = render_template("job.sbatch.j2", tmp_path, environment)
    for line in ('must source "${HOME:?}/e"/bin/activate', "needs environment.A SCRATCH"):
        assert f"\n{line}" in text, text
