"""Templates of a site: what extends the packaged one, what is refused, and the page about them."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from command_line import hpctrain
from jinja2 import meta, nodes
from planned_job import planned_job
from specimen_scripts import PROFILE, ROOT, SPEC

from hpctrain.base.errors import InvalidInputError
from hpctrain.job.prepare import prepare, templates_digest
from hpctrain.job.render.environment import Variable
from hpctrain.job.render.script import (
    TEMPLATE,
    Script,
    ScriptFacts,
    build_script,
    render_script,
    template_environment,
)

FACTS = ScriptFacts("r-0000", "hpctrain:r-0000", "a" * 64, "b" * 64, "/a b/python")
SCRIPT = build_script(planned_job(SPEC, PROFILE), FACTS)
PACKAGED = (ROOT / "templates" / TEMPLATE).read_text()
PAGE = (ROOT / "docs/templates.md").read_text()
TREE = template_environment().parse(PACKAGED)
BLOCKS = [block.name for block in TREE.find_all(nodes.Block)]


def site(directory: Path, **files: str) -> Path:
    """Write templates; `__` in a name stands for `/`."""
    for name, text in files.items():
        path = directory / f"{name.replace('__', '/')}.sbatch.j2"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory


EXTENDS = "{% extends 'hpctrain/job.sbatch.j2' %}\n"


def test_a_site_may_replace_the_whole_template(tmp_path: Path) -> None:
    text = "#!/bin/bash\n# {{ script.run_id }} {{ script.trainer[0] | sh }}\n"
    assert (
        render_script(SCRIPT, site(tmp_path, job=text)) == "#!/bin/bash\n# r-0000 '/a b/python'\n"
    )


@pytest.mark.parametrize("parent", ["hpctrain/job.sbatch.j2", "job.sbatch.j2"])
def test_a_file_of_the_same_name_extends_the_packaged_one(tmp_path: Path, parent: str) -> None:
    check = "{% block preflight %}\ntest -d /scratch\n{% endblock %}\n"
    directory = site(tmp_path, job=f"{{% extends '{parent}' %}}\n{check}")
    before, _, after = render_script(SCRIPT, directory).partition("test -d /scratch\n")
    assert before + after == render_script(SCRIPT) and after.startswith("# The supervisor owns")


def test_a_file_between_the_site_and_the_package(tmp_path: Path) -> None:
    between = f"{EXTENDS}{{% block header %}}\n# of us\n{{{{ super() }}}}{{% endblock %}}\n"
    own = "{% extends 'ours.sbatch.j2' %}\n{% block logs %}\n{% endblock %}\n"
    text = render_script(SCRIPT, site(tmp_path, ours=between, job=own))
    assert text.startswith("#!/bin/bash\n# of us\n# gpt-tiny on") and "mkdir" not in text


def test_the_name_of_the_package_is_not_for_sites(tmp_path: Path) -> None:
    directory = site(tmp_path, job=EXTENDS, hpctrain__job="never read\n")
    assert render_script(SCRIPT, directory) == render_script(SCRIPT)


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_can_be_replaced_and_extended(tmp_path: Path, block: str) -> None:
    whole = render_script(SCRIPT)
    more = f"{EXTENDS}{{% block {block} %}}\n{{{{ super() }}}}# mark\n{{% endblock %}}\n"
    assert render_script(SCRIPT, site(tmp_path, job=more)).replace("# mark\n", "") == whole
    empty = f"{EXTENDS}{{% block {block} %}}\n{{% endblock %}}\n"
    rest = render_script(SCRIPT, site(tmp_path, job=empty)).splitlines()
    assert set(rest) <= set(whole.splitlines())


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("#\n\n{{ script.no_such_thing }}\n", 3, "has no attribute 'no_such_thing'"),
        ("#\n{{ site }}\n", 2, "'site' is undefined"),
        (f"{EXTENDS}{{% block header %}}\n\n{{{{ x }}}}{{% endblock %}}", 4, "'x' is undefined"),
        ("#\n{% if %}\n", 2, "Expected an expression"),
        ("#\n{{ 1 | no_such_filter }}\n", 2, "No filter named 'no_such_filter'"),
        ("{% extends 'other.j2' %}\n", 1, "no template `other.j2` to extend or include"),
        ("#\n{{ 1 / 0 }}\n", 2, "division by zero"),
        ("#\n{{ script.srun + 1 }}\n", 2, "can only concatenate tuple"),
        ("{% extends 'ours.sbatch.j2' %}\n", 1, "without end"),
    ],
)
def test_a_mistake_has_its_place(tmp_path: Path, text: str, line: int, message: str) -> None:
    directory = site(tmp_path, job=text, ours="{% extends 'job.sbatch.j2' %}\n")
    with pytest.raises(InvalidInputError) as caught:
        render_script(SCRIPT, directory)
    (problem,) = caught.value.problems
    assert message in problem.message and problem.message.startswith("job template: ")
    assert problem.line == line and Path(problem.file or "").parent == tmp_path


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / TEMPLATE).write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInputError, match=r"job\.sbatch\.j2: job template: not UTF-8"):
        render_script(SCRIPT, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sbatch__megatron", "megatron.sbatch.j2: no longer read: the job template is called job"),
        ("megatron", "megatron.sbatch.j2: no longer read"),
        ("other", "this template directory has no job.sbatch.j2"),
    ],
)
def test_a_directory_without_the_template_is_refused(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        render_script(SCRIPT, site(tmp_path, **{name: "#!/bin/bash\n"}))
    assert "docs/templates.md" in (caught.value.problems[0].hint or "")


def test_the_command_line_shows_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site(tmp_path / "site", job="#!/bin/bash\n# {{ script.nodes }}\n")
    spec = str(ROOT / "examples/gpt-tiny.yaml")
    words = ["submit", "-p", "sandbox", spec, "--dry-run", "--template-dir", "site"]
    done = hpctrain(*words)
    assert done.exit_code == 3 and not done.stdout
    assert "site/job.sbatch.j2:2: job template: " in done.stderr
    assert "Traceback" not in done.stderr


# -- docs/templates.md -----------------------------------------------------------------------


def rows(title: str) -> list[str]:
    """First cells, without backquotes, of the table below a heading."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_the_page_lists_exactly_the_blocks() -> None:
    assert rows("Blocks") == BLOCKS


def test_the_page_lists_exactly_the_variables() -> None:
    assert meta.find_undeclared_variables(TREE) == {"script"}
    used = {
        f"{found.node.name}.{found.attr}"
        for found in TREE.find_all(nodes.Getattr)
        if isinstance(found.node, nodes.Name) and found.node.name != "loop"  # Jinja's own
    }
    assert set(rows("Variables")) == used and len(rows("Variables")) == len(used)
    fields = {f"script.{field.name}" for field in dataclasses.fields(Script)}
    fields |= {f"variable.{field.name}" for field in dataclasses.fields(Variable)}
    assert used == fields, "a field that the template does not show, or the other way round"


EXAMPLES = re.findall(r"```jinja\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_page(tmp_path: Path, example: str) -> None:
    text = example if "extends" in example else EXTENDS + example
    rendered = render_script(SCRIPT, site(tmp_path, job=text)).splitlines()
    whole = render_script(SCRIPT).splitlines()
    assert [line for line in rendered if line in whole] == whole, "nothing is lost"
    added = [line for line in rendered if line not in whole]
    assert added and "" not in added and not any("{" in line for line in added)


def test_four_examples() -> None:
    assert len(EXAMPLES) == 4


def own_profile(directory: Path, template: str) -> tuple[Path, str]:
    file = directory / "own.yaml"
    file.write_text(f"extends: sandbox\nname: own\nslurm: {{template: {template}}}\n")
    return ROOT / "examples/gpt-tiny.yaml", str(file)


def test_a_profile_names_the_templates_of_its_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    check = "{% block preflight %}\ntest -d /scratch\n{% endblock %}\n"
    directory = site(tmp_path / "templates", job=EXTENDS + check)
    found = [
        prepare(*own_profile(tmp_path, name), runs=tmp_path)
        for name in ("templates", "templates/job.sbatch.j2")
    ]
    digest = templates_digest(directory)
    for prepared in found:
        assert "\ntest -d /scratch\n" in prepared.script
        assert f"# Template  {digest[:12]} of this site\n" in prepared.script
    (directory / "job.sbatch.j2").write_text(EXTENDS + check.replace("/scratch", "/work"))
    changed = prepare(*own_profile(tmp_path, "templates"), runs=tmp_path)
    assert templates_digest(directory) != digest
    assert changed.run_id != found[0].run_id, "another template is another script"
    with pytest.raises(InvalidInputError, match="neither a directory nor") as caught:
        prepare(*own_profile(tmp_path, "absent"), runs=tmp_path)
    assert caught.value.problems[0].line == 3


def test_a_template_keeps_what_the_supervisor_relies_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    bare = "{% block directives %}\n#SBATCH --nodes=2\n{% endblock %}\n"
    directory = site(tmp_path / "templates", job=EXTENDS + bare)
    with pytest.raises(InvalidInputError) as caught:
        spec = ROOT / "examples/gpt-tiny.yaml"
        prepare(spec, "sandbox", runs=tmp_path, template_directory=directory)
    message = str(caught.value)
    assert all(name in message for name in ("--signal=B:USR1@", "--open-mode=append", "--requeue"))
