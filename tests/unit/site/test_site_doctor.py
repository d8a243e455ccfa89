"""Sentences of `doctor` about clusters with other settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from foreign_clusters import DGX_H100, GB200, MI250X, UNIVERSITY, config, partition
from test_site_detected import CATALOGUE, LOGIN, site

from hpctrain.base.disk_usage import Directory
from hpctrain.site.detected import detected_profile
from hpctrain.site.differences import Difference, differences
from hpctrain.site.doctor import SiteFinding, judge_site
from hpctrain.spec.loader import load_profile
from hpctrain.spec.profile import ClusterProfile


def judged(texts: dict[str, str], profile: ClusterProfile | None = None) -> dict[str, SiteFinding]:
    facts = site(texts)
    return {one.topic: one for one in judge_site(facts.cluster, facts.login, profile)}


def profile_of(texts: dict[str, str], tmp_path: Path, *changes: tuple[str, str]) -> ClusterProfile:
    text = detected_profile(site(texts), CATALOGUE).text
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    return load_profile(path).document


def with_config(**changes: str) -> dict[str, str]:
    return {**DGX_H100, "config": config(**changes)}


def test_a_plain_site() -> None:
    found = judged(DGX_H100)
    assert not [one.sentence for one in found.values() if one.state == "fails"]
    assert "JobRequeue=1" in found["requeue"].sentence
    assert "121 s" in found["requeue"].sentence or "2.02 min" in found["requeue"].sentence
    assert "not preempted" in found["preemption"].sentence
    assert "86400 s" in found["placement"].sentence
    assert found["binding"].state == "works"


def test_what_the_profile_gives_up_is_said(tmp_path: Path) -> None:
    options = ("slurm:\n", "slurm:\n  options: {srun: {wait: 60}}\n")
    found = judged(DGX_H100, profile_of(DGX_H100, tmp_path, options))["profile"]
    assert (found.state, found.source) == ("limited", "slurm.options.srun.wait")


@pytest.mark.parametrize(
    ("changes", "topic", "state", "words"),
    [
        ({"requeue": "0"}, "requeue", "works", "JobRequeue=0"),
        ({"kill_wait": "5"}, "KillWait", "limited", "5 s"),
        ({"kill_wait": "60"}, "KillWait", "works", "60 s"),
        ({"tree_width": "1"}, "UnkillableStepTimeout", "limited", "healthy ones wait 60 s"),
        ({"tree_width": "1", "unkillable": "61"}, "UnkillableStepTimeout", "works", "61 s"),
        ({"tree_width": "65533"}, "UnkillableStepTimeout", "works", "60 s"),
        ({"version": "21.08.8"}, "version", "fails", "22.05 or newer"),
        ({"controller": "rl_enable,rl_refill_rate=5"}, "rate limit", "works",
         "30 calls of a user at once and 5 a second"),
        ({"scheduler": "requeue_setup_env_fail"}, "login shell", "limited", "login shell"),
        ({"over": "5"}, "beyond the limit", "works", "5 min beyond"),
        ({"submit": "lua"}, "refusals", "limited", "script of the site"),
    ],
)  # fmt: skip
def test_a_setting_has_its_sentence(
    changes: dict[str, str], topic: str, state: str, words: str
) -> None:
    found = judged(with_config(**changes))[topic]
    assert found.state == state and words in found.sentence


@pytest.mark.parametrize(
    ("mode", "grace", "parameters", "preemption", "signal"),
    [
        ("REQUEUE", "120", "send_user_signal", ("works", "wait again"), ("works", "yes")),
        ("REQUEUE", "30", "(null)", ("works", "grace of 30 s"),
         ("limited", "TERM only, grace 30 s")),
        ("CANCEL", "0", "(null)", ("limited", "and end"), ("limited", "grace 0 s")),
        ("SUSPEND,GANG", "0", "(null)", ("fails", "suspended"), None),
        ("OFF", "0", "(null)", ("works", "not preempted"), None),
    ],
)  # fmt: skip
def test_how_nodes_are_lost(
    mode: str,
    grace: str,
    parameters: str,
    preemption: tuple[str, str],
    signal: tuple[str, str] | None,
) -> None:
    text = partition("spot", Default="YES", PreemptMode=mode, GraceTime=grace)
    changed = {
        **with_config(preempt_type="preempt/partition_prio", preempt_parameters=parameters),
        "partition": text + partition("batch", PriorityTier="10"),
    }
    found = judged(changed)
    assert found["preemption"].state == preemption[0]
    assert preemption[1] in found["preemption"].sentence
    if signal is None:
        assert "user signal" not in found
    else:
        assert found["user signal"].state == signal[0]
        assert signal[1] in found["user signal"].sentence


def test_nobody_preempts_where_no_partition_of_these_nodes_is_higher() -> None:
    preempted = partition("spot", Default="YES", PreemptMode="REQUEUE", GraceTime="60")
    changed = with_config(preempt_type="preempt/partition_prio")
    alone = judged({**changed, "partition": preempted + partition("batch")})
    assert "not preempted" in alone["preemption"].sentence
    elsewhere = partition("other", PriorityTier="9")
    assert (
        "not preempted"
        in judged({**changed, "partition": preempted + elsewhere})["preemption"].sentence
    ), "it has none of these nodes"
    higher = judged({**changed, "partition": preempted + partition("batch", PriorityTier="9")})
    assert "preempted by batch" in higher["preemption"].sentence


def test_only_a_qos_that_preempts_ours_takes_nodes() -> None:
    usual = UNIVERSITY["qos"]
    here = {**UNIVERSITY, "partition": partition("gpu", Default="YES")}
    both = {**here, "qos": usual + "other|normal|requeue|00:00:10||||\n"}
    assert "preempted by normal after a grace of 45 s" in judged(both)["preemption"].sentence
    safe = {**both, "user": UNIVERSITY["user"].replace("scavenge", "other")}
    assert "not preempted" in judged(safe)["preemption"].sentence


def test_who_pays(tmp_path: Path) -> None:
    assert "nobody" in judged(DGX_H100)["account"].sentence
    found = judged(MI250X)["account"]
    assert "`project_1`" in found.sentence and "project_2" in found.sentence
    assert "GrpTRES=gres/gpu=1024" in found.sentence
    wrong = profile_of(MI250X, tmp_path, ("account: project_1", "account: other"))
    assert judged(MI250X, wrong)["account"].state == "fails"
    nobody = {**MI250X, "user": ""}
    assert judged(nobody)["account"].state == "fails"


def test_a_university(tmp_path: Path) -> None:
    profile = profile_of(UNIVERSITY, tmp_path, ("slurm:\n", "continuation: chain\nslurm:\n"))
    found = judged(UNIVERSITY, profile)
    assert found["sbatch on nodes"].state == "fails", "AllocNodes has login nodes only"
    assert "require_timelimit" in found["refusals"].sentence or "lua" in found["refusals"].sentence
    assert "50 calls" in found["rate limit"].sentence
    assert "scavenge" not in found["preemption"].sentence
    assert "preempted by normal after a grace of 45 s" in found["preemption"].sentence
    assert "summer" in found["maintenance"].sentence
    assert "for accounts physics" in found["closed partition"].sentence
    assert judged(UNIVERSITY)["sbatch on nodes"].state in ("works", "limited")


def test_nodes_out_of_service() -> None:
    assert "1 of 36" in judged(GB200)["nodes"].sentence


def test_this_machine_without_a_controller() -> None:
    found = {one.topic: one for one in judge_site(None, LOGIN)}
    assert found.keys() == {"python", "disk", "files"}
    assert {one.state for one in found.values()} == {"works"}
    full = Directory("/scratch/runs", False, 2**30, 0, 1000)
    poor = replace(LOGIN, python=(3, 9, 1), runs=full)
    found = {one.topic: one for one in judge_site(None, poor)}
    assert (found["python"].state, found["disk"].state, found["files"].state) == (
        "fails",
        "limited",
        "fails",
    )
    unseen = replace(LOGIN, runs=Directory("/away"))
    assert {one.topic: one for one in judge_site(None, unseen)}["disk"].state == "unknown"


def test_clocks_are_compared() -> None:
    cluster = site(DGX_H100).cluster
    for ahead, state, words in (
        (0.4, "works", "agree"),
        (90.0, "limited", "ahead of"),
        (-90.0, "limited", "behind"),
        (None, "unknown", "not known"),
    ):
        changed = replace(cluster, clock_ahead_seconds=ahead)
        found = {one.topic: one for one in judge_site(changed, LOGIN)}["clock"]
        assert found.state == state and words in found.sentence


def test_a_slow_controller_is_said_to_be_slow() -> None:
    cluster = replace(site(DGX_H100).cluster, config_seconds=9.0)
    found = {one.topic: one for one in judge_site(cluster, LOGIN)}["controller"]
    assert found.state == "limited" and "9 s" in found.sentence


# -- Profile and cluster compared: each untrue value is named with both values and its weight ---


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
