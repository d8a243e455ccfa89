"""The reviewed scripts of sites, read by the sbatch and the controller of a newer Slurm.

One cluster has what all of them ask for: partitions, features, licences, a reservation, blocks of
18 nodes. Shown is that the options are written as Slurm takes them, not that they fit their sites.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rehearsal import own_sandbox, patient_client

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.sandbox.faults import set_option
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import PartitionShape, SandboxShape, SwitchShape
from hpctrain.slurm.client import SlurmClient

pytestmark = pytest.mark.nightly("newer releases of Slurm, which are fetched")

SCRIPTS = sorted((Path(__file__).resolve().parents[1] / "sites" / "golden").glob("*.sbatch"))
NODES, BLOCK = 36, 18
OPTION = re.compile(r"^#SBATCH --([\w-]+)=(\S+)$", re.MULTILINE)


def asked(option: str) -> set[str]:
    """All values of an option in these scripts, without quotes."""
    found = (OPTION.findall(path.read_text()) for path in SCRIPTS)
    return {value.strip('"') for pairs in found for name, value in pairs if name == option}


def shape(gpu_type: str) -> SandboxShape:
    names = [f"n{index}" for index in range(NODES)]
    blocks = [tuple(names[start : start + BLOCK]) for start in range(0, NODES, BLOCK)]
    leaves = [SwitchShape(f"block{number}", nodes=block) for number, block in enumerate(blocks)]
    partitions = [PartitionShape(name) for name in sorted(asked("partition"))]
    return SandboxShape(
        nodes=NODES,
        gpus_per_node=8,
        gpu_type=gpu_type,
        cpus_per_node=512,
        memory_mib=4_000_000,
        partitions=(PartitionShape("usual", default=True), *partitions),
        switches=tuple(leaves),
        leaves_are_blocks=True,
        preempt_type="none",
        slurmd_timeout_seconds=600,
    )


@pytest.fixture(scope="module")
def cluster(newer_slurm: Path) -> Iterator[Sandbox]:
    with own_sandbox(shape("a100"), newer_slurm) as box:
        licences = {one.partition(":")[0] for one in asked("licenses")}
        set_option(box, "Licenses", ",".join(f"{name}:9" for name in sorted(licences)))
        features = {name for value in asked("constraint") for name in re.findall(r"\w+", value)}
        box.command(
            "scontrol", "update", f"NodeName={box.shape.node_range}",
            f"Features={','.join(sorted(features))}",
        )  # fmt: skip
        for name in asked("reservation"):
            box.command(
                "scontrol", "create", "reservation", f"ReservationName={name}", "Users=root",
                "StartTime=now", "Duration=1-0", f"Nodes=n{NODES - 2},n{NODES - 1}",
            )  # fmt: skip
        yield box


@pytest.fixture(scope="module")
def slurm(cluster: Sandbox) -> SlurmClient:
    return patient_client({**os.environ, **cluster.environment()})


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_sbatch_and_the_controller_take_the_script(script: Path, slurm: SlurmClient) -> None:
    text = script.read_text()
    # one type of GPU for all, and names of nodes that are here
    text = re.sub(r"gpu:(h100|h200|a100):", "gpu:a100:", text)
    text = re.sub(r"(?m)^#SBATCH --exclude=.*", "#SBATCH --exclude=n[1-2]", text)
    assert "to start at" in slurm.test_only(text).text


def test_an_option_that_slurm_does_not_know_is_refused(slurm: SlurmClient) -> None:
    text = SCRIPTS[0].read_text()
    with pytest.raises(SlurmRefusedError, match="unrecognized option"):
        slurm.test_only(text.replace("#SBATCH --nodes", "#SBATCH --nodse", 1))
