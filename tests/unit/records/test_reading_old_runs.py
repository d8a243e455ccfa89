"""Every command that reads a run directory reads one that an earlier version has written.

What the commands print is compared with what that version printed itself; `--write-golden` writes
it anew, which is right only where a later version means to print something else.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from command_line import hpctrain
from old_runs import ARCHIVES, NOVEMBER_2026, unpack

from hpctrain.records.find import RunFiles
from hpctrain.records.requests import user_name
from hpctrain.slurm.fake import FakeSlurm

COMMANDS = {
    "status": ("status", "{run}", "--json"),
    "status-table": ("status", "{run}"),
    "why": ("why", "{run}", "--json"),
    "describe": ("describe", "{run}"),
    "logs": ("logs", "{run}"),
    "logs-of-a-rank": ("logs", "{run}", "--rank", "0", "--attempt", "2"),
    "goodput": ("goodput", "{run}", "--json"),
    "checkpoints": ("checkpoints", "{run}", "--verify", "--json"),
    "diagnose": ("diagnose", "{run}", "--no-prices", "--json"),
    "nodes": ("nodes", "--json"),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFiles:
    """The old run, an hour after its last event."""
    unpacked = unpack(NOVEMBER_2026, tmp_path)
    now = unpacked.ledger.events()[-1].time + 3600
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr("hpctrain.slurm.client.SlurmClient", FakeSlurm)
    return unpacked


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_what_the_old_version_printed(
    run: RunFiles, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    words = [word.format(run=run.run_id) for word in COMMANDS[name]]
    outcome = hpctrain(*words, "--runs", str(tmp_path / "runs"))
    found = outcome.transcript().replace(str(tmp_path), "PLACE")
    found = found.replace(f'"owner": "{user_name()}"', '"owner": "OWNER"')
    found = re.sub(r'("free_bytes"|"fits"): \d+', r"\1: 0", found)
    expected = ARCHIVES / NOVEMBER_2026 / f"{name}.txt"
    if request.config.getoption("--write-golden"):
        expected.parent.mkdir(exist_ok=True)
        expected.write_text(found)
    assert found == expected.read_text()
