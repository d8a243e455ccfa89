"""CPUs of each rank on a node with two sockets, as a real slurmd computes them from our srun line.

The node exists in hwloc's synthetic topology only. slurmd lays the tasks out over it and writes
each task's mask into its log; the kernel of a machine with fewer CPUs then refuses the masks, and
the tasks do not start. Not tested here for that reason: that the kernel keeps a rank to its mask.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsal import own_sandbox

from hpctrain.job.kept_code import keep_code
from hpctrain.job.prepare import prepare
from hpctrain.records.layout import RunLayout
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import shape_from_profile
from hpctrain.spec.loader import find_profile, load_profile

PROFILE = "islands10b"
SITE = load_profile(find_profile(PROFILE)).document
GPUS, CPUS, SOCKETS = SITE.gpu.per_node, SITE.nodes.cpus, 2
LIMIT_SECONDS = 300

SPEC = f"""
name: affinity
model: {{layers: 4, hidden: 64, heads: 8, vocab: 256, seq: 64}}
batch: {{global: 8, micro: 1}}
budget: {{steps: 10}}
optimizer: {{lr: 1e-3}}
recompute: none
checkpoint: {{every_steps: 5}}
resources: {{gpus: {GPUS}, walltime: 00:05:00}}
"""


@pytest.fixture(scope="module")
def two_sockets() -> Iterator[Sandbox]:
    """One node of the site, whose slurmd finds two sockets."""
    shape = replace(
        shape_from_profile(SITE, 1),
        nodes=1,
        switches=(),
        groups=(),
        sockets_per_node=SOCKETS,
        binds_tasks=True,
        slurmd_timeout_seconds=600,
    )
    os.environ["HWLOC_SYNTHETIC"] = f"pack:{SOCKETS} core:{CPUS // SOCKETS} pu:1"
    try:
        with own_sandbox(shape) as box:
            yield box
    finally:
        del os.environ["HWLOC_SYNTHETIC"]


def socket_of_each_rank(script: str, directory: Path, box: Sandbox) -> list[list[int]]:
    """Submit the job and return, for each local rank, the sockets of its CPUs."""
    start, _, launch = script.partition("\nexec ")
    srun = launch[launch.index("srun") : launch.index("  /opt/python -m hpctrain.train")]
    (directory / "logs").mkdir()
    keep_code(RunLayout(directory))
    (directory / "job.sbatch").write_text(f"{start}\n{srun}  true\n")
    done = subprocess.run(
        ["sbatch", "--parsable", "job.sbatch"],
        cwd=directory,
        env={**os.environ, **box.environment()},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    pattern = re.compile(rf"_lllp_generate_cpu_bind jobid \[{int(done.stdout)}\]: \S* ?(0x\S+)")
    (node,) = box.shape.node_names
    log = box.paths.log(f"slurmd-{node}")
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := pattern.findall(log.read_text(errors="replace"))):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.2)
    masks = [int(mask, 16) for mask in found[-1].split(",")]
    cores = CPUS // SOCKETS
    sockets = [((1 << cores) - 1) << (cores * number) for number in range(SOCKETS)]
    return [[number for number, all_of in enumerate(sockets) if mask & all_of] for mask in masks]


def rendered(directory: Path) -> str:
    (directory / "spec.yaml").write_text(SPEC)
    return prepare(directory / "spec.yaml", PROFILE, runs=directory, python="/opt/python").script


def test_ranks_fill_one_socket_after_the_other(two_sockets: Sandbox, tmp_path: Path) -> None:
    """GPUs are numbered by their address, the first half on the first socket."""
    half = GPUS // SOCKETS
    wanted = [[0]] * half + [[1]] * half
    assert socket_of_each_rank(rendered(tmp_path), tmp_path, two_sockets) == wanted


def test_a_host_file_takes_the_order_of_sockets_away(two_sockets: Sandbox, tmp_path: Path) -> None:
    """Why a launch with an order of its own is unbound: each rank then binds itself."""
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{name}\n" * GPUS for name in two_sockets.shape.node_names))
    script = rendered(tmp_path).replace("\nexec ", f"\nexport SLURM_HOSTFILE={hosts}\nexec ")
    script = script.replace("--distribution=block:block", "--distribution=arbitrary")
    sockets = socket_of_each_rank(script, tmp_path, two_sockets)
    assert sockets == [[rank % 2] for rank in range(GPUS)]


@pytest.mark.variant("test_ranks_fill_one_socket_after_the_other")
def test_ranks_alternate_without_the_option(two_sockets: Sandbox, tmp_path: Path) -> None:
    """Slurm's default, which puts every other rank on the socket opposite to its GPU."""
    script = rendered(tmp_path)
    assert "--distribution=block:block" in script
    script = script.replace("--distribution=block:block", "--distribution=block")
    sockets = socket_of_each_rank(script, tmp_path, two_sockets)
    assert sockets == [[rank % 2] for rank in range(GPUS)]
