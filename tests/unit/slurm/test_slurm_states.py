"""Spellings of job states, and what they mean for us."""

from __future__ import annotations

import pytest

from hpctrain.slurm import JobState


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("RUNNING", JobState.RUNNING),
        ("running", JobState.RUNNING),
        (" PENDING ", JobState.PENDING),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("COMPLETED,COMPLETING", JobState.COMPLETING),
        ("PENDING,REQUEUED,SOMETHING_NEW", JobState.REQUEUED),
        ("RUNNING,SOMETHING_NEW", JobState.RUNNING),
        ("RE+", JobState.UNKNOWN),
        ("SOMETHING_NEW", JobState.UNKNOWN),
        ("", JobState.UNKNOWN),
    ],
)
def test_every_spelling_is_read(text: str, state: JobState) -> None:
    assert JobState.parse(text) is state


def test_every_known_state_is_read_and_belongs_to_one_class() -> None:
    for state in JobState:
        classes = [state.is_pending, state.is_active, state.is_ended]
        assert JobState.parse(state.value) is state
        assert sum(classes) == (0 if state is JobState.UNKNOWN else 1), state


def test_a_job_that_is_being_signalled_is_running_and_a_completing_one_is_not() -> None:
    assert JobState.SIGNALING.is_running
    assert JobState.COMPLETING.is_active
    assert not JobState.COMPLETING.is_running


@pytest.mark.parametrize("word", ["PREEMPTED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "COMPLETED"])
def test_ends(word: str) -> None:
    assert JobState.parse(word).is_ended
