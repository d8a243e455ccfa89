"""The survey of a node: the program, and what is made of its texts (constructed, not captured)."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from foreign_clusters import DGX_SURVEY, PAIRS, ROCM, joined_matrix, survey
from virtual_clock import VirtualClock

from hpctrain.base.errors import HpctrainError, SlurmRefusedError
from hpctrain.site import read_site
from hpctrain.site import survey as program
from hpctrain.site.facts import (
    amd_gpus,
    mount_of,
    mounts,
    node_survey,
    nvidia_gpus,
    nvlink_group,
    survey_line,
)
from hpctrain.site.survey import MARK
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

SOURCE = Path(program.__file__)


def test_the_program_is_for_the_python_of_rhel_8() -> None:
    tree = ast.parse(SOURCE.read_text(), feature_version=(3, 6))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported <= set(sys.stdlib_module_names)


def test_a_node_without_gpus_surveys_itself() -> None:
    """This machine: started as a program, without hpctrain in its path."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"],
        input="#!/usr/bin/env python3\n" + SOURCE.read_text(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    line = survey_line("a prolog says hello\n" + done.stdout)
    assert line is not None
    found = node_survey(line)
    assert found.host and found.cpus >= 1
    assert found.limits.keys() == {"core", "memlock", "nofile"}
    assert mount_of("/", found.mounts) is not None


def test_a_program_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "COMMAND_SECONDS", 0.2)
    assert program.command(["sleep", "30"])["returncode"] is None


def test_a_dgx_is_understood() -> None:
    found = node_survey(DGX_SURVEY)
    (gpu,) = found.gpus
    assert (gpu.name, gpu.count, gpu.joined) == ("NVIDIA H100 80GB HBM3", 8, 8)
    assert gpu.memory_bytes == 81559 * 2**20
    assert found.launchers == ("pyxis", "enroot") and found.modules is not None
    assert found.may_submit is True and found.default_interface == "eth0"
    assert len(found.ports) == 10 and sum(port.is_active for port in found.ports) == 9
    assert {mount.path: mount.kind for mount in found.mounts} == {
        "/": "local",
        "/lustre": "lustre",
        "/home": "nfs",
        "/raid": "local",
    }


def test_amd_counts_dies() -> None:
    (gpu,) = amd_gpus("WARNING: low power\n" + ROCM)
    assert (gpu.count, gpu.memory_bytes) == (8, 68702699520)
    newer = ROCM.replace("Card series", "Card Series")
    assert amd_gpus(newer)[0].name == gpu.name
    with pytest.raises(ValueError, match="rocm-smi"):
        amd_gpus("no card")


@pytest.mark.parametrize(
    ("matrix", "group"),
    [
        (joined_matrix(8), 8),
        (joined_matrix(4, "NV6"), 4),
        (joined_matrix(4, "SYS"), 1),
        (PAIRS, 2),
        ("Failed to initialize NVML", None),
    ],
)
def test_groups_that_nvlink_joins(matrix: str, group: int | None) -> None:
    assert nvlink_group(matrix) == group


def test_a_device_with_an_error_is_not_counted() -> None:
    (gpu,) = nvidia_gpus("NVIDIA A100-SXM4-40GB, 40960\nNVIDIA A100-SXM4-40GB, [N/A]\n")
    assert gpu.count == 1


def test_blanks_in_mounts_and_nested_ones() -> None:
    found = mounts("a /p\\040q nfs4 rw 0 0\nb /p\\040q/fast lustre rw 0 0\nc /px gpfs rw 0 0\n")
    assert [one.path for one in found] == ["/p q", "/p q/fast", "/px"]
    inner = mount_of("/p q/fast/run", found)
    assert inner is not None and inner.kind == "lustre"
    assert mount_of("/pxy", found) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": 99}), "{"])
def test_what_is_no_survey_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        node_survey(text)


def test_no_variable_beyond_the_named_ones_leaves_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden")
    monkeypatch.setattr(program, "COMMANDS", {})
    assert "hidden" not in json.dumps(program.survey())


def test_a_node_that_may_not_submit_says_so() -> None:
    assert node_survey(survey(commands={"sbatch": ""})).may_submit is True
    assert node_survey(survey()).may_submit is None


# -- The job that looks at a node, when it does not do what it should ---------------------------


class OneJob(FakeSlurm):
    """Its job has ended when it is asked for, after writing `text`."""

    def __init__(self, text: str | None, state: JobState = JobState.COMPLETED) -> None:
        super().__init__()
        self.text, self.state = text, state

    def jobs(self, ids: Collection[int]) -> dict[int, JobRecord]:
        for job_id in ids:
            (output,) = (o for o in self.options[job_id] if o.startswith("--output="))
            if self.text is not None:
                path = Path(output.partition("=")[2].replace("%j", str(job_id)))
                path.write_text(self.text)
            self.records[job_id] = replace(self.records[job_id], state=self.state)
        return super().jobs(ids)


@pytest.fixture
def look(
    virtual_clock: VirtualClock, tmp_path: Path
) -> Callable[[FakeSlurm], read_site.NodeSurvey]:
    def survey(slurm: FakeSlurm) -> read_site.NodeSurvey:
        return read_site.survey_node(
            cast(SlurmClient, slurm),
            partition="batch",
            gpus="gpu:h100:8",
            account="ml",
            patience_seconds=600.0,
            directory=tmp_path,
            say=lambda _: None,
        )

    return survey


def test_it_asks_for_one_node_and_cleans_up(
    look: Callable[[FakeSlurm], read_site.NodeSurvey], tmp_path: Path
) -> None:
    slurm = OneJob(f"prolog\n{MARK}{DGX_SURVEY}\nepilog\n")
    assert look(slurm).host == "dgx001"
    assert {"--nodes=1", "--gres=gpu:h100:8", "--account=ml"} <= set(slurm.options[1])
    assert slurm.scripts[1].startswith("#!/usr/bin/env python3\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        (None, JobState.FAILED, "job 1 (FAILED) has left no survey"),
        ("env: python3: not found\n", JobState.FAILED, "python3: not found"),
        (MARK + "{}", JobState.COMPLETED, "not the survey of a node"),
        (None, JobState.PENDING, "job 1 is PENDING after 600 s; it was cancelled"),
    ],
)
def test_what_went_wrong_is_said(
    text: str | None,
    state: JobState,
    words: str,
    look: Callable[[FakeSlurm], read_site.NodeSurvey],
) -> None:
    slurm = OneJob(text, state)
    with pytest.raises(HpctrainError) as caught:
        look(slurm)
    assert words in str(caught.value).replace(": None", "")
    if state is JobState.PENDING:
        assert slurm.records[1].state is JobState.CANCELLED


def test_a_refused_job(look: Callable[[FakeSlurm], read_site.NodeSurvey]) -> None:
    slurm = OneJob(None)
    slurm.refusal = "Invalid account"
    with pytest.raises(SlurmRefusedError, match="Invalid account"):
        look(slurm)
