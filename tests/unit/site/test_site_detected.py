"""Profiles of clusters that nobody here has: they validate, and every value has its source."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from foreign_clusters import (
    DGX_H100,
    DGX_SURVEY,
    GB200,
    MI250X,
    PAIRS,
    ROCM,
    UNIVERSITY,
    Answers,
    config,
    node,
    partition,
    survey,
)
from virtual_clock import VirtualClock

from hpctrain.base import clock
from hpctrain.base.disk_usage import Directory
from hpctrain.base.errors import InvalidInputError
from hpctrain.site.detected import DetectedProfile, detected_profile
from hpctrain.site.differences import differences
from hpctrain.site.facts import LoginFacts, SiteFacts, mounts, node_survey
from hpctrain.site.hardware import groups_of, known_gpu
from hpctrain.slurm.cluster_queries import ClusterQueries, nodes
from hpctrain.spec.loader import load_catalogue, load_profile
from hpctrain.spec.profile import ClusterProfile

CATALOGUE = load_catalogue()
LOGIN = LoginFacts(
    host="login1",
    user="me",
    python=(3, 11, 7),
    interpreter="/sw/venv/bin/python",
    machine="x86_64",
    groups=("users",),
    runs=Directory("/lustre/me/runs", free_bytes=10**15, free_inodes=10**8, inodes=10**9),
    mounts=mounts("/dev/sda1 / xfs rw 0 0\nmds:/l /lustre lustre rw 0 0\nh:/h /home nfs rw 0 0\n"),
    variables={"HOME": "/home/me", "SCRATCH": "/lustre/me"},
)


def site(texts: dict[str, str], surveyed: str | None = None) -> SiteFacts:
    with clock.replaced(VirtualClock(begins_at=0.0)):
        facts = ClusterQueries("me", {}, run=Answers(texts)).facts()
    return SiteFacts(facts, LOGIN, node_survey(surveyed) if surveyed else None)


def loaded(found: DetectedProfile, directory: Path) -> ClusterProfile:
    path = directory / "detected.yaml"
    path.write_text(found.text)
    return load_profile(path).document


def detected(
    tmp_path: Path, texts: dict[str, str], surveyed: str | None = None, **options: str
) -> tuple[ClusterProfile, DetectedProfile]:
    found = detected_profile(site(texts, surveyed), CATALOGUE, **options)
    return loaded(found, tmp_path), found


@pytest.mark.parametrize(
    ("texts", "surveyed"),
    [(DGX_H100, None), (DGX_H100, DGX_SURVEY), (MI250X, None), (GB200, None), (UNIVERSITY, None)],
    ids=["dgx", "dgx-job", "mi250x", "gb200", "university"],
)
def test_every_value_says_where_it_comes_from(
    texts: dict[str, str], surveyed: str | None, tmp_path: Path
) -> None:
    _, found = detected(tmp_path, texts, surveyed)
    lines = found.text.splitlines()
    assert max(map(len, lines)) <= 100
    for number, line in enumerate(lines):
        if re.match(r"\s*(- )?\w+: \S", line):
            above = lines[number - 1].lstrip() if number else ""
            marks = (" # from: ", " # guess: ", " # ASK: ")
            stated = any(mark in line for mark in marks) or above.startswith("# ")
            assert stated, line
    guessed = sum(line.count("# guess: ") for line in lines)
    assert guessed == len(found.guessed) > 0


def test_a_dgx_cluster_from_its_login_node(tmp_path: Path) -> None:
    profile, found = detected(tmp_path, DGX_H100)
    assert (profile.name, profile.nodes.count, profile.nodes.cpus) == ("dgx", 64, 224)
    assert int(profile.nodes.memory) == (2063937 - 15361) * 2**20
    assert (profile.gpu.type, profile.gpu.per_node, profile.gpu.model) == (
        "h100",
        8,
        "H100-80GB SXM",
    )
    assert "gpu.memory" in found.guessed, "Slurm says h100, which has two sizes"
    batch, spot = profile.slurm.partitions
    assert (batch.default, batch.preemption.mode) == (True, "off")
    assert batch.max_walltime == 2 * 86400 and spot.max_walltime is None
    assert (spot.preemption.mode, spot.preemption.grace) == ("requeue", 120)
    assert spot.preemption.user_signal and spot.max_nodes == 32
    assert profile.network.switches.plugin == "tree"
    assert profile.network.switches.nodes_per_leaf == 16
    assert {one.path: one.kind for one in profile.filesystems} == {
        "/lustre": "lustre",
        "/home": "nfs",
    }
    assert not profile.gpu.emulated and profile.network.interface is None
    assert "partition `admin` is left out" not in found.text, "it has no nodes of these"


def test_a_job_turns_guesses_into_facts(tmp_path: Path) -> None:
    _, before = detected(tmp_path, DGX_H100)
    profile, after = detected(tmp_path, DGX_H100, DGX_SURVEY)
    hardware = {path for path in after.guessed if not path.startswith("filesystems")}
    assert hardware < set(before.guessed) - {"gpu.memory", "network.fabric", "nvlink.domain"}
    assert (profile.network.fabric, profile.network.nics_per_node) == ("infiniband", 8)
    assert profile.network.nic_bandwidth == 50e9 and profile.network.interface == "eth0"
    assert profile.nvlink.domain == 8 and "nvidia-smi topo -m on dgx001" in after.text
    assert {one.path for one in profile.filesystems} >= {"/lustre", "/raid"}
    assert any("pyxis, enroot" in remark for remark in after.remarks)


def test_nvlink_that_joins_pairs_only(tmp_path: Path) -> None:
    texts = {
        **DGX_H100,
        "node": node("n1", "gpu:a100:4", partitions="batch"),
        "topology": "",
    }
    gpus = "NVIDIA A100-PCIE-40GB, 40960\n" * 4
    looked = survey(
        commands={"nvidia-smi": gpus, "nvidia-smi topo": PAIRS}, gpu_devices=["/dev/nvidia0"]
    )
    profile, _ = detected(tmp_path, texts, looked)
    assert (profile.nvlink.domain, profile.gpu.model) == (2, "A100-40GB PCIe")


def test_dies_of_amd(tmp_path: Path) -> None:
    """Gres says mi250, the catalogue MI250X; accounting is enforced, nodes are exclusive."""
    profile, found = detected(tmp_path, MI250X)
    assert (profile.gpu.model, profile.gpu.type, profile.gpu.gres) == (
        "MI250X",
        "mi250x",
        "mi250",
    )
    assert "gpu.model" in found.guessed and profile.network.fabric == "slingshot"
    assert profile.slurm.account == "project_1"
    assert profile.limits.accounts == ("project_1", "project_2")
    assert profile.slurm.exclusive and "slurm.exclusive" not in found.guessed
    assert "slurm.partitions[0].default" in found.guessed, "Slurm has no default partition"
    looked = survey(
        commands={"rocm-smi": ROCM},
        gpu_devices=["/dev/dri/renderD128"],
        interfaces={f"hsn{i}": {"speed": "200000", "operstate": "up"} for i in range(4)},
    )
    profile, found = detected(tmp_path, MI250X, looked)
    assert profile.gpu.model == "MI250X" and "gpu.model" not in found.guessed
    assert int(profile.gpu.memory) == 68702699520
    links = profile.network
    assert (links.fabric, links.nics_per_node, links.interface) == ("slingshot", 4, "hsn")
    assert links.nic_bandwidth == 25e9 and "network.nic_bandwidth" not in found.guessed


def test_racks_of_gb200_are_one_domain(tmp_path: Path) -> None:
    profile, found = detected(tmp_path, GB200)
    assert profile.nvlink.domain == 72 and "nvlink.domain" in found.guessed
    assert (profile.network.switches.plugin, profile.network.switches.nodes_per_leaf) == (
        "block",
        18,
    )
    assert any("rack1-tray18" in remark for remark in found.remarks), "a drained node is named"
    assert "network.switches.nodes_per_leaf" not in found.guessed


def test_partitions_with_other_hardware_have_their_own_figures(tmp_path: Path) -> None:
    profile, found = detected(tmp_path, UNIVERSITY)
    assert (profile.gpu.type, profile.nodes.count) == ("a100", 3)
    assert profile.slurm.gpu_request == "gres-typed", "v100 are in the same partition"
    assert [one.name for one in profile.slurm.partitions] == ["gpu", "h100"]
    other = profile.for_partition("h100")
    assert (other.gpu.type, other.gpu.per_node, other.nodes.count) == ("h100", 4, 1)
    assert int(other.nodes.memory) == 1000000 * 2**20 and other.nodes.cpus == 224
    assert other.nvlink.bandwidth == 450e9 and profile.nvlink.bandwidth == 300e9
    assert "\n      nodes:\n        count: 1  # from: " in found.text, "what is alike is left out"
    assert any("2 other nodes, not described: 4 x v100" in remark for remark in found.remarks)
    assert any("`long` is left out" in remark for remark in found.remarks), "other accounts only"
    assert any("matlab" in remark for remark in found.remarks)
    preemption = profile.slurm.partitions[0].preemption
    assert (preemption.mode, preemption.grace) == ("requeue", 45), "by QOS normal"
    other, found = detected(tmp_path, UNIVERSITY, partition="h100")
    assert (other.name, other.gpu.type, other.gpu.per_node) == ("uni-h100", "h100", 4)
    assert other.slurm.gpu_request == "gres" and len(other.slurm.partitions) == 1


def test_a_partition_with_some_of_the_nodes_and_an_account_of_its_own(tmp_path: Path) -> None:
    texts = {
        **UNIVERSITY,
        "node": "".join(
            node(f"a{i}", "gpu:a100:4", partitions="gpu,few" if i == 1 else "gpu")
            for i in range(1, 5)
        ),
        "partition": partition("gpu", Default="YES")
        + partition("few", AllowAccounts="special", MinNodes="2", AllowQos="quick"),
        "user": "ml|ml||normal,quick|normal||||||\nml|special||normal,quick|normal||||||\n",
    }
    profile, _ = detected(tmp_path, texts)
    few = profile.slurm.partition("few")
    assert few is not None and few.account == "special" and few.qos == "quick"
    assert (few.min_nodes, profile.for_partition("few").nodes.count) == (2, 1)
    assert profile.slurm.account == "ml" and profile.for_partition("few").gpu == profile.gpu
    assert not [one for one in differences(profile, site(texts)) if one.matters]


def test_leaves_of_other_nodes_may_be_smaller(tmp_path: Path) -> None:
    texts = {
        "config": config(topology="topology/tree"),
        "node": "".join(node(f"a{i}", "gpu:h200:8", partitions="a") for i in range(4))
        + "".join(node(f"b{i}", "gpu:b200:8", partitions="b") for i in range(2)),
        "partition": partition("a", Default="YES") + partition("b"),
        "topology": "SwitchName=s0 Level=0 LinkSpeed=1 Nodes=a[0-3]\n"
        "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=b[0-1]\n",
    }
    profile, _ = detected(tmp_path, texts)
    assert profile.network.switches.nodes_per_leaf == 4
    assert profile.for_partition("b").network.switches.nodes_per_leaf == 2
    assert profile.for_partition("b").network.switches.plugin == "tree"


def test_a_partition_whose_gpu_nobody_knows_is_left_out(tmp_path: Path) -> None:
    texts = {
        "config": config(),
        "node": "".join(node(f"n{i}", "gpu:h200:8", partitions="p") for i in range(2))
        + node("x", "gpu:zeta9:4", partitions="new"),
        "partition": partition("p", Default="YES") + partition("new"),
    }
    profile, found = detected(tmp_path, texts)
    assert [one.name for one in profile.slurm.partitions] == ["p"]
    assert any("--partition new --gpu MODEL" in remark for remark in found.remarks)


def test_a_job_on_another_kind_of_node_describes_none_of_these(tmp_path: Path) -> None:
    profile, found = detected(tmp_path, UNIVERSITY, survey(host="v1.cluster.example"))
    assert any("which is none of these nodes" in remark for remark in found.remarks)
    assert not profile.gpu.emulated


def test_a_type_with_two_sizes_is_the_smaller_one_unless_a_feature_says_more() -> None:
    (plain,) = groups_of(nodes(node("n", "gpu:a100:4", partitions="p")))
    found = known_gpu(plain, CATALOGUE)
    assert found.gpu is not None and found.gpu.name == "A100-40GB SXM" and found.is_guess
    (said,) = groups_of(nodes(node("n", "gpu:a100:4", partitions="p", features="gpu,hbm80g")))
    found = known_gpu(said, CATALOGUE)
    assert found.gpu is not None and found.gpu.name == "A100-80GB SXM" and not found.is_guess
    (one,) = groups_of(nodes(node("n", "gpu:h200:8", partitions="p")))
    assert not known_gpu(one, CATALOGUE).is_guess


def test_one_type_with_a_feature_of_its_own_in_a_mixed_partition(tmp_path: Path) -> None:
    texts = {
        "config": config(),
        "node": "".join(
            node(f"b{i}", "gpu:a100:8", partitions="gpu", features="ib,a100_80") for i in (1, 2)
        )
        + node("s1", "gpu:a100:4", partitions="gpu", features="ib"),
        "partition": partition("gpu", Default="YES"),
    }
    profile, _ = detected(tmp_path, texts)
    assert profile.for_partition("gpu").slurm.constraint == "a100_80"
    assert profile.nodes.count == 2


def test_a_gpu_without_a_name_is_asked_for(tmp_path: Path) -> None:
    texts = {
        "config": config(),
        "node": node("n1", "gpu:8", partitions="p"),
        "partition": partition("p", Default="YES"),
    }
    with pytest.raises(InvalidInputError) as caught:
        detected_profile(site(texts), CATALOGUE)
    assert "--gpu" in (caught.value.problems[0].hint or "")
    profile, _ = detected(tmp_path, texts, model="H200-141GB SXM")
    assert profile.gpu.model == "H200-141GB SXM"


def test_clusters_without_gpus_or_open_partitions_have_no_profile() -> None:
    plain = {
        "config": config(),
        "node": node("n1", "(null)", partitions="p"),
        "partition": partition("p"),
    }
    with pytest.raises(InvalidInputError, match="has GPUs"):
        detected_profile(site(plain), CATALOGUE)
    closed = {
        **plain,
        "node": node("n1", "gpu:h200:8", partitions="p"),
        "partition": partition("p", State="DOWN"),
    }
    with pytest.raises(InvalidInputError, match="no partition"):
        detected_profile(site(closed), CATALOGUE)
    with pytest.raises(InvalidInputError, match="nowhere"):
        detected_profile(site(closed), CATALOGUE, partition="nowhere")


def test_nodes_at_one_address_are_a_sandbox(tmp_path: Path) -> None:
    text = "".join(node(f"n{i}", "gpu:a100:2", partitions="p", memory=16000) for i in range(2))
    texts = {
        "config": config(),
        "node": re.sub(r"NodeAddr=\S+", "NodeAddr=127.0.0.1", text),
        "partition": partition("p", Default="YES"),
    }
    profile, found = detected(tmp_path, texts)
    assert profile.gpu.emulated and profile.network.interface == "lo"
    assert "gpu.emulated" in found.guessed


def test_names_of_a_site_stay_text(tmp_path: Path) -> None:
    """Names that YAML would read as something else, and texts that would end a comment."""
    texts = {
        "config": config(name="on"),
        "node": node("n1", "gpu:h200:8", partitions="1e3,off"),
        "partition": partition("1e3", Default="YES") + partition("off"),
        "licenses": "LicenseName=a#b:\x1b[31m Total=1 Used=0 Free=1 Reserved=0 Remote=no\n",
    }
    facts = site(texts)
    odd = replace(facts, login=replace(LOGIN, mounts=mounts("x /a:\\040b#c lustre rw 0 0\n")))
    profile = loaded(detected_profile(odd, CATALOGUE), tmp_path)
    assert [one.name for one in profile.slurm.partitions] == ["1e3", "off"]
    assert "\x1b" not in "".join(detected_profile(odd, CATALOGUE).remarks)
    assert profile.name == "on" and profile.filesystems[0].path == "/a: b#c"
