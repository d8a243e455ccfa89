"""Clusters of which Slurm does not tell all: what is right in their profiles, and what is asked."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import hpctrain
from foreign_clusters import association, config, node, partition, qos, survey
from test_cli_site import serve
from test_site_detected import CATALOGUE, LOGIN, detected, loaded, site

from hpctrain.base.errors import InvalidInputError
from hpctrain.site.detected import detected_profile
from hpctrain.site.differences import differences
from hpctrain.site.facts import module_system
from hpctrain.site.hardware import groups_of, known_gpu
from hpctrain.slurm.cluster_queries import nodes
from hpctrain.slurm.cluster_records import gpu_slice, tres_counts
from hpctrain.spec.open_questions import open_questions

ENFORCED = config(
    storage="accounting_storage/slurmdbd", enforce="associations,limits,qos", name="limited"
)


def cluster(nodes: str, partitions: str, **others: str) -> dict[str, str]:
    return {"config": config(), "node": nodes, "partition": partitions, **others}


def eight_gpus(kind: str = "h200", partitions: str = "gpu", count: int = 2, **words: str) -> str:
    return "".join(
        node(f"g{i}", f"gpu:{kind}:8", partitions=partitions, **words)  # type: ignore[arg-type]
        for i in range(count)
    )


# -- Partitions that are no partitions of ours --------------------------------------------------


@pytest.mark.parametrize(
    ("closed", "reason"),
    [
        ({"Hidden": "YES"}, "it is hidden (Hidden=YES)"),
        ({"RootOnly": "YES"}, "only root may submit"),
        ({"State": "INACTIVE"}, "it is not up"),
        ({"State": "DRAIN"}, "it is not up"),
        ({"AllowGroups": "staff"}, "it is for groups staff"),
        ({"AllowAccounts": "physics"}, "it is for accounts physics, and yours are ml"),
        ({"AllowQos": "gold"}, "it is for QOS gold, and yours are normal"),
        ({"DenyQos": "normal"}, "it is closed to QOS normal"),
    ],
)
def test_a_closed_partition_is_left_out_with_the_reason(
    closed: dict[str, str], reason: str, tmp_path: Path
) -> None:
    texts = cluster(
        eight_gpus(partitions="secret,gpu"),
        partition("secret", Default="YES", **closed) + partition("gpu"),
        config=ENFORCED,
        user=association("ml", QOS="normal"),
        qos=qos("normal"),
    )
    profile, found = detected(tmp_path, texts)
    assert [one.name for one in profile.slurm.partitions] == ["gpu"]
    (remark,) = (one for one in found.remarks if "`secret` is left out" in one)
    assert reason in remark
    profile, _ = detected(tmp_path, texts, partition="secret")
    assert profile.slurm.partitions[0].name == "secret", "it was named"


# -- Slices of GPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "slices"),
    [
        ("1g.10gb", ("", 1, 10)),
        ("a100_3g.20gb", ("a100", 3, 20)),
        ("nvidia_h100_80gb_hbm3_1g.10gb", ("nvidia_h100_80gb_hbm3", 1, 10)),
        ("a100-2g.12gb+me", ("a100", 2, 12)),
        ("4g20gb", ("", 4, 20)),
    ],
)
def test_names_of_slices(kind: str, slices: tuple[str, int, int]) -> None:
    found = gpu_slice(kind)
    assert found is not None and (found.gpu, found.sevenths, found.gigabytes) == slices
    assert gpu_slice("nvidia_h100_80gb_hbm3") is None and gpu_slice("v100-16gb") is None


def test_slices_are_no_gpus_of_the_node(tmp_path: Path) -> None:
    """Whole GPUs and slices on one node, and a partition that has slices only."""
    mixed = "".join(
        node(f"m{i}", "gpu:a100:2,gpu:a100_3g.20gb:4,shard:8,nic:2", partitions="gpu")
        for i in (1, 2)
    )
    texts = cluster(
        mixed + node("s1", "gpu:1g.10gb:28", partitions="mig", features="a100"),
        partition("gpu", Default="YES") + partition("mig"),
    )
    profile, found = detected(tmp_path, texts)
    assert (profile.gpu.type, profile.gpu.per_node, profile.nodes.count) == ("a100", 2, 2)
    assert profile.slurm.gpu_request == "gres-typed", "else Slurm may give a slice"
    assert [one.name for one in profile.slurm.partitions] == ["gpu"]
    remarks = " ".join(found.remarks)
    assert "`gpu` has 2 nodes with slices of GPUs (MIG), not described: 4 x a100_3g" in remarks
    assert "`mig` is left out: its GPUs are slices (MIG: 28 x 1g.10gb)" in remarks
    assert not [one for one in differences(profile, site(texts)) if one.matters]


def test_a_partition_of_slices_is_described_when_it_is_named(tmp_path: Path) -> None:
    texts = cluster(
        node("s1", "gpu:a100_3g.20gb:8", partitions="mig") + eight_gpus(),
        partition("mig", Default="YES") + partition("gpu"),
    )
    profile, found = detected(tmp_path, texts, partition="mig")
    assert (profile.gpu.type, profile.gpu.per_node) == ("a100_3g.20gb", 8)
    assert int(profile.gpu.memory) == 19 * 2**30, "what is left of 20 GB"
    assert profile.gpu.peak["bf16"] == pytest.approx(312e12 * 3 / 7, rel=0.01)
    assert profile.slurm.gpu_request == "gres-typed" and not profile.slurm.exclusive
    assert profile.slurm.partitions[0].max_gpus == 1 and profile.nvlink.domain == 1
    assert "gpu.memory" in found.guessed and "a slice (MIG)" in found.text
    assert not [one for one in differences(profile, site(texts)) if one.matters]
    nameless = {**texts, "node": node("s1", "gpu:3g.20gb:8", partitions="mig") + eight_gpus()}
    with pytest.raises(InvalidInputError, match=r"3g\.20gb"):
        detected(tmp_path, nameless, partition="mig")
    detected(tmp_path, nameless, partition="mig", model="A100-40GB SXM")


# -- QOS ----------------------------------------------------------------------------------------


def limited(partitions: str, *lines: str, user: str) -> dict[str, str]:
    """Two nodes of eight GPUs, with these lines of `show qos`."""
    texts = cluster(eight_gpus(count=8), partitions, config=ENFORCED)
    return {**texts, "user": user, "qos": "".join(lines)}


def test_the_qos_is_that_of_the_user_and_its_limits_count(tmp_path: Path) -> None:
    texts = limited(
        partition("gpu", Default="YES", MaxTime="7-00:00:00", MaxNodes="8"),
        qos("aaa", MaxWall="00:10:00", MaxTRES="node=1"),
        qos("usual", MaxWall="1-00:00:00", MaxTRESPU="gres/gpu=32", MaxTRES="node=6,cpu=999"),
        user=association("ml", QOS="aaa,usual", DefaultQOS="usual", MaxSubmit="50"),
    )
    profile, found = detected(tmp_path, texts)
    (gpu,) = profile.slurm.partitions
    assert (gpu.max_walltime, gpu.max_nodes, gpu.max_gpus) == (86400, 6, 32)
    assert profile.slurm.qos == "usual" and "also yours: aaa" in found.text
    assert profile.limits.qos == ("aaa", "usual") and profile.limits.max_submit == 50
    assert any("MaxTRES cpu=999 of QOS usual" in one for one in found.remarks)
    assert "# from: MaxWall of QOS usual" in found.text
    assert not differences(profile, site(texts)), "the profile is what the cluster is"
    text = found.text.replace("max_walltime: 1-00:00:00", "max_walltime: 7-00:00:00")
    (longer,) = differences(loaded(replace(found, text=text), tmp_path), site(texts))
    assert longer.severity == "refused" and "MaxWall of QOS usual" in longer.source


@pytest.mark.parametrize(
    ("flags", "seconds"), [("", 3600), ("OverPartQOS", 7200), ("DenyOnLimit", 3600)]
)
def test_limits_of_the_partitions_qos_come_first(flags: str, seconds: int, tmp_path: Path) -> None:
    texts = limited(
        partition("gpu", Default="YES", QoS="part", MaxTime="1-00:00:00"),
        qos("part", MaxWall="01:00:00", MinTRES="node=2,gres/gpu=24"),
        qos("normal", MaxWall="02:00:00", GrpTRES="node=5", Flags=flags),
        user=association("ml", QOS="normal"),
    )
    profile, _ = detected(tmp_path, texts)
    (gpu,) = profile.slurm.partitions
    assert (gpu.max_walltime, gpu.max_nodes, gpu.min_nodes) == (seconds, 5, 3)


def test_without_limits_in_force_nothing_of_them_is_written(tmp_path: Path) -> None:
    texts = limited(
        partition("gpu", Default="YES", MaxTime="1-00:00:00"),
        qos("normal", MaxWall="02:00:00"),
        user=association("ml", QOS="normal", MaxTRES="gres/gpu=1"),
    )
    texts["config"] = config(storage="accounting_storage/slurmdbd", enforce="associations")
    (gpu,) = detected(tmp_path, texts)[0].slurm.partitions
    assert (gpu.max_walltime, gpu.max_gpus) == (86400, None)


def test_a_job_of_fewer_gpus_than_a_node_does_not_ask_for_the_node(tmp_path: Path) -> None:
    texts = limited(
        partition("gpu", Default="YES"),
        qos("normal", MaxTRESPU="gres/gpu=4"),
        user=association("ml", QOS="normal"),
    )
    profile, _ = detected(tmp_path, texts)
    assert not profile.slurm.exclusive and profile.slurm.partitions[0].max_gpus == 4


def test_which_of_several_qos_is_asked(tmp_path: Path) -> None:
    texts = limited(
        partition("gpu", Default="YES", AllowQos="short,long"),
        qos("normal"),
        qos("long"),
        qos("short", MaxWall="01:00:00"),
        user=association("ml", QOS="normal,short,long", DefaultQOS="normal"),
    )
    profile, found = detected(tmp_path, texts)
    assert profile.slurm.partitions[0].qos == "short"
    assert "short, long are yours" in found.asked["slurm.partitions[0].qos"]
    assert "# ASK: which QOS? short, long are yours" in found.text


def test_another_account_has_another_qos(tmp_path: Path) -> None:
    texts = limited(
        partition("gpu", Default="YES") + partition("bio", AllowAccounts="bio"),
        qos("normal"),
        qos("biology"),
        user=association("ml", QOS="normal,high", DefaultQOS="normal")
        + association("bio", DefaultAccount="ml", QOS="biology"),
    )
    texts["node"] = eight_gpus(partitions="gpu,bio")
    profile, _ = detected(tmp_path, texts)
    bio = profile.slurm.partition("bio")
    assert profile.slurm.qos == "normal", "and jobs of bio would be refused with it"
    assert bio is not None and (bio.account, bio.qos) == ("bio", "biology")


def test_who_pays_is_asked_where_the_database_does_not_answer(tmp_path: Path) -> None:
    texts = limited(partition("gpu", Default="YES", AllowAccounts="a,b"), user="")
    profile, found = detected(tmp_path, texts)
    assert profile.slurm.account is None
    assert set(found.asked) == {"slurm.account", "slurm.partitions[0].account"}
    assert "It takes a, b only" in found.asked["slurm.partitions[0].account"]


def test_resources_with_their_numbers() -> None:
    assert tres_counts("node=4,gres/gpu:a100=8,mem=2T") == {
        "node": 4,
        "gres/gpu:a100": 8,
        "mem": 2 * 2**20,
    }
    assert tres_counts("") == {}


# -- GPUs that Gres does not list ---------------------------------------------------------------


PLAIN = "".join(node(f"c{i}", "(null)", partitions="gh,all", cpus=72, threads=1) for i in range(4))


def test_gpus_that_gres_does_not_list_are_asked_for(tmp_path: Path) -> None:
    texts = cluster(
        PLAIN + node("x", "(null)", partitions="all"),
        partition("all", Default="YES") + partition("gh", OverSubscribe="EXCLUSIVE"),
    )
    with pytest.raises(InvalidInputError, match="has GPUs") as caught:
        detected(tmp_path, texts)
    assert "--partition NAME --gpu MODEL" in (caught.value.problems[0].hint or "")
    profile, found = detected(tmp_path, texts, partition="gh", model="GH200-96GB")
    assert (profile.gpu.type, profile.gpu.per_node, profile.nodes.count) == ("gh200", 1, 4)
    assert profile.slurm.gpu_request == "none" and profile.slurm.exclusive is True
    assert "how many GPUs has a node?" in found.asked["gpu.per_node"]
    assert [one.name for one in profile.slurm.partitions] == ["gh"]
    assert any("`all` is left out: it has nodes without GPUs" in one for one in found.remarks)
    assert not [one for one in differences(profile, site(texts)) if one.matters]
    looked = survey(
        host="c1",
        commands={"nvidia-smi": "NVIDIA GH200 120GB, 97871\n" * 4},
        gpu_devices=["/dev/nvidia0"],
    )
    profile, found = detected(tmp_path, texts, looked)
    assert (profile.gpu.per_node, profile.gpu.model) == (4, "GH200-96GB")
    assert "gpu.per_node" not in found.asked and "nvidia-smi on c1" in found.text


@pytest.mark.parametrize(
    ("features", "names", "gpu"),
    [("ib,a100-80gb", "batch", "A100-80GB SXM"), ("(null)", "gpu-h200", "H200-141GB SXM")],
)
def test_features_and_partitions_name_gpus(
    features: str, names: str, gpu: str, tmp_path: Path
) -> None:
    texts = cluster(
        node("g1", "(null)", partitions=names, features=features)
        + node("c1", "(null)", partitions="batch" if names == "batch" else "cpu"),
        partition(names, Default="YES") + ("" if names == "batch" else partition("cpu")),
    )
    profile, found = detected(tmp_path, texts)
    assert (profile.gpu.model, profile.nodes.count) == (gpu, 1)
    assert "gpu.model" in found.guessed and "gpu.per_node" in found.asked
    constraint = profile.for_partition(names).slurm.constraint
    assert constraint == ("a100-80gb" if names == "batch" else None), "c1 has no GPUs"


def test_a_job_that_saw_no_gpu_settles_it(tmp_path: Path) -> None:
    texts = cluster(node("g1", "(null)", partitions="gpu"), partition("gpu", Default="YES"))
    with pytest.raises(InvalidInputError, match="has GPUs"):
        detected(tmp_path, texts, survey(host="g1"), model="H200")


# -- Kinds of GPUs, CPUs and machines -----------------------------------------------------------


@pytest.mark.parametrize(
    ("gres", "kind", "name", "gpu"),
    [
        ("mi300a", "mi300a", None, "MI300A"),
        ("mi250", "mi250x", "mi250", "MI250X"),
        ("MI250X", "mi250x", "MI250X", "MI250X"),
        ("gh200", "gh200", None, "GH200-96GB"),
        ("nvidia_gh200_120gb", "gh200-120gb", "nvidia_gh200_120gb", "GH200-96GB"),
        ("gb200", "gb200", None, "GB200"),
        ("h200", "h200", None, "H200-141GB SXM"),
        ("b200", "b200", None, "B200-SXM"),
        ("l40s", "l40s", None, "L40S"),
        ("nvidia_l40s", "l40s", "nvidia_l40s", "L40S"),
        ("H100", "h100", "H100", "H100-80GB SXM"),
        ("rtx_pro_6000", "rtx-pro-6000", "rtx_pro_6000", "RTX PRO 6000 Blackwell"),
        ("rtx_a6000", "rtx-a6000", "rtx_a6000", "RTX A6000"),
        ("geforce_rtx_3090", "rtx-3090", "geforce_rtx_3090", "RTX 3090"),
        ("nvidia_rtx_6000_ada_generation", "rtx-6000-ada-generation",
         "nvidia_rtx_6000_ada_generation", "RTX 6000 Ada"),
    ],
)  # fmt: skip
def test_types_of_gres(gres: str, kind: str, name: str | None, gpu: str) -> None:
    (group,) = groups_of(nodes(node("n", f"gpu:{gres}:4", partitions="p")))
    found = known_gpu(group, CATALOGUE)
    assert found.gpu is not None
    assert (found.type, found.gres, found.gpu.name) == (kind, name, gpu)


def test_jobs_ask_by_the_name_in_gres(tmp_path: Path) -> None:
    texts = cluster(
        eight_gpus("H100") + node("v1", "gpu:v100:4", partitions="gpu"),
        partition("gpu", Default="YES"),
    )
    profile, _ = detected(tmp_path, texts)
    assert (profile.gpu.type, profile.gpu.gres) == ("h100", "H100")
    assert profile.slurm.gpu_request == "gres-typed"
    assert not [one for one in differences(profile, site(texts)) if one.matters]


def test_an_apu_has_the_memory_of_its_node(tmp_path: Path) -> None:
    """MI300A: four of them have all memory of a node, of which Slurm gives jobs 480 GB."""
    texts = cluster(
        node("tux1", "gpu:mi300a:4", partitions="p", cpus=192, memory=480_000),
        partition("p", Default="YES"),
    )
    profile, found = detected(tmp_path, texts)
    assert profile.gpu.model == "MI300A" and int(profile.gpu.memory) == 120_000 * 2**20
    assert any("share their memory" in one for one in found.remarks)
    assert profile.nvlink.domain == 4


@pytest.mark.parametrize(("threads", "cpus", "told"), [(2, 128, 2), (1, 64, 1)])
def test_threads_of_a_core(threads: int, cpus: int, told: int, tmp_path: Path) -> None:
    text = node("n1", "gpu:h200:8", partitions="p", cpus=cpus, threads=threads)
    texts = cluster(text, partition("p", Default="YES"))
    profile, _ = detected(tmp_path, texts)
    assert (profile.nodes.cpus, profile.nodes.threads_per_core) == (cpus, told)
    # slurm.conf(5), CPUs: where it is the number of cores, Slurm counts cores
    counted = text.replace("ThreadsPerCore=1", "ThreadsPerCore=2")
    profile, _ = detected(tmp_path, cluster(counted, partition("p", Default="YES")))
    assert profile.nodes.threads_per_core == told
    wrong = profile.model_copy(
        update={"nodes": profile.nodes.model_copy(update={"threads_per_core": 3 - told})}
    )
    (one,) = differences(wrong, site(texts))
    assert one.field == "nodes.threads_per_core"


def test_nodes_of_another_machine_than_this_one(tmp_path: Path) -> None:
    texts = cluster(
        node("n1", "gpu:gh200:4", partitions="p", arch="aarch64"), partition("p", Default="YES")
    )
    _, found = detected(tmp_path, texts)
    (remark,) = (one for one in found.remarks if "aarch64" in one)
    assert "login1 is x86_64: software.python must be an interpreter of theirs" in remark
    same = {**texts, "node": node("n1", "gpu:gh200:4", partitions="p")}
    assert not [one for one in detected(tmp_path, same)[1].remarks if "x86_64" in one]


# -- Modules, interpreters, systems -------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "init"),
    [
        ("function\nModules based on Lua: Version 8.6.19 2022-04-09 00:00\n"
         "init=/usr/share/lmod/lmod/init/bash\n", "Lmod 8.6.19", "/usr/share/lmod/lmod/init/bash"),
        ("function\nModules Release 5.3.0 (2023-05-14)\ninit=/etc/profile.d/modules.sh\n",
         "environment-modules 5.3.0", "/etc/profile.d/modules.sh"),
        ("function\nVERSION=3.2.11\ncray\n", "environment-modules 3.2.11 (Cray PE)", None),
    ],
)  # fmt: skip
def test_module_systems(text: str, words: str, init: str | None) -> None:
    found = module_system(text)
    assert found is not None and (found.words, found.init) == (words, init)
    assert module_system("") is None and module_system("bash: module: not found\n") is None


def test_an_old_rhel_has_a_newer_python_beside(tmp_path: Path) -> None:
    """python3 is 3.6 there, and the interpreter of this machine is on no node."""
    texts = cluster(eight_gpus(), partition("gpu", Default="YES"))
    looked = survey(
        host="g0",
        commands={"nvidia-smi": "NVIDIA H200, 143771\n" * 8},
        gpu_devices=["/dev/nvidia0"],
    )
    profile, found = detected(tmp_path, texts, looked)
    assert profile.software.python == "/usr/bin/python3.11"
    assert "/sw/venv/bin/python is not on g0" in found.asked["software.python"]
    assert any("Rocky Linux 8.10" in one and "python3 is 3.6.8" in one for one in found.remarks)
    assert any("does not find srun, sbatch, scontrol" in one for one in found.remarks)
    here = survey(host="g0", interpreters={"/sw/venv/bin/python": "3.12.1"})
    assert detected(tmp_path, texts, here)[0].software.python is None
    old = survey(host="g0", interpreters={"/usr/bin/python3": "3.6.8"})
    profile, found = detected(tmp_path, texts, old)
    assert profile.software.python is None
    assert any("no Python 3.11 that was found" in one for one in found.remarks)


def test_modules_of_this_machine_are_a_guess(tmp_path: Path) -> None:
    facts = site(cluster(eight_gpus(), partition("gpu", Default="YES")))
    told = module_system("function\nModules Release 5.3.0\ninit=/etc/profile.d/modules.sh\n")
    found = detected_profile(replace(facts, login=replace(LOGIN, modules=told)), CATALOGUE)
    modules = loaded(found, tmp_path).software.modules
    assert modules is not None and modules.init == "/etc/profile.d/modules.sh"
    assert "software.modules.init" in found.guessed and "software.modules.load" in found.asked


# -- Questions ----------------------------------------------------------------------------------


def test_questions_are_found_behind_a_value_and_above_it() -> None:
    text = (
        "nodes:\n  count: 2  # ASK: how many?\n  # ASK: which name do\n  # nodes have?\n"
        "  prefix: n\n  # from: Slurm\n  cpus: 4\n# ASK of others\nslurm:\n  partitions:\n"
        "    - qos: a  # ASK: which QOS?\n"
    )
    found = [(one.line, one.key, one.question) for one in open_questions(text)]
    assert found == [
        (2, "count", "how many?"),
        (5, "prefix", "which name do nodes have?"),
        (11, "qos", "which QOS?"),
    ]


def test_open_questions_are_repeated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    serve(monkeypatch, cluster(PLAIN, partition("gh", Default="YES") + partition("all")))
    options = ("--partition", "gh", "--gpu", "GH200-96GB", "-o", "ours.yaml")
    done = hpctrain("profile", "detect", *options)
    assert done.exit_code == 0 and "1 question to you" in done.stderr
    assert "gpu.per_node: how many GPUs has a node?" in " ".join(done.stderr.split())
    text = (tmp_path / "ours.yaml").read_text()
    line = 1 + text[: text.index("per_node: ")].count("\n")
    checked = hpctrain("validate", "ours.yaml")
    assert checked.exit_code == 0, "the values do no harm"
    assert f"ours.yaml:{line}: `per_node`: how many GPUs" in " ".join(checked.stderr.split())
    doctor = hpctrain("doctor", "-p", "ours.yaml")
    assert f"ours.yaml:{line}: `per_node`" in " ".join(doctor.stdout.split())
    answered = re.sub(r"(?m)^ *# ASK:.*\n( *#.*\n)*", "", text)
    (tmp_path / "ours.yaml").write_text(re.sub(r" *# ASK:.*", "", answered))
    assert "question" not in hpctrain("validate", "ours.yaml").stderr
