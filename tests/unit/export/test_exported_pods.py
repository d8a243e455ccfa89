"""What the documents for Kubernetes say about a run, and what Kubernetes would say to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpctrain.base.errors import InvalidInputError, LimitError, UsageError
from hpctrain.export import kubernetes
from hpctrain.export.exported_run import exported_run
from hpctrain.export.kubernetes import PodOptions, export_pods, run_label, yaml_documents
from hpctrain.export.lost_settings import (
    CARRIED_RESOURCES,
    LOST_RESOURCES,
    Destination,
    lost_settings,
)
from hpctrain.job.prepare import Prepared, prepare
from hpctrain.records.run_records import TrainerExit
from hpctrain.spec.run import ResourcesSpec

ROOT = Path(__file__).resolve().parents[3]
PYTHON = "/opt/hpctrain/bin/python3"
IMAGE = "ghcr.io/example/train:1"
OPTIONS = PodOptions(image=IMAGE, run_claim="runs")


def planned(
    runs: Path, *overrides: str, profile: str = "h100x16", spec: str = "llama7b.yaml"
) -> Prepared:
    """Plan an example, with some fields of its spec changed."""
    return prepare(ROOT / "examples" / spec, profile, overrides, runs=runs, python=PYTHON)


def documents(prepared: Prepared, kind: str, options: PodOptions = OPTIONS) -> list[dict[str, Any]]:
    """Return the documents of an export, read by YAML 1.1 as Kubernetes reads them."""
    return list(yaml.safe_load_all(export_pods(prepared, kind, options).files[0].text))


def job_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the Job template of a JobSet or of a TrainingRuntime."""
    spec = document["spec"]
    jobs = spec["template"]["spec"] if document["kind"] == "TrainingRuntime" else spec
    (only,) = jobs["replicatedJobs"]
    template: dict[str, Any] = only["template"]
    return template


# -- What the documents for Kubernetes say about a run: the same plan, all pods or none ---------


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return planned(tmp_path_factory.mktemp("runs"), "resources.gpus=16")


def container(jobset: dict[str, Any]) -> dict[str, Any]:
    (only,) = job_of(jobset)["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def variables(of: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in of["env"]}


def lost(prepared: Prepared, options: PodOptions = OPTIONS) -> dict[str, str]:
    found = export_pods(prepared, "jobset", options).lost
    return {setting.name: setting.reason for setting in found}


def test_the_engine_is_configured_as_submit_does(two_nodes: Prepared) -> None:
    """Every field of train.json; only copies of data, for which no pod has room, are off."""
    for kind in ("jobset", "trainjob"):
        settings = documents(two_nodes, kind)[0]["data"]["train.json"]
        assert json.loads(settings) == json.loads(two_nodes.train.model_dump_json())
    staging = replace(two_nodes, train=two_nodes.train.model_copy(update={"stage_data": True}))
    assert json.loads(documents(staging, "jobset")[0]["data"]["train.json"])["stage_data"] is False


def test_one_pod_per_node_and_one_process_per_gpu(two_nodes: Prepared) -> None:
    _, jobset = documents(two_nodes, "jobset")
    job = job_of(jobset)["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (2, 2, "Indexed")
    made = container(jobset)
    assert made["command"][:5] == [
        "python3",
        "-m",
        "hpctrain.train.unsupervised",
        "--nnodes=2",
        "--nproc-per-node=8",
    ]
    assert made["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert made["resources"]["requests"] == {"nvidia.com/gpu": "8"}
    known = variables(made)
    assert known["PET_MASTER_ADDR"] == "llama7b-node-0-0.llama7b"
    index = known["PET_NODE_RANK"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    trainer = documents(two_nodes, "trainjob")[2]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["command"] == made["command"]
    # set by the trainer itself, which refuses them here
    assert not [name for name in variables(trainer) if name.startswith("PET_")]


def test_one_failed_pod_restarts_all_and_wrong_settings_end_the_run(two_nodes: Prepared) -> None:
    _, jobset = documents(two_nodes, "jobset")
    job = job_of(jobset)["spec"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [TrainerExit.CONFIG_ERROR]
    policy = jobset["spec"]["failurePolicy"]
    # pods of two launches at a time would fight for the run
    assert policy["restartStrategy"] == "BlockingRecreate"
    assert policy["rules"][0]["action"] == "FailJobSet"
    assert (
        documents(two_nodes, "trainjob")[1]["spec"]["template"]["spec"]["failurePolicy"] == policy
    )
    given = documents(two_nodes, "jobset", replace(OPTIONS, most_restarts=0))[1]
    assert given["spec"]["failurePolicy"]["maxRestarts"] == 0


def test_restarts_follow_from_the_failures_that_the_plan_expects(two_nodes: Prepared) -> None:
    def restarts(mttf_seconds: float | None, step_seconds: float | None = 10.0) -> int:
        plan = two_nodes.plan.model_copy(
            update={
                "step_seconds": step_seconds,
                "batch": two_nodes.plan.batch.model_copy(update={"train_steps": 1600}),
            }
        )
        supervise = two_nodes.supervise.model_copy(update={"mttf_seconds": mttf_seconds})
        changed = replace(two_nodes, plan=plan, supervise=supervise)
        policy = documents(changed, "jobset")[1]["spec"]["failurePolicy"]
        return int(policy["maxRestarts"])

    # 16,000 s; `failures_without_progress` is 3
    assert restarts(1000.0) == 3 + 16 + 3 * 4
    assert restarts(16e6) == 3 + 1
    assert restarts(None) == restarts(1000.0, None) == 3


def test_a_stop_has_the_time_that_the_plan_gives_it(two_nodes: Prepared) -> None:
    spec = job_of(documents(two_nodes, "jobset")[1])["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == two_nodes.supervise.warning_seconds > 30


def test_variables_of_the_site(two_nodes: Prepared) -> None:
    made = variables(container(documents(two_nodes, "jobset")[1]))
    assert made["NCCL_IB_TIMEOUT"] == "22"
    assert "NCCL_SOCKET_IFNAME" not in made
    assert "variable NCCL_SOCKET_IFNAME" in lost(two_nodes)
    on_the_host = replace(OPTIONS, host_network=True)
    assert "NCCL_SOCKET_IFNAME" in variables(
        container(documents(two_nodes, "jobset", on_the_host)[1])
    )
    assert "variable NCCL_SOCKET_IFNAME" not in lost(two_nodes, on_the_host)


def test_variables_of_the_spec(tmp_path: Path) -> None:
    """Kubernetes expands `$(NAME)`, a shell `$NAME`: neither may happen to a value by chance."""
    prepared = planned(
        tmp_path,
        "environment.variables.PRICE=$$(HOME) $$5",
        "environment.variables.CACHE=$SCRATCH/cache",
        "environment.variables.SWITCH=on",
        "environment.inherit=[WANDB_API_KEY, HF_TOKEN]",
    )
    made = variables(container(documents(prepared, "jobset")[1]))
    assert (made["PRICE"], made["SWITCH"]) == ("$$(HOME) $$5", "on")
    assert "CACHE" not in made and "shell" in lost(prepared)["variable CACHE"]
    assert "WANDB_API_KEY" not in made
    assert "environment.inherit WANDB_API_KEY, HF_TOKEN" in lost(prepared)
    secret = replace(OPTIONS, secret="keys")
    made = variables(container(documents(prepared, "jobset", secret)[1]))
    assert made["HF_TOKEN"] == {"secretKeyRef": {"name": "keys", "key": "HF_TOKEN"}}
    assert not [name for name in lost(prepared, secret) if "inherit" in name]


def test_variables_by_a_pattern_are_passed_on_by_submit_only(tmp_path: Path) -> None:
    inherited = '[WANDB_API_KEY, "*_proxy"]'
    prepared = planned(tmp_path, "resources.gpus=16", f"environment.inherit={inherited}")
    secret = replace(OPTIONS, secret="keys")
    assert "*_proxy" not in yaml.safe_dump(documents(prepared, "jobset", secret))
    assert "`hpctrain submit`" in lost(prepared, secret)["inherit *_proxy"]
    run = exported_run(prepared, "hosts")
    assert run.own_names == ("WANDB_API_KEY",), "each is a line of the script of a host"


def test_paths_without_a_volume_are_named(two_nodes: Prepared) -> None:
    data = two_nodes.train.data_blend[0][1]
    assert f"{data}.bin" in lost(two_nodes)
    volume = replace(OPTIONS, volumes=(f"data:{Path(data).parent}",))
    assert not [name for name in lost(two_nodes, volume) if name.startswith("/")]
    beside = replace(OPTIONS, volumes=(f"data:{str(Path(data).parent)[:-1]}",))
    assert f"{data}.bin" in lost(two_nodes, beside)


def test_a_shared_node_asks_for_its_share(tmp_path: Path) -> None:
    few = planned(tmp_path, "resources.gpus=4", spec="gpt1300m.yaml")
    asked = container(documents(few, "jobset")[1])["resources"]
    site = few.profile.document.nodes
    assert asked["requests"]["cpu"] == str(site.cpus // 2)
    assert asked["limits"]["memory"] == f"{int(site.memory) // 2 // 2**20}Mi"
    assert "cpu" not in asked["limits"], "a limit would throttle the ranks"
    assert "requests of CPUs" not in lost(few)


def test_images(tmp_path: Path, two_nodes: Prepared) -> None:
    with pytest.raises(InvalidInputError, match="neither the spec nor profile"):
        documents(two_nodes, "jobset", replace(OPTIONS, image=None))
    profile = tmp_path / "pyxis.yaml"

    def image(launcher: str, name: str) -> str:
        profile.write_text(
            f"extends: h100x16\nname: pyxis\nsoftware:\n  container:\n    launcher: {launcher}\n"
            f"    image: '{name}'\n    python: /opt/python\n"
        )
        prepared = planned(tmp_path, profile=str(profile))
        made = container(documents(prepared, "jobset", replace(OPTIONS, image=None))[1])
        assert made["command"][0] == "/opt/python"
        return str(made["image"])

    assert image("pyxis", "nvcr.io#nvidia/pytorch:25.09-py3") == "nvcr.io/nvidia/pytorch:25.09-py3"
    assert image("apptainer", f"docker://{IMAGE}") == IMAGE
    for launcher, name in (("pyxis", "/images/a.sqsh"), ("apptainer", "a.sif"), ("edf", "ours")):
        with pytest.raises(InvalidInputError, match="no image of a registry"):
            image(launcher, name)


def test_settings_that_no_config_map_holds(
    two_nodes: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "_MOST_SETTINGS_BYTES", 1000)
    with pytest.raises(LimitError, match="a ConfigMap holds 1 MiB"):
        documents(two_nodes, "jobset")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("llama7b", "llama7b"),
        ("GPT_175B.run", "gpt-175b-run"),
        ("7b-", "run-7b"),
        ("a" * 63, "a" * 48),
    ],
)
def test_names_of_runs_become_names_of_jobsets(name: str, label: str) -> None:
    assert run_label(name, 2) == label
    assert len(f"{run_label(name, 1000)}-node-0-999-abcde") <= 63


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_claim": None},
        {"name": "GPT"},
        {"name": "a" * 60},
        {"namespace": "a_b"},
        {"volumes": ("data",)},
        {"volumes": ("data:relative",)},
        {"volumes": ("data:/",)},
        {"volumes": ("data:/runs/x",)},
        {"resources": ("rdma/hca",)},
        {"node_labels": ("a b=c",)},
    ],
)
def test_options_that_kubernetes_would_refuse(two_nodes: Prepared, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        documents(two_nodes, "jobset", replace(OPTIONS, **wrong))


def test_the_head_of_the_file_says_what_is_lost(tmp_path: Path) -> None:
    prepared = planned(tmp_path, "resources.qos=high", "evaluation.every_steps=200")
    made = export_pods(prepared, "jobset", OPTIONS)
    head = " ".join(
        line.removeprefix("#").strip()
        for line in made.files[0].text.partition("---\n")[0].splitlines()
    )
    for setting in made.lost:
        assert setting.sentence.replace("--host-network", "--host- network") in head or (
            setting.sentence in head
        ), setting
    assert "resources.qos high" in head and "supervisor" in head


NASTY = (
    "on",
    "1:30",
    "0x1f",
    "1e3",
    "~",
    "null",
    "",
    " a",
    "a: b",
    "# c",
    "é\u0085",
    "[x]",
    "-",
    "22",
)


@pytest.mark.parametrize("value", NASTY)
def test_texts_stay_texts_in_yaml_1_1(value: str) -> None:
    written = yaml_documents(
        "# head\n", ({"key": [value, {"b": value, "c": 3}], value or "x": {}},)
    )
    (read,) = yaml.safe_load_all(written)
    assert read == {"key": [value, {"b": value, "c": 3}], value or "x": {}}


# -- Nothing of a spec disappears without a word when it leaves Slurm ---------------------------


def test_every_field_of_resources_is_carried_or_lost() -> None:
    """A new field has to be put into one of the two tables."""
    fields = set(ResourcesSpec.model_fields)
    assert fields == CARRIED_RESOURCES | LOST_RESOURCES.keys()
    assert not CARRIED_RESOURCES & LOST_RESOURCES.keys()


ASKED = (
    ("resources.spare_nodes=1", "resources.spare_nodes 1"),
    ("resources.qos=high", "resources.qos high"),
    ("resources.exclude=n7", "resources.exclude n7"),
    ("tracking.tensorboard=true", "tracking"),
    ("metrics.endpoint=true", "metrics.endpoint"),
    ("after=base-1a2b", "after base-1a2b"),
)


@pytest.mark.parametrize(("override", "name"), ASKED)
@pytest.mark.parametrize("destination", ["kubernetes", "hosts"])
def test_what_a_spec_asks_of_slurm(
    override: str, name: str, destination: Destination, tmp_path: Path
) -> None:
    def names(*overrides: str) -> set[str]:
        job = planned(tmp_path, *overrides).job
        return {one.name for one in lost_settings(job, destination)}

    assert name in names(override) - names()


def test_sections_that_the_supervisor_carries_out(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "llama7b.yaml").read_text()
    job = "  jobs: [{name: mmlu, command: [eval, '{checkpoint}', '{output}']}]\n"
    assert "\nevaluation:\n" in text
    changed = tmp_path / "changed.yaml"
    changed.write_text(
        text.replace("\nevaluation:\n", f"\nevaluation:\n{job}")
        + "\nnotify: {channels: [{kind: slurm}]}\n"
    )
    job = planned(tmp_path, spec=str(changed)).job
    found = {one.name for one in lost_settings(job, "hosts")}
    assert {"evaluation.jobs", "notify"} <= found
