"""Rank order is node order: the scripts' placement as a real Slurm carries it out.

Everything that the plan says about nodes (spans, islands, which axis crosses the slow link) rests
on two habits of Slurm: ranks follow the names of nodes, and nodes are taken where the script says.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rehearsal import answer, own_sandbox, patient_client
from variants import varied

from hpctrain.job.kept_code import keep_code
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.plan.documents import AxisPlacement
from hpctrain.records.layout import RunLayout
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import SandboxShape, SwitchShape, default_shape, shape_from_profile
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.states import JobState
from hpctrain.spec.loader import find_profile, load_profile

HALLS = load_profile(find_profile("islands10b")).document
LIMIT_SECONDS = 600

SPEC = """
name: mapping
model: {{layers: 4, hidden: 64, heads: 8, vocab: 256, seq: 64}}
batch: {{global: {batch}, micro: 1}}
budget: {{steps: 10}}
optimizer: {{lr: 1e-3}}
recompute: none
parallel: {{tp: 4, pp: 2, order: {order}}}
checkpoint: {{every_steps: 5}}
resources: {{gpus: {gpus}, walltime: 00:05:00}}
"""

Place = dict[int, str]  # rank -> node


def patient(shape: SandboxShape) -> SandboxShape:
    """Nodes that are held up stay: none of them crashes here."""
    return replace(shape, slurmd_timeout_seconds=600)


@pytest.fixture(scope="module")
def halls() -> Iterator[Sandbox]:
    """The cluster of islands10b; gpu1 of the east hall is out of order."""
    with own_sandbox(patient(shape_from_profile(HALLS))) as box:
        box.command("scontrol", "update", "NodeName=gpu1", "State=DRAIN", "Reason=test")
        yield box


@pytest.fixture(scope="module")
def crossed() -> Iterator[Sandbox]:
    """Twelve nodes whose names alternate between two leaf switches."""
    names = [f"n{number}" for number in range(12)]
    leaves = (
        SwitchShape("odd", nodes=tuple(names[1::2])),
        SwitchShape("even", nodes=tuple(names[0::2])),
        SwitchShape("spine", switches=("odd", "even")),
    )
    shape = replace(default_shape(nodes=12, gpus_per_node=1), switches=leaves)
    with own_sandbox(patient(shape)) as box:
        yield box


def mapping(script: str, directory: Path, box: Sandbox) -> Place:
    """Submit the script with a trainer that only says where it is; what its ranks said."""
    start, _, launch = script.partition("\nexec ")
    srun = launch[launch.index("srun") : launch.index("  /opt/python -m hpctrain.train")]
    said = """  sh -c 'echo "$SLURM_PROCID $SLURMD_NODENAME"'\n"""
    (directory / "logs").mkdir()
    keep_code(RunLayout(directory))
    wait_till_free(box)
    (directory / "job.sbatch").write_text(f"{start}\n{srun}{said}")
    sbatch(box, "--wait", "job.sbatch", cwd=directory)
    lines = [path.read_text().split() for path in directory.glob("logs/*/step*-rank*.log")]
    return {int(rank): node for rank, node in lines}


def wait_till_free(box: Sandbox) -> None:
    """`sbatch --wait` may return while the nodes of its job are completing."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (states := box.node_states()) or set(states.values()) - {"idle", "drained"}:
        assert time.monotonic() < deadline, states
        time.sleep(0.2)


def sbatch(box: Sandbox, *arguments: str, cwd: Path) -> int:
    """The id of the new job."""
    done = subprocess.run(
        ["sbatch", "--parsable", *arguments],
        cwd=cwd,
        env={**os.environ, **box.environment()},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr + "".join(
        path.read_text() for path in cwd.glob("logs/*.out")
    )
    return int(done.stdout)


def prepared_for(nodes: int, order: str, directory: Path) -> Prepared:
    gpus = nodes * HALLS.gpu.per_node
    (directory / "spec.yaml").write_text(SPEC.format(gpus=gpus, batch=gpus, order=order))
    path = directory / "spec.yaml"
    return prepare(path, "islands10b", runs=directory, python="/opt/python")


def numbered(node: str) -> int:
    return int(node.lstrip("abcdefghijklmnopqrstuvwxyz"))


def hall(node: str) -> str:
    return "east" if numbered(node) < 4 else "west"


def groups(placement: AxisPlacement, ranks: int) -> list[list[int]]:
    block = placement.stride * placement.size
    return [
        [start + offset + placement.stride * member for member in range(placement.size)]
        for start in range(0, ranks, block)
        for offset in range(placement.stride)
    ]


@pytest.mark.parametrize("order", varied(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"], "tp-cp-ep-dp-pp"))
def test_ranks_are_where_the_plan_says(order: str, halls: Sandbox, tmp_path: Path) -> None:
    job = prepared_for(6, order, tmp_path)
    place = mapping(job.script, tmp_path, halls)
    assert sorted(place) == list(range(48))
    nodes = sorted(set(place.values()), key=numbered)
    assert nodes == ["gpu0", "gpu2", "gpu3", "gpu4", "gpu5", "gpu6"]
    assert [place[rank] for rank in range(48)] == [nodes[rank // 8] for rank in range(48)]
    assert job.plan.nodes.island_nodes == (3, 3)
    crossing = set()
    for placement in job.plan.placements:
        of_groups = [{place[rank] for rank in group} for group in groups(placement, 48)]
        if any(len({hall(node) for node in names}) > 1 for names in of_groups):
            crossing.add(placement.axis)
        one_node = placement.span in ("one GPU", "inside a node")
        assert one_node == all(len(names) == 1 for names in of_groups), placement
    planned = {one.axis for one in job.plan.placements if one.span == "across islands"}
    assert crossing == planned == {"pp" if order.endswith("pp") else "dp"}


@pytest.mark.variant("test_ranks_are_where_the_plan_says")
def test_a_run_that_fits_into_one_hall_stays_there(halls: Sandbox, tmp_path: Path) -> None:
    """Three nodes of the east hall are free, so four are only together in the west."""
    job = prepared_for(4, "auto", tmp_path)
    place = mapping(job.script, tmp_path, halls)
    assert {hall(node) for node in place.values()} == {"west"}
    assert job.plan.nodes.island_nodes == (4, 0), "the plan cannot know which one it will be"


def test_a_controller_takes_the_scripts_of_all_sizes(halls: Sandbox, tmp_path: Path) -> None:
    slurm = patient_client({**os.environ, **halls.environment()})
    for nodes in (1, 2, 5, 7):
        slurm.test_only(prepared_for(nodes, "auto", tmp_path).script)


def test_ranks_follow_names_and_not_switches(crossed: Sandbox, tmp_path: Path) -> None:
    """n2 before n10, and leaves alternate: so names have to follow the topology at a site."""
    wait_till_free(crossed)
    (tmp_path / "job").write_text(
        "#!/bin/sh\n#SBATCH --nodes=12 --ntasks-per-node=2 --output=all.out\n"
        "srun --distribution=block --mpi=none --label sh -c 'echo $SLURMD_NODENAME'\n"
    )
    sbatch(crossed, "--wait", "job", cwd=tmp_path)
    lines = [line.split(": ") for line in (tmp_path / "all.out").read_text().splitlines()]
    place = {int(rank): node for rank, node in lines}
    assert place == {rank: f"n{rank // 2}" for rank in range(24)}


def test_switches_make_a_job_wait_for_one_leaf(crossed: Sandbox, tmp_path: Path) -> None:
    sleeper = ("--output=/dev/null", "--wrap=sleep 3600")
    busy = "--nodelist=n[0-3,5,7]"  # leaves n9, n11 and n4, n6, n8, n10
    first = sbatch(crossed, "--nodes=6", "--exclusive", busy, *sleeper, cwd=tmp_path)
    second = sbatch(
        crossed, "--nodes=2", "--exclusive", "--nodelist=n[4,6]", *sleeper, cwd=tmp_path
    )
    request = ("--nodes=3", "--exclusive", "--switches=1@00:30:00")
    slurm = patient_client({**os.environ, **crossed.environment()})
    try:
        wait_for_nodes(slurm, first)
        wait_for_nodes(slurm, second)
        picky = sbatch(crossed, *request, *sleeper, cwd=tmp_path)
        content = sbatch(crossed, "--nodes=3", "--exclusive", *sleeper, cwd=tmp_path)
        nodes = wait_for_nodes(slurm, content)
        assert {numbered(node) % 2 for node in nodes} == {0, 1}, "two leaves with two nodes each"
        record = slurm.show_job(picky)
        assert record is not None and record.state is JobState.PENDING
        for job in (second, content):
            slurm.cancel(job)
        nodes = wait_for_nodes(slurm, picky)
        assert {numbered(node) % 2 for node in nodes} == {0}
    finally:
        for job in (first, second, picky, content):
            slurm.cancel(job)


def wait_for_nodes(slurm: SlurmClient, job: int) -> tuple[str, ...]:
    """The nodes of a job once it runs."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while time.monotonic() < deadline:
        record = answer(slurm, job)
        if record is not None and record.state is JobState.RUNNING:
            return slurm.hostnames(record.node_list or "")
        time.sleep(0.2)
    raise AssertionError(f"job {job} did not start: {slurm.show_job(job)}")
