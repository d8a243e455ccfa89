"""Leaf switches and blocks of a real Slurm: what is requested, read in the job, and re-ordered.

The trainer only says where each rank is; the supervisor, its questions to Slurm and srun are real.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from newer_slurm import NEWER, fetched
from rehearsal import PATIENCE_SECONDS, own_sandbox, patient_client, profile_text
from test_rank_order import wait_till_free

from hpctrain.base.errors import SlurmRefusedError
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.job.submit import submit
from hpctrain.records.find import RunFiles, find_run
from hpctrain.records.ledger import Event, EventKind
from hpctrain.records.requests import user_name
from hpctrain.runs.describe import describe
from hpctrain.runs.status import statuses
from hpctrain.runs.why import why
from hpctrain.sandbox.sandbox import Sandbox
from hpctrain.sandbox.shape import SandboxShape, SwitchShape, default_shape
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.cluster_queries import ClusterQueries

# An interpreter whose trainer ends at once, after it has said where it is.
INTERPRETER = """\
#!/bin/sh
if [ "$2" = hpctrain.train ]; then
    echo "$SLURM_PROCID $SLURMD_NODENAME"
    exit 0
fi
exec {python} "$@"
"""

SPEC = """
name: placed
model: {{layers: 4, hidden: 64, heads: 8, vocab: 256, seq: 64}}
batch: {{global: {gpus}, micro: 1}}
budget: {{steps: 10}}
optimizer: {{lr: 1e-3}}
recompute: none
parallel: {{pp: {pp}, order: tp-cp-ep-dp-pp}}
checkpoint: {{every_steps: 5}}
resources: {{gpus: {gpus}, walltime: 00:05:00}}
supervise: {{failures_without_progress: 1, budgets: {{crash: 0}}}}
"""


def two_leaves(odd: tuple[str, ...], even: tuple[str, ...]) -> tuple[SwitchShape, ...]:
    return (
        SwitchShape("odd", nodes=odd),
        SwitchShape("even", nodes=even),
        SwitchShape("spine", switches=("odd", "even")),
    )


@dataclass(frozen=True)
class Site:
    """A sandbox with four nodes of one GPU, and what its profile says of switches."""

    sandbox: Sandbox
    switches: str
    domain: int = 1

    @property
    def slurm(self) -> SlurmClient:
        return patient_client({**os.environ, **self.sandbox.environment()})

    def prepared(self, directory: Path, gpus: int, pp: int) -> Prepared:
        python = directory / "python"
        python.write_text(INTERPRETER.format(python=shlex.quote(sys.executable)))
        python.chmod(0o755)
        profile = profile_text(self.sandbox.shape, str(python))
        assert "interface: lo}" in profile and "{domain: 1," in profile
        profile = profile.replace("interface: lo}", f"interface: lo, switches: {self.switches}}}")
        profile = profile.replace("{domain: 1,", f"{{domain: {self.domain},")
        (directory / "profile.yaml").write_text(profile)
        (directory / "spec.yaml").write_text(SPEC.format(gpus=gpus, pp=pp))
        files = directory / "spec.yaml", str(directory / "profile.yaml")
        return prepare(*files, runs=directory / "runs")

    def run(self, directory: Path, gpus: int, pp: int) -> RunFiles:
        """Submit a run and wait until its job is over."""
        wait_till_free(self.sandbox)
        prepared = self.prepared(directory, gpus, pp)
        submitted = submit(prepared, directory / "runs", self.slurm)
        run = find_run(directory / "runs", submitted.run_id)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(one.event is EventKind.ACTION for one in run.ledger.events()):
            assert time.monotonic() < deadline, self.slurm.show_job(submitted.job_id)
            time.sleep(0.2)
        return run


def ranks_of(run: RunFiles) -> dict[int, str]:
    logs = run.layout.logs.glob("*/step*-rank*.log")
    lines = [path.read_text().splitlines()[0].split() for path in sorted(logs)]
    return {int(rank): node for rank, node in lines}


def placed(run: RunFiles) -> Event:
    (event,) = [one for one in run.ledger.events() if one.event is EventKind.PLACED]
    return event


def four(switches: tuple[SwitchShape, ...], blocks: bool = False) -> SandboxShape:
    shape = default_shape(nodes=4, gpus_per_node=1)
    return replace(shape, switches=switches, leaves_are_blocks=blocks, slurmd_timeout_seconds=600)


@pytest.fixture(scope="module")
def tree() -> Iterator[Site]:
    """Four nodes whose names alternate between two leaf switches."""
    with own_sandbox(four(two_leaves(("n0", "n2"), ("n1", "n3")))) as box:
        yield Site(box, "{plugin: tree, nodes_per_leaf: 2, request: false}")


def test_ranks_follow_leaves_where_names_cross_them(tree: Site, tmp_path: Path) -> None:
    run = tree.run(tmp_path, gpus=4, pp=2)
    assert ranks_of(run) == {0: "n0", 1: "n2", 2: "n1", 3: "n3"}
    event = placed(run)
    assert event.groups_outside == 0
    assert "dp 2: 2 of 2 groups outside in Slurm's order, 0 in the launch's" in event.evidence
    assert "nodes per leaf switch: even: 2, odd: 2" in event.evidence
    (attempt,) = describe(run).attempts
    assert attempt.placement is not None and "ranks follow them" in attempt.placement
    assert why(run, tree.slurm).placement is None, "no group leaves its leaf"


@pytest.mark.variant("test_ranks_follow_leaves_where_names_cross_them")
def test_groups_that_leave_their_leaf_are_named(tree: Site, tmp_path: Path) -> None:
    """Only one node under each leaf is free: no order helps."""
    tree.sandbox.command("scontrol", "update", "NodeName=n[2-3]", "State=DRAIN", "Reason=test")
    try:
        run = tree.run(tmp_path, gpus=2, pp=1)
    finally:
        tree.sandbox.command("scontrol", "update", "NodeName=n[2-3]", "State=RESUME")
    assert ranks_of(run) == {0: "n0", 1: "n1"}
    assert placed(run).groups_outside == 1
    words = why(run, tree.slurm).placement
    assert words is not None and "1 of 1 groups of dp 2 leave their leaf switch" in words
    assert statuses([run], tree.slurm)[0].readable


def test_a_job_within_one_leaf_keeps_its_order(tree: Site, tmp_path: Path) -> None:
    tree.sandbox.command("scontrol", "update", "NodeName=n[1,3]", "State=DRAIN", "Reason=test")
    try:
        run = tree.run(tmp_path, gpus=2, pp=1)
    finally:
        tree.sandbox.command("scontrol", "update", "NodeName=n[1,3]", "State=RESUME")
    assert ranks_of(run) == {0: "n0", 1: "n2"}
    assert placed(run).reason == "2 nodes in 1 leaf switch"
    assert not list(run.layout.logs.glob("*/hosts-*")), "no host file: ranks stay bound"


@pytest.fixture(scope="module")
def blocks(newer_slurm: Path) -> Iterator[Site]:
    """Two blocks of two nodes whose names alternate, on a Slurm with topology/block."""
    shape = four(two_leaves(("n0", "n2"), ("n1", "n3")), blocks=True)
    with own_sandbox(shape, newer_slurm) as box:
        yield Site(box, "{plugin: block, nodes_per_leaf: 2}", domain=2)


@pytest.mark.nightly("newer releases of Slurm, which are fetched")
def test_segments_keep_groups_in_blocks(blocks: Site, tmp_path: Path) -> None:
    run = blocks.run(tmp_path, gpus=4, pp=2)
    assert "#SBATCH --segment=2\n" in run.layout.script.read_text()
    assert ranks_of(run) == {0: "n0", 1: "n2", 2: "n1", 3: "n3"}
    event = placed(run)
    assert event.groups_outside == 0
    assert "nodes per block: even: 2, odd: 2" in event.evidence


@pytest.mark.nightly("newer releases of Slurm, which are fetched")
def test_the_controller_takes_no_other_segments(blocks: Site, tmp_path: Path) -> None:
    script = blocks.prepared(tmp_path, gpus=2, pp=1).script
    assert "#SBATCH --segment=2\n" in script, "for a job that fits into one block as well"
    blocks.slurm.test_only(script)
    for nodes, segment in ((3, 2), (4, 3)):
        wrong = f"#!/bin/sh\n#SBATCH --nodes={nodes}\n#SBATCH --segment={segment}\n"
        with pytest.raises(SlurmRefusedError):
            blocks.slurm.test_only(wrong)


@pytest.fixture(scope="module", params=["block", "tree"])
def yaml_site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """The same nodes on a Slurm that reads topology.yaml, and whose configuration names no plugin.

    None reads it but the newest of the releases here.
    """
    if request.config.getoption("--slurm") not in (None, NEWER[-1]):
        pytest.skip(f"only Slurm {NEWER[-1]} reads topology.yaml")
    kind: str = request.param
    shape = four(two_leaves(("n0", "n2"), ("n1", "n3")), blocks=kind == "block")
    with own_sandbox(replace(shape, topology_yaml=True), fetched(NEWER[-1])) as box:
        yield Site(box, f"{{plugin: {kind}, nodes_per_leaf: 2}}", domain=2)


@pytest.mark.nightly("newer releases of Slurm, which are fetched")
def test_what_topology_yaml_says_is_found_and_followed(
    yaml_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in yaml_site.sandbox.environment().items():
        monkeypatch.setenv(name, value)
    facts = ClusterQueries(user_name()).facts()
    assert facts.config.get("TopologyPlugin") in ("", "topology/flat"), "it does not tell"
    kind = "block" if yaml_site.sandbox.shape.leaves_are_blocks else "tree"
    assert facts.topology == kind
    assert {leaf.name: set(leaf.nodes) for leaf in facts.leaves} == {
        "odd": {"n0", "n2"},
        "even": {"n1", "n3"},
    }
    run = yaml_site.run(tmp_path, gpus=4, pp=2)
    assert ("--segment=2" in run.layout.script.read_text()) is (kind == "block")
    assert ranks_of(run) == {0: "n0", 1: "n2", 2: "n1", 3: "n3"}
    assert placed(run).groups_outside == 0, placed(run)
