"""Profile and cluster compared: each untrue value is named with both values and its weight."""

from __future__ import annotations

from pathlib import Path

import pytest
from foreign_clusters import DGX_H100, GB200, MI250X, UNIVERSITY
from test_site_detected import CATALOGUE, site

from hpctrain.site.detected import detected_profile
from hpctrain.site.differences import Difference, differences
from hpctrain.spec.loader import load_profile

SITES = {"dgx": DGX_H100, "lumi": MI250X, "nvl72": GB200, "uni": UNIVERSITY}


def compared(tmp_path: Path, name: str, *changes: tuple[str, str]) -> dict[str, Difference]:
    """Differences by field after lines of the detected profile were changed."""
    facts = site(SITES[name])
    text = detected_profile(facts, CATALOGUE).text
    for old, new in changes:
        assert old in text, f"{old} is not in\n{text}"
        text = text.replace(old, new, 1)
    path = tmp_path / "changed.yaml"
    path.write_text(text)
    found = differences(load_profile(path).document, facts)
    return {one.field: one for one in found}


@pytest.mark.parametrize("name", SITES)
def test_a_detected_profile_is_what_the_cluster_is(name: str, tmp_path: Path) -> None:
    assert not [one.sentence for one in compared(tmp_path, name).values() if one.matters]


@pytest.mark.parametrize(
    ("name", "old", "new", "field", "severity", "values"),
    [
        ("dgx", "count: 64", "count: 65", "nodes.count", "refused", ("65", "64")),
        ("dgx", "count: 64", "count: 60", "nodes.count", "harmless", ("60", "64")),
        ("dgx", "cpus: 224", "cpus: 256", "nodes.cpus", "refused", ("256", "224")),
        ("dgx", "cpus: 224", "cpus: 112", "nodes.cpus", "slower", ("112", "224")),
        ("dgx", "per_node: 8", "per_node: 4", "gpu.per_node", "slower", ("4", "8")),
        ("dgx", "memory: 2048576MiB", "memory: 2TiB", "nodes.memory", "refused",
         ("2TiB", "2048576MiB")),
        ("dgx", "- name: spot", "- name: sport", "slurm.partitions[1].name", "refused",
         ("sport", "not there (but batch, spot, admin)")),
        ("dgx", "max_walltime: 2-00:00:00", "max_walltime: 3-00:00:00",
         "slurm.partitions[0].max_walltime", "refused", ("3-00:00:00", "2-00:00:00")),
        ("dgx", "max_walltime: 2-00:00:00", "max_walltime: 1-00:00:00",
         "slurm.partitions[0].max_walltime", "harmless", ("1-00:00:00", "2-00:00:00")),
        ("dgx", "max_nodes: 32", "max_nodes: 64", "slurm.partitions[1].max_nodes", "refused",
         ("64", "32")),
        ("dgx", "mode: requeue", "mode: cancel", "slurm.partitions[1].preemption.mode",
         "loses work", ("cancel", "requeue")),
        ("dgx", "grace: 120s", "grace: 5min", "slurm.partitions[1].preemption.grace",
         "loses work", ("00:05:00", "120s")),
        ("dgx", "grace: 120s", "grace: 30s", "slurm.partitions[1].preemption.grace",
         "harmless", ("30s", "120s")),
        ("dgx", "user_signal: true", "user_signal: false",
         "slurm.partitions[1].preemption.user_signal", "harmless", ("no", "yes")),
        ("dgx", "kill_wait: 30s", "kill_wait: 60s", "slurm.kill_wait", "loses work",
         ("00:01:00", "30s")),
        ("dgx", "nodes_per_leaf: 16", "nodes_per_leaf: 18", "network.switches.nodes_per_leaf",
         "slower", ("18", "16")),
        ("dgx", "plugin: tree", "plugin: block", "network.switches.plugin", "refused",
         ("block", "tree")),
        ("nvl72", "nodes_per_leaf: 18", "nodes_per_leaf: 36", "network.switches.nodes_per_leaf",
         "refused", ("36", "18")),
        ("dgx", "type: h100", "type: a100", "gpu.type", "slower", ("a100", "h100")),
        ("dgx", "exclusive: true", "constraint: hbm80g&x", "slurm.constraint", "refused",
         ("x", "no node has it")),
        ("lumi", "account: project_1", "account: project_9", "slurm.account", "refused",
         ("project_9", "project_1, project_2 for me")),
        ("lumi", "exclusive: true", "qos: special", "slurm.qos", "refused",
         ("special", "debug, normal")),
        ("uni", "- name: gpu", "- name: long", "slurm.partitions[0].name", "refused",
         ("long", "closed: it is for accounts physics, and yours are ml")),
        ("uni", "slurm:\n", "continuation: chain\nslurm:\n", "continuation", "refused",
         ("chain", "login1, login2 only may submit")),
        ("uni", "type: a100", "type: a800", "gpu.type", "refused", ("a800", "a100, v100")),
        ("uni", "        type: h100", "        type: h800", "slurm.partitions[1].gpu.type",
         "refused", ("h800", "h100")),
        ("uni", "        count: 1", "        count: 2", "slurm.partitions[1].nodes.count",
         "refused", ("2", "1")),
    ],
)  # fmt: skip
def test_what_is_changed_is_named(
    name: str,
    old: str,
    new: str,
    field: str,
    severity: str,
    values: tuple[str, str],
    tmp_path: Path,
) -> None:
    found = compared(tmp_path, name, (old, new))
    assert field in found, found.keys()
    one = found[field]
    assert (one.severity, one.in_profile, one.on_cluster) == (severity, *values)
    assert one.source and one.consequence in one.sentence


def test_preemption_that_the_profile_does_not_know(tmp_path: Path) -> None:
    text = "      preemption:\n        mode: requeue"
    found = compared(tmp_path, "dgx", (text, "      preemption:\n        mode: off"))
    one = found["slurm.partitions[1].preemption.mode"]
    assert one.severity == "loses work" and "lose their nodes" in one.consequence


def test_what_matters_most_comes_first(tmp_path: Path) -> None:
    changes = (
        ("cpus: 224", "cpus: 112"),
        ("count: 64", "count: 65"),
        ("kill_wait: 30s", "kill_wait: 40s"),
    )
    severities = [one.severity for one in compared(tmp_path, "dgx", *changes).values()]
    assert severities[:3] == ["refused", "loses work", "slower"]
