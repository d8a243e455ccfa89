"""Fields that administrators write: of profiles of earlier versions, and under other names.

Belongs here: each such field works, or is refused by one message with the name of the right one.
Does not belong here: whole profiles of sites (`test_sites`).
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import hpctrain

from hpctrain.base.errors import InvalidInputError, Problem
from hpctrain.job.inspect_command import validate_file
from hpctrain.spec.loader import find_profile, load_profile
from hpctrain.spec.profile import ClusterProfile


def document(key: str, value: object) -> dict[str, Any]:
    """A profile with one further field; `[]` in its path is the first partition."""
    profile: dict[str, Any] = {"extends": "h100x16", "name": "own"}
    *above, last = key.split(".")
    here = profile
    for part in above:
        if part == "partitions[]":
            here["partitions"] = [{"name": "gpu"}]
            here = here["partitions"][0]
        else:
            here = here.setdefault(part, {})
    here[last] = value
    return profile


def load(directory: Path, profile: dict[str, Any]) -> ClusterProfile:
    file = directory / "own.yaml"
    file.write_text(json.dumps(profile))
    return load_profile(file).document


def refusal(directory: Path, profile: dict[str, Any]) -> Problem:
    with pytest.raises(InvalidInputError) as caught:
        load(directory, profile)
    assert len(caught.value.problems) == 1, "one clear message"
    return caught.value.problems[0]


# What the thirteen profiles that were written for earlier versions have in particular.
@pytest.mark.parametrize(
    ("key", "value", "means"),
    [
        ("slurm.all_memory", True, ("slurm.memory", "auto")),
        ("slurm.all_memory", False, ("slurm.memory", "none")),
        ("slurm.exclusive", False, ("slurm.exclusive", False)),
        ("slurm.gpu_request", "none", ("slurm.gpu_request", "none")),
        ("slurm.gpu_request", "gres-typed", ("slurm.gpu_request", "gres-typed")),
        ("slurm.constraint", "gpu&hbm40g", ("slurm.constraint", "gpu&hbm40g")),
        ("slurm.account", "m1234_g", ("slurm.account", "m1234_g")),
        ("slurm.qos", "regular", ("slurm.qos", "regular")),
        ("network.fabric", "slingshot", ("network.fabric", "slingshot")),
        ("network.interface", "eth0", ("network.interface", "eth0")),
        ("limits.accounts", ["lab"], ("limits.accounts", ("lab",))),
        ("continuation", "chain", ("continuation", "chain")),
        ("continuation", "singleton", ("continuation", "singleton")),
        ("software.modules", {"init": "/p/m.sh", "purge": True, "load": ["GCC"]},
         ("software.modules.load", ("GCC",))),
        ("software.container", {"launcher": "pyxis", "image": "/capstor/env.toml",
                                "mounts": ["/capstor:/capstor"]},
         ("software.container.mounts", ("/capstor:/capstor",))),
        ("software.container", {"launcher": "apptainer", "image": "/s/p.sif"},
         ("software.container.launcher", "apptainer")),
    ],
)  # fmt: skip
def test_fields_of_earlier_profiles_still_count(
    key: str, value: object, means: tuple[str, object], tmp_path: Path
) -> None:
    found: object = load(tmp_path, document(key, value))
    for part in means[0].split("."):
        found = getattr(found, part)
    assert found == means[1]


def test_a_partition_without_a_name_is_one_message_with_the_field_for_it(tmp_path: Path) -> None:
    """Alone in its list, which is not too short for that."""
    profile = yaml.safe_load(find_profile("h100x16").read_text())
    profile["slurm"]["partitions"] = [{"name": "", "default": True}]
    found = refusal(tmp_path, profile)
    assert found.message.endswith("name`: must not be empty")
    assert "`request: false`" in (found.hint or "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("slurm.comment", False),
        ("slurm.memory_per_gpu", "60GiB"),
        ("slurm.reservation", "maint"),
        ("slurm.export", "all"),
        ("slurm.partitions[].qos", "gpu"),
        ("slurm.partitions[].account", "a"),
        ("slurm.partitions[].constraint", "h100"),
        ("slurm.partitions[].min_nodes", 2),
        ("slurm.partitions[].max_gpus", 64),
        ("software.scratch", "/tmp"),
        ("limits.max_gpus", 64),
        ("limits.max_gpu_hours", 10000),
        ("limits.qos", ["a"]),
        ("network.master_address", "{node}i"),
        ("network.ports", "20000-21000"),
    ],
)
def test_wished_fields_that_exist_under_their_name(key: str, value: object, tmp_path: Path) -> None:
    found: Any = load(tmp_path, document(key, value)).model_dump(mode="json", by_alias=True)
    for part in key.split("."):
        found = found["partitions"][0] if part == "partitions[]" else found[part]
    assert found == value


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("slurm.extra_sbatch", ["--hint=nomultithread"], "`slurm.options.sbatch`"),
        ("slurm.extra_srun", ["--cpu-bind=none"], "`slurm.options.srun`"),
        ("slurm.licenses", "scratch:1", "`slurm.options.sbatch`, as `licenses: VALUE`"),
        ("slurm.mail_user", "x@y", "`slurm.options.sbatch`, as `mail-user: VALUE`"),
        ("slurm.wckey", "ml", "`slurm.options.sbatch`, as `wckey: VALUE`"),
        ("slurm.exclude", "n[1-3]", "`slurm.options.sbatch`, as `exclude: VALUE`"),
        ("slurm.clusters", "c1", "`slurm.cluster`"),
        ("slurm.submit", "site_sbatch", "`slurm.submit_command`"),
        ("slurm.nice", 100, "`slurm.options.sbatch`, as `nice: VALUE`"),
        ("slurm.time_min", "1h", "`slurm.options.sbatch`, as `time-min: VALUE`"),
        ("slurm.network", "single_node_vni", "`slurm.options.sbatch`, as `network: VALUE`"),
        ("slurm.mpi", "pmix", "`slurm.options.srun`, as `mpi: VALUE`"),
        ("slurm.gres", "gpu:4", "`slurm.gpu_request`"),
        ("slurm.export", "ALL", "`all`"),
        ("slurm.partitions[].gpu", "h100", "`gpu: {type: NAME}`"),
        ("slurm.partitions[].nodes", 12, "`nodes: {count: NUMBER}`"),
        ("slurm.partitions[].gres", "gpu:h100", "`slurm.gpu_request: gres-typed`"),
        ("software.setup", ["ulimit -c 0"], "a shell file"),
        ("software.singularity", "singularity", "`launcher: singularity`"),
        ("software.uenv", "pt/v1", "`launcher: uenv`"),
        ("software.staging", [{"from": "/data", "to": "/local"}], "`software.scratch`"),
        ("template", "/etc/hpctrain/site.sbatch.j2", "`--template-dir`"),
        ("limits.max_running", 4, "`limits.max_submit`"),
    ],
)
def test_wished_fields_with_another_name_are_refused_with_it(
    key: str, value: object, hint: str, tmp_path: Path
) -> None:
    assert hint in (refusal(tmp_path, document(key, value)).hint or "")


# -- docs/your-site.md -----------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "your-site.md").read_text()
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_profiles_of_the_page_are_valid(tmp_path: Path) -> None:
    assert len(SNIPPETS) >= 3
    for snippet in SNIPPETS:
        file = tmp_path / "snippet.yaml"
        file.write_text(snippet)
        assert validate_file(file) == "cluster profile"


def test_commands_and_files_of_the_page_exist() -> None:
    commands = re.findall(r"^(hpctrain [^#\n]*?) *(?:#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) >= 5
    root = Path(__file__).resolve().parents[2]
    for command in commands:
        words = shlex.split(command)[1:]
        helped = words[: 2 if words[0] == "profile" else 1]
        shown = hpctrain(*helped, "--help")
        assert shown.exit_code == 0, command
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(^|[ ,]){option}\b", shown.stdout), f"{command}: {option}"
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (root / "docs" / target.partition("#")[0]).exists(), target
