"""What differs on one machine from a site, as a profile that extends the site's."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpctrain.sandbox.paths import SandboxPaths
from hpctrain.sandbox.shape import SiteShape
from hpctrain.sandbox.stand_in_site import (
    ThisMachine,
    profile_changes,
    profile_text,
    write_site,
)
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile

PYTHON = "/venv/bin/python"


def machine(*files: str, slurm: tuple[int, int] = (22, 5)) -> ThisMachine:
    """One with these files, on which nothing is unlimited."""
    has = files.__contains__
    return ThisMachine(PYTHON, slurm, has, has, lambda _, value: value != "unlimited")


def written(base: str, changes: dict[str, Any], place: Path) -> Path:
    file = place / "site.yaml"
    file.write_text(json.dumps({"extends": base, "name": "site", **changes}))
    return file


def here(
    site: Path, here: ThisMachine, nodes: int | None = None
) -> tuple[dict[str, object], ClusterProfile]:
    """The values that differ, by their paths, and the profile that results."""
    changes = profile_changes(
        load_profile(site).document, nodes, SandboxPaths(site.parent, site.parent), here
    )
    overlay = site.parent / "profile.yaml"
    overlay.write_text(profile_text(str(site), "site-sandbox", changes))
    return {".".join(one.path): one.value for one in changes}, load_profile(overlay).document


def test_a_plain_site_differs_by_gpus_network_and_file_systems(tmp_path: Path) -> None:
    changes, profile = here(written("a100x64", {}, tmp_path), machine(), nodes=2)
    assert {name: value for name, value in changes.items() if "filesystems" not in name} == {
        "nodes.count": 2,
        "gpu.emulated": True,
        "network.interface": "lo",
    } | {name: value for name, value in changes.items() if name.startswith("environment.")}
    assert (profile.nodes.count, profile.gpu.emulated) == (2, True)
    assert profile.network.interface == "lo"
    assert all(Path(one.path).is_relative_to(tmp_path / "site") for one in profile.filesystems)
    usual = load_profile(find_profile("a100x64")).document
    assert profile.slurm == usual.slurm and profile.limits == usual.limits


def test_nodes_of_another_architecture_are_those_of_this_machine(tmp_path: Path) -> None:
    site = written("a100x64", {"nodes": {"architecture": "aarch64"}}, tmp_path)
    changes, profile = here(site, machine())
    assert changes["nodes.architecture"] is None is profile.nodes.architecture


SITE: dict[str, Any] = {
    "network": {"interface": "ib", "master_address": "{node}i"},
    "filesystems": [
        {
            "name": "scratch",
            "path": "/lustre",
            "kind": "lustre",
            "stripe_count": -1,
            "stripe_size": "4MiB",
        }
    ],
    "slurm": {
        "cluster": "c1",
        "submit_command": ["site-sbatch"],
        "inherit": ["WORK"],
        "version": "24.11",
        "reservation": "maint",
        "reservation_end": "2026-12-24T18:00:00+01:00",
        "options": {
            "plugins": ["auto-resume"],
            "sbatch": {"exclude": "n[1-2]", "wait-all-nodes": 1},
            "srun": {"auto-resume": 1, "mpi": "pmix", "tres-bind": "gres/gpu:closest"},
        },
    },
    "software": {
        "python": "/sw/bin/python",
        "setup": "/sw/setup.sh",
        "scratch": "$LOCAL/$USER",
        "modules": {"init": "/sw/init.sh", "use": ["$EXTRA", "/sw/modules"], "load": ["GCC"]},
        "container": {
            "launcher": "apptainer",
            "image": "$WORK/i.sif",
            "mounts": ["$PROJECT:/project"],
            "site_mounts": ["/lustre"],
        },
        "activate": {"conda": "train"},
        "commands": {
            "node": [["/sw/check-links"]],
            "task": [["source", "/sw/rails.sh"], ["ulimit", "-c", "0"], ["echo", "$RAILS"]],
            "wrapper": ["numactl", "--localalloc"],
        },
        "ulimits": {"memlock": "unlimited", "nofile": 65536},
    },
    "environment": [
        {"name": "NCCL_SOCKET_IFNAME", "value": "ib", "reason": "cards"},
        {"name": "CACHE", "value": "$WORK/$SLURM_JOB_ID", "reason": "a cache"},
        {"name": "RAIL", "per_local_rank": ["$RAILS"] * 8, "reason": "a card each"},
    ],
    "metrics": {"textfile": "/var/lib/textfiles"},
    "speed_check": "exclude",
    "limits": {"account_required": True},
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return written("a100x1", SITE, tmp_path)


def test_every_value_that_cannot_work_here_is_another_one(site: Path) -> None:
    modules = str(site.parent / "modules")
    changes, profile = here(site, machine("/sw/modules", modules))
    own = site.parent / "site"
    assert changes == {
        "gpu.emulated": True,
        "network.interface": "lo",
        "network.master_address": None,
        "filesystems.scratch.path": str(own / "scratch"),
        "filesystems.scratch.stripe_count": None,
        "filesystems.scratch.stripe_size": None,
        "speed_check": "off",
        "metrics.textfile": None,
        "slurm.account": "sandbox",
        "slurm.version": "22.05",
        "slurm.reservation_end": None,
        "slurm.options.sbatch.exclude": None,
        "slurm.cluster": None,
        "slurm.submit_command": ["sbatch"],
        "slurm.options.srun.auto-resume": None,
        "slurm.options.srun.mpi": None,
        "slurm.options.srun.tres-bind": None,
        "software.python": PYTHON,
        "software.setup": None,
        "software.modules.init": f"{modules}/init/bash",
        "software.modules.use": ["/sw/modules"],
        "software.container.image": str(own / "image.sif"),
        "software.container.python": PYTHON,
        "software.container.mounts": [],
        "software.container.site_mounts": ["/"],
        "software.scratch": f"{own}/local/$USER-$SLURM_JOB_ID",
        "software.activate": None,
        "software.commands.node": [],
        "software.commands.task": [["ulimit", "-c", "0"]],
        "software.commands.wrapper": [],
        "software.ulimits.memlock": None,
        "environment.NCCL_SOCKET_IFNAME.value": "lo",
        "environment.RAIL": None,
    }
    assert profile.slurm.options.sbatch == {"wait-all-nodes": 1} and not profile.slurm.options.srun
    assert [variable.name for variable in profile.environment][-1] == "CACHE"


def test_what_is_here_stays_as_the_site_has_it(site: Path) -> None:
    files = ("/sw/setup.sh", "/sw/init.sh", "/sw/rails.sh", "/var/lib/textfiles")
    changes, _ = here(site, machine(*files, str(site.parent / "modules"), slurm=(24, 11)))
    stays = {"software.setup", "software.modules.init", "metrics.textfile", "slurm.version"}
    assert not stays & set(changes)
    assert "slurm.options.srun.tres-bind" not in changes
    task = changes["software.commands.task"]
    assert task == [["source", "/sw/rails.sh"], ["ulimit", "-c", "0"]]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"software": {"modules": {"load": ["GCC"]}}}, "software.modules"),
        ({"software": {"container": {"launcher": "pyxis", "image": "i"}}}, "software.container"),
        ({"notify": {"channels": [{"kind": "slurm"}]}}, "notify"),
    ],
)
def test_what_has_no_stand_in_is_left_out(
    changes: dict[str, Any], path: str, tmp_path: Path
) -> None:
    found, profile = here(written("a100x1", changes, tmp_path), machine())
    assert found[path] is None
    section: Any = profile
    for part in path.split("."):
        section = getattr(section, part)
    assert section is None


@pytest.mark.parametrize(("nodes", "sizes"), [(5, (3, 2)), (1, ()), (None, (4, 4))])
def test_islands_are_cut_with_their_nodes(
    nodes: int | None, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    _, profile = here(written("islands10b", {}, tmp_path), machine(), nodes)
    assert tuple(island.nodes for island in profile.network.islands) == sizes


def test_parts_of_partitions_are_changed_in_them(tmp_path: Path) -> None:
    partition = {
        "name": "other",
        "nodes": {"count": 9},
        "network": {"interface": "ib1"},
        "environment": [{"name": "GLOO_SOCKET_IFNAME", "value": "ib1", "reason": "the other"}],
    }
    site = written("a100x1", {"slurm": {"partitions": [partition]}}, tmp_path)
    _, profile = here(site, machine(), nodes=2)
    other = profile.for_partition("other")
    assert (other.nodes.count, other.network.interface) == (2, "lo")
    assert {one.name: one.value for one in other.environment}["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_profile_of_a_sandbox_stays_but_for_its_size(tmp_path: Path) -> None:
    assert here(written("sandbox", {}, tmp_path), machine())[0] == {}
    assert here(written("sandbox", {}, tmp_path), machine(), 1)[0] == {"nodes.count": 1}


def test_every_line_says_why(site: Path) -> None:
    here(site, machine())
    lines = (site.parent / "profile.yaml").read_text().splitlines()[3:]
    assert all("  # on this machine: " in line for line in lines if not line.endswith(":")
               and "- name:" not in line)  # fmt: skip


# -- What jobs find ------------------------------------------------------------------------------


@pytest.fixture
def module_home(tmp_path: Path) -> Path:
    """A module system that only notes what it is told."""
    home = tmp_path / "cache" / "init"
    home.mkdir(parents=True)
    (home / "bash").write_text('module() { echo "module $*"; }\n')
    return home.parent


def test_modules_are_found_by_the_variable_that_tasks_get(
    tmp_path: Path, module_home: Path
) -> None:
    paths = SandboxPaths(tmp_path / "it's here", tmp_path)
    write_site(paths, SiteShape(modules=("GCC", "GCC/12", "Stages/2025")), module_home)
    files = paths.modules / "modulefiles"
    found = sorted(str(file.relative_to(files)) for file in files.rglob("*") if file.is_file())
    assert found == ["GCC/1", "GCC/12", "Stages/2025"]
    printed = subprocess.run([paths.task_prolog], capture_output=True, text=True, check=True)
    assert printed.stdout == f"export MODULESHOME={paths.modules}\n"
    words = f'. "{paths.modules}/init/bash"; echo "$MODULESHOME"'
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"module use {files}", str(paths.modules)]


def started(paths: SandboxPaths, *words: str) -> subprocess.CompletedProcess[str]:
    program = paths.programs / "apptainer"
    return subprocess.run([program, *words], capture_output=True, text=True, check=False)


def test_a_launcher_starts_the_command_in_its_directory(tmp_path: Path) -> None:
    paths = SandboxPaths(tmp_path, tmp_path)
    write_site(paths, SiteShape(launchers=("apptainer",)), None)
    image = str(paths.site_directory("image.sif"))
    (tmp_path / "run").mkdir()
    options = ("--nv", "--cleanenv", "--no-mount=home,tmp", "--bind", "/a:/b")
    done = started(paths, "exec", *options, "--pwd", f"{tmp_path}/run", image, "pwd", "-P")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/run\n")
    gone = started(paths, "exec", "/no.sif", "true")
    assert gone.returncode == 255 and "could not open image /no.sif" in gone.stderr
    assert started(paths, "build").returncode == 255
