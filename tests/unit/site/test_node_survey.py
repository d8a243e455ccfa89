"""The job that looks at a node, when it does not do what it should."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from foreign_clusters import DGX_SURVEY
from virtual_clock import VirtualClock

from hpctrain.base.errors import HpctrainError, SlurmRefusedError
from hpctrain.site import read_site
from hpctrain.site.survey import MARK
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState


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
