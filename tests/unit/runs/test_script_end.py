"""A job that ended before its supervisor began: its own log has the reason."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from fabricated_runs import LAUNCHED, STARTED, SUBMITTED, fabricate

from hpctrain.judge.causes import Cause
from hpctrain.runs.logs import script_end
from hpctrain.runs.state import RunState
from hpctrain.runs.status import statuses
from hpctrain.runs.watch import watch
from hpctrain.slurm.client import SlurmClient
from hpctrain.slurm.fake import FakeSlurm
from hpctrain.slurm.records import JobRecord
from hpctrain.slurm.states import JobState

SCRIPT = "/var/spool/slurmd/job00001/slurm_script: line 61: "


def ended(code: int, **more: object) -> JobRecord:
    fields = {"name": "gpt-tiny-7f3a", "restart_count": 0, "end_time": 1.0, **more}
    return JobRecord(1, state=JobState.FAILED, exit_code=code, exit_signal=0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "line", "cause", "words"),
    [
        (
            127,
            f"{SCRIPT}/sw/py/bin/python: No such file or directory",
            Cause.LAUNCH_FAILURE,
            "/sw/py/bin/python: No such file or directory; the node does not have it",
        ),
        (
            127,
            f"{SCRIPT}exec: python3: not found",
            Cause.LAUNCH_FAILURE,
            "(exit code 127): python3: not found; the node does not have it",
        ),
        (
            126,
            f"{SCRIPT}/sw/python: cannot execute binary file: Exec format error",
            Cause.CONFIG_ERROR,
            "it is a program for other processors than those of the node",
        ),
        (126, f"{SCRIPT}/sw/python: Permission denied", Cause.LAUNCH_FAILURE, "noexec"),
        (
            78,
            "hpctrain: `module load cuda/99` failed on n0",
            Cause.LAUNCH_FAILURE,
            "(exit code 78): hpctrain: `module load cuda/99` failed on n0",
        ),
    ],
)
def test_the_reason_is_told(code: int, line: str, cause: Cause, words: str, tmp_path: Path) -> None:
    run, slurm = fabricate(tmp_path), FakeSlurm()
    slurm.records[1] = ended(code)
    (run.layout.logs / "slurm-1.out").write_text(f"Loading modules\n{line}\n{SCRIPT}x: Success\n")
    row = statuses([run], cast(SlurmClient, slurm))[0]
    assert (row.state, words in row.reason) == (RunState.FAILED, True), row.reason
    assert script_end(run.layout, ended(code)) == (cause, row.reason)
    (seen,) = watch(tmp_path, cast(SlurmClient, slurm)).seen
    assert words in seen.reason
    assert (seen.outcome == "told") is (cause is Cause.CONFIG_ERROR), "which no other try mends"


def test_the_log_of_an_element_of_an_array(tmp_path: Path) -> None:
    run = fabricate(tmp_path)
    (run.layout.logs / "slurm-7_0.out").write_text(f"{SCRIPT}/a: No such file or directory\n")
    found = script_end(run.layout, ended(127, array_job_id=7))
    assert found is not None and "/a: No such file" in found[1]


def test_a_log_that_says_nothing_known(tmp_path: Path) -> None:
    """A hostile line is shown as printable text, and cut; another leaves what was told before."""
    run, slurm = fabricate(tmp_path), FakeSlurm()
    slurm.records[1] = ended(127)
    log = run.layout.logs / "slurm-1.out"
    for text in ("", "nothing of note\n"):
        log.write_text(text)
        assert script_end(run.layout, ended(127)) is None
        reason = statuses([run], cast(SlurmClient, slurm))[0].reason
        assert reason == "the job ended as FAILED, exit code 127 without a word of its supervisor"
    log.write_text(f"{SCRIPT}\x1b[2J{'x' * 900}: No such file or directory\n")
    found = script_end(run.layout, ended(127))
    assert found is not None and "\x1b" not in found[1] and len(found[1]) < 600


def test_a_supervisor_that_began_speaks_for_itself(tmp_path: Path) -> None:
    run, slurm = fabricate(tmp_path, entries=[*SUBMITTED, STARTED, LAUNCHED]), FakeSlurm()
    slurm.records[1] = ended(1)
    (run.layout.logs / "slurm-1.out").write_text(f"{SCRIPT}/a: No such file or directory\n")
    assert "No such file" not in statuses([run], cast(SlurmClient, slurm))[0].reason
