"""hpctrain is replaced under a run: it goes on with its own, and is moved on purpose."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rehearsal import Rehearsal, Stage, waits_for

import hpctrain
from hpctrain.records.find import RunFiles
from hpctrain.records.software import read_software
from hpctrain.runs.describe import describe
from hpctrain.version import __version__

pytestmark = pytest.mark.stand_in

NEWER = "0.2.0"


def install(site: Path, version: str, *, works: bool) -> None:
    """Another hpctrain appears in the Python of the run; one that does not work is half there."""
    shutil.rmtree(site, ignore_errors=True)
    package = Path(hpctrain.__file__).parent
    shutil.copytree(package, site / "hpctrain", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "hpctrain/version.py").write_text(f'__version__ = "{version}"\n')
    if not works:
        (site / "hpctrain/base/errors.py").unlink()


def installed_in(site: Path, rehearsal_python: Path) -> None:
    """The Python of the run finds `site` before anything else that is installed."""
    head, rest = rehearsal_python.read_text().split("\n", 1)
    path = f'"${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(str(site))}'
    rehearsal_python.write_text(f"{head}\nexport PYTHONPATH={path}\n{rest}")


def preempt(run: Rehearsal, step: int, attempts: int, epoch: int) -> None:
    run.wait_for_step(step - 1, epoch=epoch)
    run.urgent_job(nodes=run.nodes())
    run.wait(lambda: run.attempts > attempts, f"in attempt {attempts + 1}")


def test_a_run_keeps_its_hpctrain_until_it_is_moved(
    stage: Stage, reference: RunFiles, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    # each launch waits at these steps until it is asked to leave, or the test says the word
    run = stage.start(
        "name=upgraded",
        "supervise.software=locked",
        planned=(*waits_for("on", 15), *waits_for("on-again", 35)),
    )
    assert run.place is not None
    installed_in(site, run.place / "python")
    install(site, NEWER, works=False)

    preempt(run, 15, attempts=1, epoch=1)
    run.say("on")
    run.wait_for_step(34, epoch=2)
    install(site, NEWER, works=True)
    words = ("upgrade", run.run.run_id, "-y", "--reason=faster", f"--runs={stage.runs}")
    moved = subprocess.run(
        [sys.executable, "-P", "-m", "hpctrain", *words],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert moved.returncode == 0, moved.stderr
    assert f"imports hpctrain {NEWER}" in moved.stdout + moved.stderr
    # the attempt that runs has the old code, and its next launch decides nothing for the new one
    run.kill_rank(1)
    preempt(run, 35, attempts=2, epoch=3)
    run.say("on-again")
    run.assert_done_exactly(reference)

    found = {record.epoch: record.facts for record in read_software(run.run.layout)}
    versions = [found[epoch].hpctrain for epoch in sorted(found)]
    assert versions == [__version__] * 3 + [NEWER], run.logs()
    first, *others, last = (found[epoch].code for epoch in sorted(found))
    assert first is not None and {first} == set(others) and first != last
    story = describe(run.run)
    (change,) = story.software_changes
    assert change.epoch == max(found)
    assert change.changes == (f"hpctrain {__version__} ({first}) -> {NEWER} ({last})",)
    asked = [(request.action, request.reason) for request in story.asked]
    assert ("upgrade", "faster") in asked
