"""Sandboxes: shapes that make no sense, and the configuration for versions that differ."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpctrain.base.errors import UsageError
from hpctrain.sandbox.config import Site, config_files, gres_conf, slurm_conf, topology_conf
from hpctrain.sandbox.daemons import slurmdbd_conf
from hpctrain.sandbox.paths import Ports, SandboxPaths
from hpctrain.sandbox.shape import (
    PartitionShape,
    SandboxShape,
    SiteShape,
    SwitchShape,
    default_shape,
    shape_from_profile,
)
from hpctrain.spec.loader import find_profile, load_profile

PATHS = SandboxPaths(Path("/box"), Path("/box/sockets"))


def site(nodes: int = 4, version: tuple[int, int] = (22, 5)) -> Site:
    return Site(PATHS, Ports(20000, nodes), "alice", version)


def keys(text: str) -> dict[str, str]:
    """Every line that is no comment; slurm.conf(5) ignores the case of keys."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    names = [line.partition("=")[0].lower() for line in lines]
    single = [name for name in names if name != "partitionname"]
    assert len(single) == len(set(single)), "a key occurs twice"
    return {line.partition("=")[0]: line.partition("=")[2] for line in lines}


def test_many_slurmds_on_one_machine_have_more_time_to_reply() -> None:
    small, large = (keys(slurm_conf(default_shape(nodes=n), site(n))) for n in (4, 64))
    assert (small["MessageTimeout"], large["MessageTimeout"]) == ("5", "20")
    assert small["UnkillableStepTimeout"] == "60"
    # a slurmstepd waits 60 s for a lost node below it, and its node must not be drained for that
    assert int(large["UnkillableStepTimeout"]) > 2 * 60


def test_what_trials_have_taught_is_in_the_file() -> None:
    found = keys(slurm_conf(default_shape(), site()))
    assert found["SlurmUser"] == found["SlurmdUser"] == "alice"
    assert found["AuthInfo"] == "socket=/box/sockets/munge.socket,cred_expire=5"
    assert found["CommunicationParameters"] == "NoCtldInAddrAny,NoInAddrAny"
    assert found["ReturnToService"] == "1"
    assert found["RequeueExit"] == "85"
    assert int(found["UnkillableStepTimeout"]) >= 60
    assert int(found["MinJobAge"]) >= 300
    assert found["ProctrackType"] == "proctrack/linuxproc"
    assert found["SlurmctldPort"] == "20000"


def test_two_sandboxes_may_be_two_clusters() -> None:
    named = [
        slurm_conf(replace(default_shape(), cluster_name=n), site()) for n in ("here", "there")
    ]
    assert [keys(text)["ClusterName"] for text in named] == ["here", "there"]
    assert keys(slurm_conf(default_shape(), site()))["ClusterName"] == "sandbox"


def test_plugins_lie_beside_an_unpacked_slurm() -> None:
    unpacked = replace(site(), plugins=Path("/newer/plugins"))
    assert keys(slurm_conf(default_shape(), unpacked))["PluginDir"] == "/newer/plugins"
    assert "PluginDir" not in slurm_conf(default_shape(), site())


def test_nothing_refers_to_the_slurm_of_the_system() -> None:
    text = "".join(file.text for file in config_files(default_shape(), site()))
    assert "/etc" not in text
    assert "/var" not in text
    assert "/run/munge" not in text


def test_all_nodes_share_one_line_with_contiguous_ports() -> None:
    found = keys(slurm_conf(default_shape(nodes=4, gpus_per_node=2), site()))
    assert found["NodeName"] == (
        "n[0-3] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[20001-20004] CPUs=8 "
        "RealMemory=16000 Gres=gpu:a100:2 State=UNKNOWN"
    )


def test_a_single_node_has_no_brackets() -> None:
    found = keys(slurm_conf(default_shape(nodes=1), site(nodes=1)))
    assert found["NodeName"].startswith("n0 ")
    assert " Port=20001 " in found["NodeName"]


def test_nodes_with_different_features_have_lines_of_their_own() -> None:
    shape = default_shape(nodes=4)
    east = replace(shape.usual_nodes, nodes=1, features=("east",))
    west = replace(shape.usual_nodes, nodes=3, features=("west",))
    text = slurm_conf(replace(shape, groups=(east, west)), site())
    one, other = [line for line in text.splitlines() if line.startswith("NodeName=")]
    assert one.startswith("NodeName=n0 ") and " Port=20001 " in one
    assert " Features=east State=UNKNOWN" in one
    assert other.startswith("NodeName=n[1-3] ") and " Port=[20002-20004] " in other
    assert " Features=west State=UNKNOWN" in other


def test_other_kinds_of_nodes_have_hardware_of_their_own() -> None:
    shape = default_shape(nodes=3)
    some = replace(shape.usual_nodes, nodes=1)
    others = replace(
        some, nodes=2, prefix="h", cpus=96, threads_per_core=2, gpu_type="h100", gpus=4
    )
    shape = replace(shape, groups=(some, others))
    usual, own = [
        line for line in slurm_conf(shape, site()).splitlines() if line.startswith("NodeName=")
    ]
    assert usual.startswith("NodeName=n0 ") and " Gres=gpu:a100:2 " in usual
    assert own == (
        "NodeName=h[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[20002-20003] CPUs=96 "
        "Sockets=1 CoresPerSocket=48 ThreadsPerCore=2 RealMemory=16000 Gres=gpu:h100:4 "
        "State=UNKNOWN"
    )
    assert gres_conf(shape, site()).splitlines()[1:] == [
        "NodeName=n0 Name=gpu Type=a100 File=/box/sockets/dev/gpu[0-1]",
        "NodeName=h[1-2] Name=gpu Type=h100 File=/box/sockets/dev/gpu[0-3]",
    ]


def test_licences_plug_in_and_module_system_of_a_site() -> None:
    text = "return slurm.SUCCESS"
    shape = replace(
        default_shape(), licenses=("a:1", "b:2"), job_submit_lua=text, site=SiteShape(modules=())
    )
    files = {file.name: file.text for file in config_files(shape, site())}
    found = keys(files["slurm.conf"])
    assert (found["Licenses"], found["JobSubmitPlugins"]) == ("a:1,b:2", "lua")
    assert found["TaskProlog"] == "/box/modules/task-prolog"
    assert files["job_submit.lua"] == text
    usual = keys(slurm_conf(default_shape(), site()))
    assert not {"Licenses", "JobSubmitPlugins", "TaskProlog"} & set(usual)


def test_nodes_without_gpus_claim_none() -> None:
    shape = default_shape(gpus_per_node=0)
    assert "Gres=" not in slurm_conf(shape, site())
    assert gres_conf(shape, site()) == "AutoDetect=off\n"


def test_every_gpu_has_a_file() -> None:
    assert gres_conf(default_shape(gpus_per_node=8), site()).splitlines()[1] == (
        "NodeName=n[0-3] Name=gpu Type=a100 File=/box/sockets/dev/gpu[0-7]"
    )


@pytest.mark.parametrize(
    ("seconds", "minutes"), [(None, "INFINITE"), (1, "1"), (60, "1"), (61, "2"), (86400, "1440")]
)
def test_time_limits_are_rounded_up_to_minutes(seconds: int | None, minutes: str) -> None:
    partition = PartitionShape("p", max_walltime_seconds=seconds, default=True)
    text = slurm_conf(replace(default_shape(), partitions=(partition,)), site())
    assert f" MaxTime={minutes} " in text


def test_partitions_say_who_preempts_whom() -> None:
    lines = slurm_conf(default_shape(grace_seconds=9), site()).splitlines()[-2:]
    assert lines == [
        "PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 State=UP "
        "PreemptMode=REQUEUE GraceTime=9",
        "PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE PriorityTier=10 State=UP "
        "PreemptMode=OFF GraceTime=0",
    ]


def test_without_preemption_no_partition_mentions_it() -> None:
    found = slurm_conf(replace(default_shape(), preempt_type="none"), site())
    assert "PreemptType=preempt/none" in found
    assert "PreemptMode" not in found
    assert "GraceTime" not in found


@pytest.mark.parametrize(
    ("version", "key", "value"),
    [
        ((22, 5), "SlurmctldParameters", "preempt_send_user_signal"),
        ((23, 2), "PreemptParameters", "send_user_signal"),
        ((25, 11), "PreemptParameters", "send_user_signal"),
    ],
)
def test_the_user_signal_is_spelled_by_version(
    version: tuple[int, int], key: str, value: str
) -> None:
    shape = default_shape(user_signal_on_preempt=True)
    found = keys(slurm_conf(shape, site(version=version)))
    assert {name: found[name] for name in found if name.endswith("Parameters")}[key] == value
    assert len({"SlurmctldParameters", "PreemptParameters"} & set(found)) == 1
    assert value not in slurm_conf(default_shape(), site(version=version))


def test_cgroups_are_disabled_where_the_word_is_known() -> None:
    shape = default_shape()
    old = {file.name for file in config_files(shape, site(version=(23, 11)))}
    new = {file.name: file.text for file in config_files(shape, site(version=(24, 5)))}
    assert "cgroup.conf" not in old
    assert new["cgroup.conf"] == "CgroupPlugin=disabled\n"


def test_switches_become_a_tree() -> None:
    switches = (
        SwitchShape("leaf0", nodes=("n0", "n1")),
        SwitchShape("leaf1", nodes=("n2", "n3")),
        SwitchShape("spine", switches=("leaf0", "leaf1")),
    )
    shape = replace(default_shape(), switches=switches)
    assert topology_conf(shape, (24, 11)) == (
        "SwitchName=leaf0 Nodes=n0,n1\n"
        "SwitchName=leaf1 Nodes=n2,n3\n"
        "SwitchName=spine Switches=leaf0,leaf1\n"
    )
    assert keys(slurm_conf(shape, site()))["TopologyPlugin"] == "topology/tree"
    assert "topology.conf" in {file.name for file in config_files(shape, site())}
    assert "TopologyPlugin" not in slurm_conf(default_shape(), site())


def test_leaves_become_blocks_where_slurm_has_them() -> None:
    switches = (
        SwitchShape("rack0", nodes=("n0", "n1", "n2")),
        SwitchShape("rack1", nodes=("n3", "n4")),
        SwitchShape("spine", switches=("rack0", "rack1")),
    )
    shape = replace(default_shape(nodes=5), switches=switches, leaves_are_blocks=True)
    assert topology_conf(shape, (23, 11)) == (
        "BlockName=rack0 Nodes=n0,n1,n2\nBlockName=rack1 Nodes=n3,n4\nBlockSizes=2\n"
    )
    newer = keys(slurm_conf(shape, site(version=(24, 11))))
    assert newer["TopologyPlugin"] == "topology/block"
    assert keys(slurm_conf(shape, site(version=(22, 5))))["TopologyPlugin"] == "topology/tree"
    assert topology_conf(shape, (22, 5)).startswith("SwitchName=rack0 ")


@pytest.mark.parametrize("blocks", [True, False])
def test_switches_stand_in_yaml_where_slurm_reads_it(blocks: bool) -> None:
    switches = (
        SwitchShape("rack0", nodes=("n0", "n1")),
        SwitchShape("rack1", nodes=("n2", "n3")),
        SwitchShape("spine", switches=("rack0", "rack1")),
    )
    shape = replace(
        default_shape(), switches=switches, leaves_are_blocks=blocks, topology_yaml=True
    )
    newer = {file.name: file.text for file in config_files(shape, site(version=(25, 5)))}
    assert "TopologyPlugin" not in newer["slurm.conf"] and "topology.conf" not in newer
    (halls,) = json.loads(newer["topology.yaml"])
    assert halls["cluster_default"] is True
    if blocks:
        assert halls["block"]["block_sizes"] == [2]
        assert halls["block"]["blocks"][1] == {"block": "rack1", "nodes": "n2,n3"}
    else:
        assert halls["tree"]["switches"][2] == {"switch": "spine", "children": "rack0,rack1"}
    older = {file.name for file in config_files(shape, site(version=(24, 11)))}
    assert "topology.conf" in older and "topology.yaml" not in older


def test_finished_jobs_are_logged_on_request() -> None:
    text = slurm_conf(replace(default_shape(), accounting="filetxt"), site())
    assert keys(text)["JobCompLoc"] == "/box/log/jobcomp.txt"
    assert "JobCompType" not in slurm_conf(default_shape(), site())


def test_accounting_is_asked_for_by_the_socket_of_munge_and_on_one_port() -> None:
    shape, here = replace(default_shape(), accounting="slurmdbd"), site()
    found, database = keys(slurm_conf(shape, here)), keys(slurmdbd_conf(here))
    assert found["AccountingStoragePass"] == "/box/sockets/munge.socket"
    assert found["AccountingStorageEnforce"] == "associations,limits,qos"
    assert found["AccountingStoragePort"] == database["DbdPort"] == "20005"
    assert database["CommunicationParameters"] == "NoInAddrAny"
    assert "AccountingStorageType" not in keys(slurm_conf(default_shape(), here))


# -- Shapes that make no sense are refused with the name of what is wrong ----------------------


TRAIN = PartitionShape("train", default=True)
LEAF = SwitchShape("leaf", nodes=("n0", "n1", "n2", "n3"))


def test_names_of_nodes() -> None:
    assert default_shape(nodes=3).node_names == ("n0", "n1", "n2")
    assert default_shape(nodes=3).node_range == "n[0-2]"
    assert default_shape(nodes=1).node_range == "n0"
    assert replace(default_shape(nodes=2), node_prefix="gpu").node_range == "gpu[0-1]"


def test_urgent_outranks_train_by_default() -> None:
    train, urgent = default_shape(grace_seconds=7).partitions
    assert (train.name, train.preempt_mode, train.grace_seconds) == ("train", "REQUEUE", 7)
    assert train.default
    assert (urgent.name, urgent.preempt_mode) == ("urgent", "OFF")
    assert urgent.priority_tier > train.priority_tier


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"nodes": 0}, "1 to 1024 nodes, not 0"),
        ({"nodes": 1025}, "not 1025"),
        ({"gpus_per_node": -1}, "negative"),
        ({"cpus_per_node": 0}, "CPU"),
        ({"preempt_type": "none", "user_signal_on_preempt": True}, "without preemption"),
        ({"partitions": (TRAIN, TRAIN)}, "partition train occurs twice"),
        ({"partitions": (PartitionShape("a"),)}, "exactly one"),
        ({"partitions": (TRAIN, PartitionShape("b", default=True))}, "exactly one"),
        ({"cluster_name": "Two Words"}, "not a name of a cluster"),
        ({"groups": (default_shape(nodes=3).usual_nodes,)}, "must be those of all its nodes"),
        (
            {"threads_per_core": 3},
            "8 CPUs of a node do not divide into 1 sockets of cores with 3 threads",
        ),
        ({"switches": (LEAF, LEAF)}, "switch leaf occurs twice"),
        ({"switches": (SwitchShape("leaf"),)}, "either nodes or switches"),
        ({"switches": (replace(LEAF, nodes=("n0", "n7")),)}, "unknown n7"),
        ({"switches": (replace(LEAF, nodes=("n0", "n1")),)}, "no switch leads to n2, n3"),
        ({"switches": (LEAF, SwitchShape("other", nodes=("n0",)))}, "two switches: n0"),
        ({"switches": (LEAF, SwitchShape("spine", switches=("leaf9",)))}, "unknown leaf9"),
    ],
)
def test_nonsense_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        replace(default_shape(nodes=4), **change)


def test_a_tree_of_leaves_and_spines_is_accepted() -> None:
    leaves = (SwitchShape("l0", nodes=("n0", "n1")), SwitchShape("l1", nodes=("n2", "n3")))
    spine = SwitchShape("spine", switches=("l0", "l1"))
    assert replace(default_shape(nodes=4), switches=(*leaves, spine)).switches[-1] == spine


# -- A sandbox in the shape of a profile --------------------------------------------------------


def shape(name: str) -> SandboxShape:
    return shape_from_profile(load_profile(find_profile(name)).document)


def test_the_big_machine_has_its_leaves_under_one_spine() -> None:
    profile = load_profile(find_profile("a100x64")).document
    big = shape_from_profile(profile)
    assert (big.nodes, big.gpus_per_node, big.gpu_type) == (64, 8, "a100")
    assert [p.name for p in big.partitions] == [p.name for p in profile.slurm.partitions]
    leaves, spine = big.switches[:-1], big.switches[-1]
    assert sum(len(leaf.nodes) for leaf in leaves) == 64
    assert {len(leaf.nodes) for leaf in leaves} == {profile.network.switches.nodes_per_leaf}
    assert spine.switches == tuple(leaf.name for leaf in leaves)


def test_preemption_and_grace_are_taken_over() -> None:
    small = shape("sandbox")
    train, urgent = small.partitions
    assert (train.preempt_mode, train.grace_seconds, train.default) == ("REQUEUE", 20, True)
    assert urgent.priority_tier > train.priority_tier
    assert (small.preempt_type, small.kill_wait_seconds) == ("partition_prio", 5)
    assert small.switches == ()


def test_islands_keep_their_features() -> None:
    islands = shape("islands10b").groups
    assert [(group.nodes, group.features) for group in islands] == [(4, ("east",)), (4, ("west",))]
    assert shape("a100x64").groups == ()


def edited(
    base: str, changes: dict[str, Any], place: Path, nodes: int | None = None
) -> SandboxShape:
    """The shape of a profile that extends another one."""
    file = place / "own.yaml"
    file.write_text(json.dumps({"extends": base, "name": "own", **changes}))
    return shape_from_profile(load_profile(file).document, nodes)


def test_a_cut_has_some_nodes_of_each_island_and_leaf() -> None:
    islands = shape_from_profile(load_profile(find_profile("islands10b")).document, 3)
    assert [(group.nodes, group.features) for group in islands.groups] == [
        (2, ("east",)),
        (1, ("west",)),
    ]
    big = shape_from_profile(load_profile(find_profile("a100x64")).document, 2)
    assert (big.nodes, [leaf.nodes for leaf in big.switches[:-1]]) == (2, [("gpu0", "gpu1")])


def test_partitions_with_nodes_of_their_own_have_them(tmp_path: Path) -> None:
    own = {
        "name": "h100",
        "constraint": "ndr&[a*2|b*3]",
        "nodes": {"count": 3, "cpus": 112, "threads_per_core": 2, "prefix": "h"},
        "gpu": {"type": "h100", "gres": "H100", "per_node": 4, "memory": "80GiB"},
    }
    some = {"name": "few", "nodes": {"count": 1}}
    changes = {"nodes": {"count": 2}, "slurm": {"partitions": [own, some]}}
    found = edited("sandbox", changes, tmp_path)
    assert found.node_names == ("n0", "n1", "h2", "h3", "h4")
    assert found.node_range == "n[0-1],h[2-4]"
    nodes = {partition.name: partition.nodes for partition in found.partitions}
    assert nodes == {"train": "n[0-1]", "urgent": "n[0-1]", "h100": "h[2-4]", "few": "n0"}
    usual, other = found.node_groups
    assert (usual.cpus, usual.gpu_type, usual.gpus, usual.features) == (8, "a100", 2, ())
    assert (other.cpus, other.threads_per_core, other.memory_mib) == (112, 2, 16000)
    assert (other.gpu_type, other.gpus, other.features) == ("H100", 4, ("ndr", "a", "b"))
    assert edited("sandbox", changes, tmp_path, nodes=1).node_names == ("n0", "h1")


def test_what_every_job_of_a_site_asks_for_is_there(tmp_path: Path) -> None:
    found = edited(
        "sandbox",
        {
            "filesystems": [{"name": "project", "path": "/project", "kind": "lustre",
                             "write_bandwidth": "1GB/s", "read_bandwidth": "1GB/s"}],
            "limits": {"accounts": ["lab"], "qos": ["normal"]},
            "slurm": {
                "account": "lab", "qos": "gpu", "reservation": "maint", "inherit": ["WORK"],
                "constraint": "a100&fast", "data_partition": "cpu",
                "options": {"sbatch": {"licenses": "scratch,ansys:2@server"}},
                "partitions": [{"name": "urgent", "qos": "now", "account": "boss"}],
            },
            "software": {"modules": {"load": ["GCC"]},
                         "container": {"launcher": "apptainer", "image": "/i.sif"}},
        },
        tmp_path,
    )  # fmt: skip
    assert [(group.nodes, group.features) for group in found.groups] == [(4, ("a100", "fast"))]
    assert [partition.name for partition in found.partitions] == ["train", "urgent", "cpu"]
    assert found.licenses == ("scratch:1000", "ansys:1000")
    assert (found.accounts, found.qos) == (("lab", "boss"), ("gpu", "now", "normal"))
    assert found.reserved_as == "maint"
    assert found.site == SiteShape(("GCC",), ("apptainer",), ("WORK",), ("local", "project"))
